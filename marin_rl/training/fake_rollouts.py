# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training on synthetic rollouts of given lengths: random tokens with random rewards, and no sampler."""

import dataclasses
import functools
import re
import resource
import statistics
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from levanter.trainer_state import TrainerState

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import policy_of
from marin_rl.run_parts import RunParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.rollout_store import RolloutStoreConfig
from marin_rl.runs.run_directory import RunDirectory, require_checkpoint
from marin_rl.training.batch_builder import make_batch_builder
from marin_rl.training.replay import timed_step
from marin_rl.training.starting_weights import first_policy
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from marin_rl.utils.devices.setup import device_peak_bytes
from marin_rl.utils.seeds import derive_seed

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclasses.dataclass(frozen=True)
class FakeShape:
    """Sizes of the synthetic rollouts of a step."""

    groups: int
    """Number of groups."""
    group_size: int
    """Rollouts per group."""
    prompt: tuple[int, int]
    """Minimum and maximum tokens of a prompt."""
    completion: tuple[int, int]
    """Minimum and maximum sampled tokens of a rollout."""
    steps: int
    """Number of steps; the first one compiles."""

    @property
    def longest(self) -> int:
        """Maximum tokens of a rollout."""
        return self.prompt[1] + self.completion[1]


def parse_shape(text: str, rollouts: RolloutConfig) -> FakeShape:
    """Parse a shape such as `groups=16,group_size=8,prompt=32,completion=16-64,steps=4`.

    `prompt` and `completion` are required; each is a number of tokens, or a range from which lengths are drawn. By
    default there are `rollouts.prompts_per_step` groups of `rollouts.group_size`, and 4 steps.

    Args:
        text: the shape.
        rollouts: defaults and limits.

    Raises:
        ValueError: if a name is unknown, missing or repeated, a number is invalid, or a rollout is longer than
            `rollouts.max_length`.
    """
    given: dict[str, tuple[int, int]] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        match = _RANGE.fullmatch(value)
        first, last = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if name not in ("groups", "group_size", "prompt", "completion", "steps") or name in given:
            raise ValueError(
                f"--fake {text!r}: {name!r} is repeated or unknown; write groups=16,group_size=8,prompt=32,"
                "completion=16-64,steps=4"
            )
        if not 1 <= first <= last or (first < last and name not in ("prompt", "completion")):
            kind = "a number or a range such as 16-64" if name in ("prompt", "completion") else "a number"
            raise ValueError(f"--fake {text!r}: {name} is {value!r}; it must be {kind}, at least 1")
        given[name] = first, last
    if missing := [name for name in ("prompt", "completion") if name not in given]:
        raise ValueError(f"--fake {text!r} has no {' and no '.join(missing)}; add {missing[0]}=32")
    defaults = {"groups": rollouts.prompts_per_step, "group_size": rollouts.group_size, "steps": 4}
    counts = {name: given[name][0] if name in given else default for name, default in defaults.items()}
    shape = FakeShape(**counts, prompt=given["prompt"], completion=given["completion"])
    if shape.longest > rollouts.max_length:
        raise ValueError(
            f"--fake {text!r}: rollouts of {shape.longest} tokens exceed rollouts.max_length, "
            f"{rollouts.max_length}; add --rollouts.max_length {shape.longest}, or lower prompt or completion"
        )
    return shape


class FakeRun(NamedTuple):
    """Measurements of training on synthetic rollouts."""

    rollouts: int
    """Rollouts per step."""
    tokens: int
    """Tokens of all rollouts of a step, prompts included."""
    first_step_seconds: float
    """Seconds of the first step, which compiles."""
    median: dict[str, float]
    """Medians over the other steps, if any, of the metrics of training, rates and seconds by phase."""
    tokens_per_second: float
    """`tokens` over the median seconds of a step."""
    device_peak_bytes: int | None
    """Peak memory of the fullest device; None if it is not tracked (CPU)."""
    host_peak_bytes: int
    """Peak memory of this process on the host."""


