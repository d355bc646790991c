# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compare the log-probabilities of sampler and learner with a float64 forward pass of the same weights.

    python -m experiments.lab.parity models/smollm2-135m-instruct

If both deviate from float64 as much as a plain float32 forward pass, their difference is rounding. The forward pass is
written in numpy, for llama and Qwen3 checkpoints without rope scaling.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import Float, Int
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from levanter.models.qwen import Qwen3Config
from levanter.utils.activation import ActivationFunctionEnum
from safetensors.numpy import load_file

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments import ReasoningGymConfig
from marin_rl.learner.policy_model import load_hf_policy, read_hf_architecture
from marin_rl.learner.scoring import Scorer
from marin_rl.parts.rl import RunParts
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.types import Message, Rollout, RolloutStatus, Task, Turn
from marin_rl.utils.devices.trainer_config import TrainerConfig

MAX_LENGTH = 64
PROMPTS = (
    "Who likes tea? Ann likes tea. Bob likes milk.",
    "12 + 34 =",
    "Tell me a story about a dog.",
    "What is the capital of France?",
    "Write a poem.",
    "List three colors.",
    "Explain gravity.",
    "What day is it?",
    "How do I cook rice?",
    "Name a fruit.",
    "Translate hello into French.",
    "Who wrote Hamlet?",
    "What is 7 * 8?",
    "Give me advice.",
    "Describe the sea.",
    "Why is the sky blue?",
)

Weights: TypeAlias = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Sampled tokens and their log-probabilities (nats)."""

    tokens: tuple[int, ...]
    """Prompt and generation."""
    start: int
    """Position of the first generated token."""
    sampler: Float[np.ndarray, " new"]
    """Log-probabilities from the sampler."""
    learner: Float[np.ndarray, " new"]
    """Log-probabilities from the learner's scoring pass."""


def sample_and_score(config: TrainConfig, prompts: Sequence[str]) -> list[Sampled]:
    """Sample answers at temperature 1 and score them with the same weights.

    Args:
        config: run config with the checkpoint and the tokenizer.
        prompts: user messages.
    """
    parts = RunParts.start(config, alone=True)
    tokenizer, trainer = parts.tokenizer, parts.trainer
    model = load_hf_policy(str(config.initialize_from), tokenizer, trainer, None)
    requests = [
        SampleRequest(
            tokenizer.prompt_tokens([Message(role="user", content=prompt)]),
            seed,
            config.sampling.max_new_tokens,
            temperature=1.0,
        )
        for seed, prompt in enumerate(prompts)
    ]
    generations = parts.open_group_sampler(model, 0).sample(requests)
    task = Task("parity", "parity", ({"role": "user", "content": ""},), "")
    turns = [
        Turn(request.prompt_tokens, generation, (), starts_sequence=True)
        for request, generation in zip(requests, generations, strict=True)
    ]
    rollouts = [Rollout("parity", "parity", task, (turn,), RolloutStatus.COMPLETED, {"reward": 0.0}) for turn in turns]
    batch = batch_rollouts(rollouts, max_length=config.rollouts.max_length)
    scorer = Scorer(
        trainer,
        parts.layout,
        pad_token_id=tokenizer.pad_token_id,
        temperature=1.0,
        block_size=parts.logprob_block,
    )
    learner = batch.actions(scorer.score(model, batch).logprobs.astype(np.float64))
    return [
        Sampled(
            request.prompt_tokens + generation.token_ids,
            len(request.prompt_tokens),
            np.asarray(generation.logprobs, np.float64),
            logprobs,
        )
        for request, generation, logprobs in zip(requests, generations, learner, strict=True)
    ]


