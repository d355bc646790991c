# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sizes of a run, computed from its config: parameters, rollouts, tokens, microbatches, updates and evaluations."""

import contextlib

from marin_rl.config.sections import EvaluationConfig, WarmStartConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.attention_kernel import PLATFORMS, attention_kernel
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.run_parts import LOGPROB_BLOCK_SIZE
from marin_rl.utils.devices.setup import microbatch_rows

_WIDTH = 18
"""Width of the names of quantities."""


def format_quantity(name: str, value: str) -> str:
    """Format a line of a table of quantities."""
    return f"{name:<{_WIDTH}}  {value}"


def describe_run(config: TrainConfig, vocab_size: int, *, train_tasks: int, held_out_tasks: int) -> str:
    """Describe the token and step counts of a run.

    Args:
        config: training config; `model` is set.
        vocab_size: vocabulary size of the policy.
        train_tasks: number of distinct training tasks.
        held_out_tasks: number of tasks of each evaluation; may be less than `evaluation.tasks`.

    Returns:
        One `name  value` line per quantity.
    """
    assert config.model is not None
    rollouts, limits = config.rollouts, config.sampling
    parameters = PolicySpec(config.model, vocab_size, config.trainer).num_parameters
    per_step, updates = rollouts.rollouts_per_step, config.updates
    evaluations = _count_evaluations(config.evaluation, config.warm_start, config.num_steps)
    microbatches: dict[str, tuple[int, int]] = {}
    for name in PLATFORMS:
        # Config validation has already rejected a row length that no platform supports.
        with contextlib.suppress(ValueError):
            row_length = rollouts.positions(attention_kernel(config.model, name))
            microbatches[name] = (microbatch_rows(config.trainer, rollouts.rows_per_device(name)), row_length)
    (platform, (rows, positions)), *others = microbatches.items()
    elsewhere = "".join(f"; {count:,} x {length:,} on {name}" for name, (count, length) in others)
    share = {True: "several sequences", False: "one sequence", None: "one or several sequences"}[rollouts.packing]
    block = min(config.logprob_block_size or LOGPROB_BLOCK_SIZE[platform], rows * positions)
    prompts = rollouts.prompts_per_step * config.num_steps
    resampling = f", {config.filter.max_batches} times that with resampling" if config.filter.max_batches > 1 else ""
    critic = "none"
    if config.critic is not None:
        critic = "one output on the policy's trunk" if config.critic.shared_trunk else "a separate trunk"
    lines = [
        ("parameters", f"{parameters:,}, vocabulary {vocab_size:,}"),
        (
            "one step",
            f"{rollouts.prompts_per_step:,} prompts x {rollouts.group_size} attempts = {per_step:,} rollouts",
        ),
        ("sampled per step", f"at most {per_step * rollouts.max_turns * limits.max_new_tokens:,} tokens{resampling}"),
        (
            "updates per step",
            f"{updates.per_step:,} = {updates.epochs:,} x {updates.minibatches:,} (epochs x minibatches)",
        ),
        (
            "one microbatch",
            f"{rows:,} rows x {positions:,} positions = {rows * positions:,} tokens on each data-parallel device, "
            f"{share} in a row{elsewhere}",
        ),
        (
            "the run",
            f"{config.num_steps:,} steps, {updates.per_step * config.num_steps:,} updates, "
            f"{per_step * config.num_steps:,} rollouts, each of {train_tasks:,} training tasks "
            f"{prompts / train_tasks:.2f} times",
        ),
        (
            "logits at a time",
            f"{block:,} tokens x {vocab_size:,} floats on each data-parallel device",
        ),
        ("evaluations", f"{evaluations:,}, of {held_out_tasks:,} held-out tasks"),
        ("reference model", "yes" if config.kl.needs_reference else "not loaded, the KL coefficient is 0"),
        ("critic", critic),
    ]
    return "\n".join(format_quantity(name, value) for name, value in lines)


def _count_evaluations(evaluation: EvaluationConfig, warm_start: WarmStartConfig, num_steps: int) -> int:
    if evaluation.tasks == 0:
        return 0
    before = 2 if warm_start.max_steps else 1
    during = max(num_steps - 1, 0) // evaluation.every if evaluation.every else 0
    return before + during + (1 if num_steps else 0)
