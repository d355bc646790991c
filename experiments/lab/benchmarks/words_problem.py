# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The problem of `benchmark_end_to_end`: sizes, weights, tokenizer, prompts and the config of marin_rl; and its runs.

    python -m experiments.lab.benchmarks.words_problem prepare FOLDER --size tiny
    python -m experiments.lab.benchmarks.words_problem train FOLDER --run_dir DIR --steps 8 --cache DIR
    python -m experiments.lab.benchmarks.words_problem matmul

Separate processes of the benchmark, so that each has its own cores, programs and memory.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax import monitoring
from levanter.models.lm_model import LmHeadModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import marin_rl.train
from experiments.lab.benchmarks.measurement import COMPILE_EVENT, timed
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
from marin_rl.utils.devices.setup import start_devices

PAD, END = 0, 1


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and of a step."""

    hidden: int
    """Hidden dimension."""
    intermediate: int
    """Hidden dimension of an MLP."""
    layers: int
    """Decoder layers."""
    heads: int
    """Attention heads; each has its own keys and values."""
    vocabulary: int
    """Tokens; the embedding is also the output head."""
    prompts: int = 16
    """Prompts of a step."""
    group_size: int = 8
    """Answers to each prompt."""
    prompt_tokens: int = 32
    """Tokens of each prompt."""
    new_tokens: int = 64
    """Tokens of each answer."""

    @property
    def rollouts(self) -> int:
        """Rollouts of a step."""
        return self.prompts * self.group_size

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and an answer."""
        return self.prompt_tokens + self.new_tokens

    @property
    def matrix_parameters(self) -> int:
        """Parameters of a token's matrix products without the output head."""
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """All parameters: matrices, embedding and norms."""
        return self.matrix_parameters + self.vocabulary * self.hidden + (2 * self.layers + 1) * self.hidden

    def _forward_flops(self, tokens: int, attended: int, with_head: int) -> int:
        """Floating-point operations of a forward pass.

        `2 · matrix parameters · tokens + 4 · layers · hidden · attended + 2 · hidden · vocabulary · with_head`, where
        `attended` counts pairs of a query and a key.
        """
        matrices = 2 * self.matrix_parameters * tokens
        attention = 4 * self.layers * self.hidden * attended
        return matrices + attention + 2 * self.hidden * self.vocabulary * with_head

    @property
    def sampling_flops(self) -> int:
        """Operations to sample a step's answers, with each prompt read once per group."""
        prefill = self._forward_flops(self.prompt_tokens, _pairs(0, self.prompt_tokens), 0)
        # The last token is sampled but not read.
        read = self.new_tokens - 1
        answer = self._forward_flops(read, _pairs(self.prompt_tokens, read), self.new_tokens)
        return self.prompts * prefill + self.rollouts * answer

    @property
    def training_flops(self) -> int:
        """Operations of forward and backward passes over whole rollouts (3 forward passes), head on answers only."""
        length = self.max_length
        return 3 * self.rollouts * self._forward_flops(length, _pairs(0, length), self.new_tokens)


def _pairs(before: int, tokens: int) -> int:
    """Return the pairs of query and key of `tokens` causal queries after `before` tokens.

    >>> _pairs(0, 3), _pairs(10, 2)
    (6, 23)
    """
    return tokens * before + tokens * (tokens + 1) // 2


SIZES = {
    "tiny": Size(hidden=128, intermediate=384, layers=4, heads=4, vocabulary=512),
    "small": Size(hidden=512, intermediate=1376, layers=8, heads=8, vocabulary=32_000),
}

OPTIMIZER = {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "max_grad_norm": 1.0}
"""Settings of AdamW in all compared programs; the learning rate is constant and there is no weight decay."""