def llama_logprobs(
    config: LlamaConfig, weights: Weights, tokens: Sequence[int] | jax.Array, dtype: Any
) -> Float[np.ndarray, " rest"]:
    """Compute the log-probability of every token after the first with a plain forward pass.

    Args:
        config: model config, of a llama or a Qwen3.
        weights: arrays by Hugging Face name, in `dtype`. Those of numpy are computed with numpy; those of jax with jax,
            which can differentiate the result.
        tokens: one sequence.
        dtype: type of the trunk and the logits; the softmax over the vocabulary is always float64.
    """
    xp = weights["model.embed_tokens.weight"].__array_namespace__()
    ids: Int[np.ndarray, " position"] = xp.asarray(tokens)
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.attention_config().HeadSize.size
    angles = np.arange(len(ids))[:, None] / config.rope.theta ** (np.arange(0, size, 2) / size)
    cos, sin = (np.tile(turn(angles), 2)[:, None].astype(dtype) for turn in (np.cos, np.sin))
    visible = np.tril(np.ones((len(ids), len(ids)), bool))

    def project(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T

    def normalize(x: np.ndarray, name: str) -> np.ndarray:
        variance = (x * x).mean(axis=-1, keepdims=True)
        return x / xp.sqrt(variance + dtype(config.layer_norm_epsilon)) * weights[f"{name}.weight"]

    def rotate(x: np.ndarray, norm: str) -> np.ndarray:
        x = normalize(x, norm) if f"{norm}.weight" in weights else x
        return x * cos + xp.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1) * sin

    def attend(x: np.ndarray, name: str) -> np.ndarray:
        query = rotate(project(x, f"{name}.q_proj").reshape(len(ids), heads, size), f"{name}.q_norm")
        key = rotate(project(x, f"{name}.k_proj").reshape(len(ids), kv_heads, size), f"{name}.k_norm")
        value = project(x, f"{name}.v_proj").reshape(len(ids), kv_heads, size)
        key, value = (xp.repeat(array, heads // kv_heads, axis=1) for array in (key, value))
        scores = xp.where(visible, xp.einsum("qhd,khd->hqk", query, key) / dtype(size**0.5), -np.inf)
        shares = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = shares / shares.sum(axis=-1, keepdims=True)
        mixed = xp.einsum("hqk,khd->qhd", shares, value).reshape(len(ids), heads * size)
        return project(mixed, f"{name}.o_proj")

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        x = x + attend(normalize(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        after = normalize(x, f"{name}.post_attention_layernorm")
        gate = project(after, f"{name}.mlp.gate_proj")
        x = x + project(gate / (1 + xp.exp(-gate)) * project(after, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    logits = project(normalize(x, "model.norm")[:-1], head).astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    logprobs = logits - xp.log(xp.exp(logits).sum(axis=-1, keepdims=True))
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


def float64_gradient(
    config: LlamaConfig, weights: Weights, sequences: Sequence[tuple[Sequence[int], int]]
) -> dict[str, np.ndarray]:
    """Compute the gradient of the mean negative log-probability, in float64 on the CPU.

    Args:
        config: model config, as for `llama_logprobs`.
        weights: arrays by Hugging Face name.
        sequences: tokens, and the position of the first token with loss, at least 1.

    Returns:
        Gradient by Hugging Face name.
    """
    longest, count = max(len(tokens) for tokens, _ in sequences), sum(len(tokens) - at for tokens, at in sequences)

    def loss(weights: Weights, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return -jnp.sum(jnp.where(mask, jnp.asarray(llama_logprobs(config, weights, tokens, np.float64)), 0)) / count

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arrays = {name: jnp.asarray(np.asarray(array, np.float64)) for name, array in weights.items()}
        total = jax.tree.map(jnp.zeros_like, arrays)
        differentiate = jax.jit(jax.grad(loss))
        for tokens, first in sequences:
            # Tokens after a sequence change nothing before them.
            padded, at = np.pad(tokens, (0, longest - len(tokens))), np.arange(1, longest)
            gradient = differentiate(arrays, padded, (at >= first) & (at < len(tokens)))
            total = jax.tree.map(jnp.add, total, gradient)
        return jax.tree.map(np.asarray, total)


def measure(
    folder: str, prompts: Sequence[str] = PROMPTS, max_new_tokens: int = 12, dtype: str = "float32"
) -> dict[str, np.ndarray]:
    """Compute absolute differences of log-probabilities (nats), one per sampled token.

    Args:
        folder: a llama or Qwen3 checkpoint in Hugging Face format, with one safetensors file.
        prompts: user messages.
        max_new_tokens: maximum number of new tokens per answer.
        dtype: type of computation and of the KV cache, `float32` or `bfloat16`; parameters are float32.

    Returns:
        Differences by name of the comparison.

    Raises:
        ValueError: if the checkpoint is not a llama or Qwen3 without rope scaling in one file.
    """
    architecture = read_hf_architecture(folder)
    if not isinstance(architecture, LlamaConfig) or type(architecture) not in (LlamaConfig, Qwen3Config):
        name = type(architecture).__name__
        raise ValueError(f"{folder} holds a {name}; the numpy forward pass supports llama and Qwen3 only")
    if type(architecture.rope) is not DefaultRotaryEmbeddingsConfig:
        raise ValueError(f"{folder} has rope_scaling in config.json; the numpy forward pass does not support it")
    if architecture.activation_function not in (ActivationFunctionEnum.silu, ActivationFunctionEnum.swish):
        raise ValueError(f"{folder} has the hidden_act {architecture.activation_function.value!r}, expected 'silu'")
    if not Path(folder, "model.safetensors").exists():
        raise ValueError(f"{folder} has no model.safetensors; save the checkpoint again with one file of weights")
    config = TrainConfig(
        run_dir="runs/parity",
        environment=ReasoningGymConfig(task="chain_sum"),
        initialize_from=folder,
        tokenizer=TokenizerConfig(folder),
        rollouts=RolloutConfig(max_length=MAX_LENGTH),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens, max_seqs=len(prompts), kv_cache_dtype=dtype),
        trainer=dataclasses.replace(TrainerConfig(), mp=jmp.get_policy(f"params=float32,compute={dtype}")),
    )
    sampled = sample_and_score(config, prompts)
    logprobs = {
        "sampler": np.concatenate([one.sampler for one in sampled]),
        "learner": np.concatenate([one.learner for one in sampled]),
    }
    stored = load_file(Path(folder) / "model.safetensors")
    for name, kind in (("numpy float32", np.float32), ("float64", np.float64)):
        weights = {key: array.astype(kind) for key, array in stored.items()}
        logprobs[name] = np.concatenate(
            [llama_logprobs(architecture, weights, one.tokens, kind)[one.start - 1 :] for one in sampled]
        )
    pairs = [("sampler", "learner"), *((name, "float64") for name in ("sampler", "learner", "numpy float32"))]
    return {f"{one} - {other}": np.abs(logprobs[one] - logprobs[other]) for one, other in pairs}


def main() -> None:
    """Print the differences."""
    parser = argparse.ArgumentParser(description="Compare sampler and learner with a float64 forward pass.")
    parser.add_argument("folder", help="llama or Qwen3 checkpoint in Hugging Face format")
    differences = measure(parser.parse_args().folder)
    print(f"{'|difference| in nats':<24} {'mean':>9} {'99%':>9} {'most':>9}")
    for name, values in differences.items():
        print(f"{name:<24} {values.mean():9.1e} {np.quantile(values, 0.99):9.1e} {values.max():9.1e}")


if __name__ == "__main__":
    main()
