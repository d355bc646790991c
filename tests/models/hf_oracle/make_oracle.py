# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Record the outputs of transformers for tiny checkpoints: `python make_oracle.py`, with torch, in two steps.

The records in this folder were made with torch 2.15.0 and transformers 4.57.6 in float64 (step `logprobs`), then with
transformers 5.23.0 (step `version5`, which needs no torch); those of attention windows with torch 2.14.1 and
transformers 5.12.1. None of them is needed to run the tests.

    python make_oracle.py logprobs   # with transformers 4: config, tensor shapes and outputs
    python make_oracle.py version5   # with transformers 5: the config of each case as that version writes it

Weights are not recorded: `weights` draws them from the names of the tensors.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
VOCAB = 264
LENGTH = 48
PROMPT_LENGTHS = (1, 14)
"""Number of tokens of each row that are continued greedily."""
GREEDY_TOKENS = 10
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
YARN_MSCALE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5, "truncate": False}
GEMMA = {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": None}
LAYERS = ["sliding_attention", "full_attention"]
QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4}
QWEN3_MOE |= {"num_experts_per_tok": 2, "norm_topk_prob": True}

CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 500000.0},
    "llama_linear": {"model_type": "llama", "rope_scaling": LINEAR},
    "llama_llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama_yarn": {"model_type": "llama", "rope_scaling": YARN_MSCALE, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "qwen2_linear": {"model_type": "qwen2", "rope_scaling": LINEAR},
    "qwen2_yarn": {"model_type": "qwen2", "rope_theta": 1000000.0, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000000.0, "head_dim": 16},
    "qwen3_llama3": {"model_type": "qwen3", "rope_scaling": LLAMA3, "head_dim": 16},
    "qwen3_yarn": {"model_type": "qwen3", "rope_theta": 1000000.0, "rope_scaling": YARN, "head_dim": 16},
    "qwen3_moe": {**QWEN3_MOE, "rope_theta": 1000000.0},
    "qwen3_moe_dense": {
        **QWEN3_MOE,
        **{"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False},
        "tie_word_embeddings": True,
    },
    "qwen3_moe_window": {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 10},
    "mistral": {"model_type": "mistral", "sliding_window": 48},
    "mistral_window": {"model_type": "mistral", "sliding_window": 10},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {"model_type": "olmo2", "rope_theta": 500000.0},
    "olmo2_linear": {"model_type": "olmo2", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "olmo3": {"model_type": "olmo3", "rope_theta": 500000.0, "sliding_window": 10, "layer_types": LAYERS},
    "olmo3_yarn": {"model_type": "olmo3", "rope_scaling": YARN, "sliding_window": 10, "layer_types": LAYERS},
    "gemma": {"model_type": "gemma", "head_dim": 8},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "sliding_window": 48},
    "gemma2_linear": {**GEMMA, "attn_logit_softcapping": None, "sliding_window": 48, "rope_scaling": LINEAR},
    "gemma2_window": {**GEMMA, "attn_logit_softcapping": 2.0, "sliding_window": 10},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Settings of each case in config.json, in addition to `SIZES` (except GPT-2, which uses other key names)."""


def config_json(case: str) -> dict[str, Any]:
    """Return the config of a case as transformers 4 writes it."""
    sizes = {} if case == "gpt2" else SIZES
    return {**sizes, **CASES[case], "transformers_version": "4.57.6"}


def token_ids() -> np.ndarray:
    """Return two rows of tokens, `[2, LENGTH]`."""
    return np.random.default_rng(0).integers(3, VOCAB, (2, LENGTH)).astype(np.int32)


def weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Return the tensors of a case, float32: scales of normalizations around 1, the rest around 0."""
    tensors = {}
    for name, shape in shapes.items():
        draw = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
        is_scale = name.endswith("weight") and len(shape) == 1
        tensors[name] = (1 + 0.2 * draw if is_scale else 0.15 * draw).astype(np.float32)
    return tensors


def loss_weights() -> np.ndarray:
    """Return the coefficients of the log-probabilities in the loss with a recorded gradient, `[2, LENGTH - 1]`."""
    return np.random.default_rng(1).normal(size=(2, LENGTH - 1)).astype(np.float32)


def direction(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a random unit vector in the space of a tensor, float64."""
    draw = np.random.default_rng(zlib.crc32(f"direction of {name}".encode())).normal(size=shape)
    return draw / np.linalg.norm(draw)


def summarize_gradient(name: str, gradient: np.ndarray) -> tuple[float, float]:
    """Return the norm of a tensor's gradient, and its derivative along the tensor's `direction`."""
    exact = gradient.astype(np.float64)
    return float(np.linalg.norm(exact)), float(np.sum(exact * direction(name, exact.shape)))


def record_logprobs() -> None:
    """Write config, tensor shapes and outputs of every case, and keep `config_version5`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for case in CASES:
        config = config_json(case)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            hf_config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").double().eval()
        tied = set(model._tied_weights_keys or ()) if hf_config.tie_word_embeddings else set()
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
        tensors = {name: torch.from_numpy(array).double() for name, array in weights(shapes).items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert set(missing) <= tied, missing
        assert not unexpected, unexpected
        model.tie_weights()
        ids = torch.from_numpy(token_ids()).long()
        logs = torch.log_softmax(model(ids).logits[:, :-1], -1)
        logprobs = torch.gather(logs, -1, ids[:, 1:, None])[..., 0]
        (logprobs * torch.from_numpy(loss_weights()).double()).sum().backward()
        path = FOLDER / f"{case}.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        record |= {
            "config": config,
            "tensors": shapes,
            "logprobs": logprobs.detach().numpy().astype(float).round(7).tolist(),
            "gradients": {
                name: [float(f"{value:.8g}") for value in summarize_gradient(name, tensor.grad.numpy())]
                for name, tensor in model.named_parameters()
            },
            "greedy": [continue_greedily(model, row[:length]) for row, length in zip(ids, PROMPT_LENGTHS, strict=True)],
        }
        path.write_text(json.dumps(record) + "\n")
        print(case, logprobs.mean().item(), logprobs.std().item())


def continue_greedily(model: Any, prompt: Any) -> dict[str, list]:
    """Return the most probable next tokens of a torch model, and their log-probabilities."""
    import torch

    tokens, logprobs = prompt, []
    with torch.no_grad():
        for _ in range(GREEDY_TOKENS):
            logs = torch.log_softmax(model(tokens[None]).logits[0, -1], -1)
            tokens = torch.cat([tokens, logs.argmax()[None]])
            logprobs.append(round(logs.max().item(), 7))
    return {"tokens": tokens[len(prompt) :].tolist(), "logprobs": logprobs}


def record_version5() -> None:
    """Add to every record its config as transformers 5 writes it."""
    from transformers import AutoConfig

    for case in CASES:
        path = FOLDER / f"{case}.json"
        record = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(record["config"]))
            AutoConfig.from_pretrained(folder).save_pretrained(folder)
            record["config_version5"] = json.loads(Path(folder, "config.json").read_text())
        path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    {"logprobs": record_logprobs, "version5": record_version5}[sys.argv[1]]()