def train_on_fake(
    config: TrainConfig, shape: FakeShape, directory: RunDirectory | None = None, step: int | None = None
) -> FakeRun:
    """Train on the same synthetic rollouts for some steps. Nothing is stored.

    Args:
        config: training config; `model` is set.
        shape: sizes of the rollouts.
        directory: run whose weights and optimizer state are used; None starts as a new run would, without warm start.
        step: step of the run's checkpoint; None for the newest one.

    Raises:
        CheckpointError: if the run has no such checkpoint, or it does not fit the config.
        ValueError: if the config does not allow groups of this size.
    """
    sizes = dataclasses.replace(config.rollouts, prompts_per_step=shape.groups, group_size=shape.group_size)
    config = dataclasses.replace(config, rollouts=sizes, rollout_store=RolloutStoreConfig(every=0))
    parts = RunParts.start(config)
    state, first_step, vocab_size = _starting_state(parts, directory, step)
    groups = make_groups(shape, vocab_size, config.seed, first_step)
    groups = _as_sampled(groups, parts, state)
    reference = None
    if config.kl.needs_reference:
        # The updates donate the weights.
        policy = policy_of(state.model)
        copied = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, policy)
        reference = functools.partial(parts.scorer.score, copied)
    builder = make_batch_builder(parts, parts.scorer.score, reference)
    steps = []
    for number in range(first_step + 1, first_step + 1 + shape.steps):
        trained, metrics = timed_step(parts.model, parts.learner, builder, state, groups, number, vocab_size)
        state = trained.state
        steps.append(metrics)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    median = {name: statistics.median(metrics[name] for metrics in steps[1:] or steps) for name in steps[0]}
    return FakeRun(
        rollouts=len(rollouts),
        tokens=tokens,
        first_step_seconds=steps[0]["seconds/total"],
        median=median,
        tokens_per_second=tokens / median["seconds/total"],
        device_peak_bytes=device_peak_bytes(),
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _starting_state(parts: RunParts, directory: RunDirectory | None, step: int | None) -> tuple[TrainerState, int, int]:
    """Return the training state, its step and the vocabulary size of the model."""
    config = parts.config
    if directory is None:
        policy = first_policy(config.initialize_from, parts.model, parts.tokenizer, parts.trainer, config.seed)
        vocab_size = policy.vocab_size
        return parts.first_state(policy), 0, vocab_size
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint)
    require_checkpoint(str(directory.path), directory.checkpoints, step)
    checkpoint = checkpoints.newest_good() if step is None else checkpoints.open(step)
    assert checkpoint is not None
    state = parts.saved_spec(checkpoint).restore_state(checkpoint, parts.learner)
    return state, checkpoint.step, int(checkpoint.progress["vocab_size"])


def make_groups(shape: FakeShape, vocab_size: int, seed: int, version: int) -> list[RolloutGroup]:
    """Make groups with random tokens, lengths and rewards between 0 and 1.

    Args:
        shape: sizes.
        vocab_size: token ids are below it.
        seed: seed of all random numbers.
        version: weight version of the rollouts.

    Returns:
        Groups whose rollouts share a prompt. Log-probs are those of a uniform distribution.
    """
    random = np.random.default_rng(derive_seed(seed, "fake rollouts"))
    logprob = -float(np.log(vocab_size))

    def tokens(lengths: tuple[int, int]) -> tuple[int, ...]:
        return tuple(random.integers(vocab_size, size=random.integers(lengths[0], lengths[1] + 1)).tolist())

    groups = []
    for number in range(shape.groups):
        name, prompt = f"fake-{number}", tokens(shape.prompt)
        task = Task(name, "fake", ({"role": "user", "content": ""},), "")
        rollouts = []
        for index in range(shape.group_size):
            sampled = tokens(shape.completion)
            generation = Generation(sampled, (logprob,) * len(sampled), StopReason.STOP, version, version)
            turn = Turn(prompt, generation, (), anchor_state=name, starts_sequence=True)
            rewards = {"fake": float(random.random())}
            rollouts.append(Rollout(f"{name}-{index}", name, task, (turn,), RolloutStatus.COMPLETED, rewards))
        groups.append(RolloutGroup(name, rollouts))
    return groups


def _as_sampled(groups: list[RolloutGroup], parts: RunParts, state: TrainerState) -> list[RolloutGroup]:
    """Replace the log-probs by those of the policy, so that ratios begin at 1 as those of sampled rollouts do."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    batch = batch_rollouts(rollouts, max_length=parts.config.rollouts.max_length)
    logprobs = dict(zip(batch.ids, batch.actions(parts.scorer.score(state.model, batch).logprobs), strict=True))

    def replaced(rollout: Rollout) -> Rollout:
        [turn] = rollout.turns
        generation = dataclasses.replace(turn.generation, logprobs=tuple(logprobs[rollout.id].tolist()))
        return dataclasses.replace(rollout, turns=(dataclasses.replace(turn, generation=generation),))

    return [RolloutGroup(group.id, [replaced(rollout) for rollout in group.rollouts]) for group in groups]