def words_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a padding token, an end token, and the words w2, w3 ...

    >>> words_tokenizer(8)("w2 w7")["input_ids"]
    [2, 7]
    """
    vocab = {"<pad>": PAD, "<end>": END, **{f"w{number}": number for number in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = cast(Any, pre_tokenizers).WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def without_special_tokens(model: LmHeadModel) -> LmHeadModel:
    """Change the weights so that neither end nor padding is ever sampled, and all answers have the maximum length.

    The first feature of the embeddings is 1, and -200 in those of the two tokens; the layers do not change it. As the
    embeddings are also the output head, this lowers the two logits by about 100 nats relative to all others.
    """

    def zero_first_output(weight: hax.NamedArray) -> hax.NamedArray:
        return weight * (hax.arange(weight.resolve_axis("embed")) != 0)

    def mark_special(weight: hax.NamedArray) -> hax.NamedArray:
        array = weight.rearrange(("vocab", "embed")).array
        return hax.named(array.at[:, 0].set(1.0).at[jnp.array((PAD, END)), 0].set(-200.0), weight.axes)

    def embeddings(whole: LmHeadModel) -> hax.NamedArray:
        return cast(Any, whole).embeddings.token_embeddings.weight

    def outputs(whole: LmHeadModel) -> list[hax.NamedArray]:
        layers = cast(Any, whole).transformer.layers.stacked
        return [layers.self_attn.o_proj.weight, layers.mlp.down_proj.weight]

    model = eqx.tree_at(embeddings, model, replace_fn=mark_special)
    return eqx.tree_at(outputs, model, replace_fn=zero_first_output)


def run_config(size: Size, folder: Path) -> dict[str, Any]:
    """Return a config of marin_rl with its defaults, apart from sizes, optimizer and the absence of an evaluation."""
    return {
        "environment": {
            "type": "file",
            "path": str(Path(__file__).with_name("words_environment.py")),
            "name": "make_words",
            "options": {"path": str(folder / "prompts.json")},
        },
        "initialize_from": str(folder / "model"),
        "tokenizer": {"path": str(folder / "tokenizer"), "chat_template": "plain"},
        "model": {
            "type": "llama",
            "seq_len": size.max_length,
            "hidden_dim": size.hidden,
            "intermediate_dim": size.intermediate,
            "num_layers": size.layers,
            "num_heads": size.heads,
            "num_kv_heads": size.heads,
            "tie_word_embeddings": True,
            "gradient_checkpointing": False,
        },
        "rollouts": {
            "prompts_per_step": size.prompts,
            "group_size": size.group_size,
            "max_length": size.max_length,
        },
        "sampling": {"max_new_tokens": size.new_tokens},
        "optimizer": {"type": "adam", "lr_schedule": "constant", "warmup": 0, "weight_decay": 0.0, **OPTIMIZER},
        "evaluation": {"tasks": 0},
    }


def prepare(size: Size, folder: Path, seed: int = 0) -> None:
    """Write weights and tokenizer in Hugging Face format, prompts, sizes, and the config of marin_rl.

    Args:
        size: sizes of model and step.
        folder: existing folder for the files.
        seed: seed of weights and prompts.
    """
    drawn = np.random.default_rng(seed).integers(2, size.vocabulary, size=(size.prompts, size.prompt_tokens))
    prompts = [" ".join(f"w{token}" for token in prompt) for prompt in drawn.tolist()]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    problem = {**dataclasses.asdict(size), **OPTIMIZER, "seed": seed}
    (folder / "problem.json").write_text(json.dumps(problem))
    words_tokenizer(size.vocabulary).save_pretrained(folder / "tokenizer")
    values = run_config(size, folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    arguments = ["--config", str(folder / "config.yaml"), "--run_dir", str(folder / "unused")]
    config = parse_config(TrainConfig, arguments).config
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=1)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(seed))
    with trainer.use_device_mesh():
        model = without_special_tokens(model)
    save_hf_policy(model, tokenizer, folder / "model", trainer)


def train(folder: Path, run_dir: Path, steps: int, cache: Path) -> int:
    """Run `marin_rl.train` in this process, and write the time and seconds of each compiled program to a file.

    Args:
        folder: files from `prepare`.
        run_dir: new run directory; the compiled programs are in `compiles.jsonl` next to it.
        steps: number of RL steps.
        cache: folder of jax's persistent compilation cache.

    Returns:
        Exit status of `marin_rl.train`.
    """
    compiles = run_dir.with_suffix(".compiles.jsonl")

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            with compiles.open("a") as file:
                file.write(json.dumps({"at": time.time(), "seconds": duration_secs}) + "\n")

    monitoring.register_event_duration_secs_listener(listen)
    arguments = ["--config", str(folder / "config.yaml"), "--run_dir", str(run_dir), "--num_steps", str(steps)]
    return marin_rl.train.main([*arguments, "--trainer.jax_compilation_cache_dir", str(cache)])


def matmul_rate(size: int = 512, repeats: int = 200) -> float:
    """Return the best measured rate of a float32 matrix product, in operations per second."""
    square = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)
    multiply = jax.jit(jnp.matmul)

    def once() -> None:
        multiply(square, square).block_until_ready()

    once()
    return 2 * size**3 / min(timed(once) for _ in range(repeats))


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare files, train, or print the rate of matrix products."""
    parser = argparse.ArgumentParser(description="Processes of benchmark_end_to_end")
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("--size", choices=SIZES, required=True)
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("--run_dir", type=Path, required=True)
    training.add_argument("--steps", type=int, required=True)
    training.add_argument("--cache", type=Path, required=True)
    commands.add_parser("matmul")
    arguments = parser.parse_args(argv)
    if arguments.command == "prepare":
        prepare(SIZES[arguments.size], arguments.folder)
        return 0
    if arguments.command == "train":
        return train(arguments.folder, arguments.run_dir, arguments.steps, arguments.cache)
    print(matmul_rate())
    return 0


if __name__ == "__main__":
    sys.exit(main())
