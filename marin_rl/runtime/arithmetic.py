# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a config amounts to, in numbers, before anything runs."""

import math

import jax
from haliax import Axis

from marin_rl.learner.policy_model import model_shape
from marin_rl.runtime.config import TrainConfig
from marin_rl.tokenization.chat import ChatTokenizer


def describe_run(config: TrainConfig, tokenizer: ChatTokenizer, train_tasks: int) -> str:
    """The token and step arithmetic of a run, for `--dry_run`.

    Args:
        config: what would be run; its `model` filled in.
        tokenizer: its vocabulary is the model's, from scratch.
        train_tasks: distinct training tasks there are.
    """
    assert config.model is not None
    rollouts, limits = config.rollouts, config.sampling
    shape = model_shape(config.model, Axis("vocab", tokenizer.vocab_size), config.trainer)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shape))
    per_step = rollouts.rollouts_per_step
    block = min(config.logprob_block_size, rollouts.max_length)
    prompts = rollouts.prompts_per_step * config.num_steps
    lines = [
        ("parameters", f"{parameters:,}, vocabulary {tokenizer.vocab_size:,}"),
        (
            "one update",
            f"{rollouts.prompts_per_step:,} prompts x {rollouts.group_size} attempts = {per_step:,} rollouts",
        ),
        ("batch", f"{per_step:,} rows x {rollouts.max_length:,} positions = {per_step * rollouts.max_length:,} tokens"),
        ("sampled per update", f"at most {per_step * rollouts.max_turns * limits.max_new_tokens:,} tokens"),
        (
            "the run",
            f"{config.num_steps:,} updates, {per_step * config.num_steps:,} rollouts, "
            f"{prompts / train_tasks:.2f} passes over {train_tasks:,} training tasks",
        ),
        (
            "logits at a time",
            f"{per_step:,} x {block:,} x {tokenizer.vocab_size:,} floats, "
            "over the data-parallel devices and microbatches",
        ),
        ("evaluations", f"{_evaluations(config):,}, of {config.evaluation.tasks:,} held-out tasks"),
        ("reference model", "yes" if config.kl.needs_reference else "not loaded, the KL coefficient is 0"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _evaluations(config: TrainConfig) -> int:
    before = 2 if config.warm_start.max_steps else 1
    every = config.evaluation.every
    during = max(config.num_steps - 1, 0) // every if every else 0
    return before + during + (1 if config.num_steps else 0)
