# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training without a sampler: repeats steps of a run from a checkpoint and the stored rollouts, or times the trainer.

Times and memory are measured on synthetic rollouts: random tokens of given lengths with random rewards.
"""

import dataclasses
import functools
import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from levanter.models.lm_model import LmConfig
from levanter.trainer_state import TrainerState

from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.command_line import Arguments, parse_arguments
from marin_rl.config.input_files import digest_inputs
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_spec import TrainedPolicy
from marin_rl.learner.scoring import Scores
from marin_rl.learner.starting_weights import first_policy
from marin_rl.learner.train_step import Learner
from marin_rl.models.mixture import MixtureShape, mixture_shape
from marin_rl.parts.rl import RunParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.lock import holder
from marin_rl.runs.metrics_file import read_records
from marin_rl.runs.rollout_store import TRAINING, RolloutStoreConfig, list_files, read_rollouts
from marin_rl.runs.run_directory import RunDirectory, config_differences
from marin_rl.runs.stored_rollout import COLUMNS, StoredGroups, TokenScores, groups_of_table
from marin_rl.sessions.config_changes import read_config_of_step, values_of_step
from marin_rl.sessions.earlier_run import read_config, require_rl, resolve_model
from marin_rl.training.batch_builder import BatchBuilder, ScoreFunction, ScoreReference
from marin_rl.training.loop import (
    TrainedStep,
    model_flops_utilization,
    throughput_metrics,
    train_on_groups,
    update_seconds,
)
from marin_rl.training.references import References, Teacher
from marin_rl.training.run_state import warn_of_changed_inputs
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn
from marin_rl.utils.devices.setup import device_peak_bytes
from marin_rl.utils.errors import UserError
from marin_rl.utils.output import escape_line
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.fields import changeable_keys
from marin_rl.utils.settings.imports import IMPORTS
from marin_rl.utils.settings.yaml_text import to_yaml
from marin_rl.utils.timing import PhaseTimer

_METRICS_OF_SAMPLING = (
    *("eps", "tokens/sampled_per_second"),
    *(f"seconds/{phase}" for phase in ("sample", "reward", "transfer", "store", "wait")),
)
"""Metrics of a run's step that a replay does not have."""


class ReplayError(UserError):
    """A step cannot be replayed; the message names what is missing and the remedy."""


class ReplayedStep(NamedTuple):
    """Result of a replay."""

    start: int
    """Step of the checkpoint from which the replay started."""
    metrics: dict[str, float]
    """Metrics of training, rates and seconds by phase."""
    recorded: dict[str, float]
    """The same metrics in the run's `metrics.jsonl`; empty if it has no record of the step."""
    weight_difference: float | None
    """Largest difference of a weight after the step from the run's checkpoint; None if there is no such checkpoint."""

    def describe(self, run: str, step: int) -> str:
        """Return the result as lines of text; `run` is the path of the run."""
        lines = [f"{escape_line(run)}, step {step}, from the checkpoint of step {self.start}"]
        width = max(map(len, self.metrics))
        lines.append(f"  {'':<{width}}  {'replayed':>14}  {'recorded':>14}")
        for name, value in self.metrics.items():
            recorded = self.recorded.get(name)
            shown = "-" if recorded is None else format(recorded, ".7g")
            lines.append(f"  {name:<{width}}  {value:>14.7g}  {shown:>14}")
        after, of_step = "the weights after the step", f"checkpoint of step {step}"
        if self.weight_difference is None:
            lines.append(f"the run has no {of_step}, so the weights cannot be compared")
        elif self.weight_difference == 0:
            lines.append(f"{after} equal those of the {of_step}")
        else:
            lines.append(f"{after} differ from the {of_step} by at most {self.weight_difference:.3g}")
        return "\n".join(lines)


def replay(directory: RunDirectory, arguments: Arguments, run: str, step: int, *, as_json: bool) -> str:
    """Replay a step with changes of the config, and return the result as lines or JSON; see `replay_step`."""
    replayed = replay_step(directory, config_to_replay(directory, step, arguments), step)
    values = {"run": run, "step": step, **replayed._asdict()}
    return json.dumps(values) if as_json else replayed.describe(run, step)


def replay_fake(
    directory: RunDirectory | None, config: TrainConfig | None, arguments: Arguments, fake: str, *, as_json: bool
) -> str:
    """Train on synthetic rollouts with a config, or that of a run with changes; the result is as of `replay`."""
    if directory is not None:
        config = config_to_replay(directory, None, arguments)
    assert config is not None
    shape = parse_shape(fake, config.rollouts.max_length)
    run = train_on_fake(resolve_model(config) if directory is None else config, shape)
    return json.dumps(run._asdict()) if as_json else run.describe(shape.steps)


def config_to_replay(directory: RunDirectory, step: int | None, arguments: Arguments) -> TrainConfig:
    """Return the config that a step of a run was trained with, changed by arguments.

    Args:
        directory: directory of the run.
        step: the step; None for the newest one.
        arguments: changes of the config.

    Raises:
        RunDirectoryError: if RL did not train the run.
        ConfigError: if its config is invalid, which the message then names, or an argument.
    """
    require_rl(read_config(directory), str(directory.path), "no step of it can be replayed")
    values = values_of_step(directory, sys.maxsize if step is None else step)
    # One process replays a run of several.
    trainer = {**values.get("trainer", {}), "distributed": {"initialize_jax_distributed": False}}
    return parse_arguments(TrainConfig, arguments, {}, {**values, "trainer": trainer}).config


def timed_step(
    model: LmConfig,
    learner: Learner,
    builder: BatchBuilder,
    state: TrainerState,
    groups: Sequence[RolloutGroup],
    step: int,
    vocab_size: int,
) -> tuple[TrainedStep, dict[str, float]]:
    """Train on groups, and add rates and seconds by phase to the metrics.

    `state` is **donated**; use the returned state. Returns the result of the updates, and all metrics.
    """
    started, timer = time.perf_counter(), PhaseTimer()
    trained = train_on_groups(builder, learner, state, groups, step, timer)
    elapsed = time.perf_counter() - started
    rates = throughput_metrics(groups, trained.updates, timer.seconds, elapsed)
    seconds = update_seconds(timer.seconds)
    metrics = trained.metrics | {name: value for name, value in rates.items() if name not in _METRICS_OF_SAMPLING}
    return trained, metrics | model_flops_utilization(model, vocab_size, trained.updates, seconds)


def replay_step(directory: RunDirectory, config: TrainConfig, step: int) -> ReplayedStep:
    """Train on the stored rollouts of a step, starting from the newest checkpoint before it.

    If the checkpoint is older than the previous step, the steps in between are repeated first. Log-probs of the learner
    and the reference, and values of the critic, are those that the run stored; if it stored none, they are computed.

    Args:
        directory: directory of the run; not changed.
        config: config of the run, or a changed one; `model` is set.
        step: the step, from 1 on.

    Raises:
        ReplayError: if a checkpoint, rollouts or scores that the replay needs are missing, or the run is still going.
        CheckpointError: if a checkpoint is damaged, or does not fit a changed config.
        RolloutStoreError: if a rollout file is damaged.
    """
    if (process := holder(directory)) is not None:
        raise ReplayError(
            f"run {str(directory.path)!r} is still going ({process}), and may delete its checkpoints and rollouts; "
            "wait for it to end, stop it, or replay a copy of its directory"
        )
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint)
    records = {int(record["step"]): record for record in read_records(directory.metrics)}
    without_groups = [number for number, record in records.items() if record.get("filter/kept_groups") == 0]
    start = _starting_step(directory, checkpoints, step, without_groups)
    original = read_config_of_step(directory, step)
    before, settings = to_yaml(read_config_of_step(directory, start + 1)), to_yaml(original)
    if start < step - 1 and (changes := _changes(before, settings)):
        raise ReplayError(
            f"step {step} is replayed from the checkpoint of step {start}, and the config of the run was changed since "
            f"(there: before, now: at step {step}); replay an earlier step, or keep more checkpoints in the next run "
            "(checkpoint.keep_every). Changed keys:\n" + "\n".join(changes)
        )
    if start < step - 1 and (changes := _changes(settings, to_yaml(config))):
        raise ReplayError(
            f"step {step} can be replayed with another config only from the checkpoint of step {step - 1}, because the "
            f"steps before it had the config of the run; it has checkpoints of {checkpoints.steps()}. Changed keys:\n"
            + "\n".join(changes)
        )
    groups = functools.partial(
        _read_groups, directory, original.rollouts.group_size, records, drops=original.filter.drops
    )
    # Before any device is used.
    first = groups(start + 1)
    parts = RunParts.start(dataclasses.replace(config, rollout_store=RolloutStoreConfig(every=0)))
    checkpoint = checkpoints.open(start)
    warn_of_changed_inputs(checkpoint, digest_inputs(original, ("tokenizer", IMPORTS)))
    vocab_size = checkpoint.vocab_size
    parts.check_base(checkpoint.progress.get("base", ""))
    state = parts.policy_spec(vocab_size).restore_state(checkpoint, parts.learner)
    metrics: dict[str, float] = {}
    references = References(parts, functools.partial(_restore_initial, parts, checkpoints))
    learner = references.open_learner(vocab_size)
    make_builder = functools.partial(_make_builder, parts, functools.cache(references.open_scorer))
    for number in range(start + 1, step + 1):
        stored = first if number == start + 1 else groups(number)
        builder = make_builder(stored)
        trained, metrics = timed_step(parts.model, learner, builder, state, stored.groups, number, vocab_size)
        state = trained.state
    recorded = {name: value for name, value in records.get(step, {}).items() if name in metrics}
    difference = None
    if step in checkpoints.steps():
        after = checkpoints.open(step)
        difference = largest_difference(state.model, parts.policy_spec(after.vocab_size).restore_trained(after))
    return ReplayedStep(start, metrics, recorded, difference)


def _changes(original: str, config: str) -> list[str]:
    """List the keys of two configs in YAML that change the results."""
    may_differ = [*changeable_keys(TrainConfig), "evaluation"]
    return config_differences(original, config, may_differ, "the run's config")


def _starting_step(directory: RunDirectory, checkpoints: Checkpoints, step: int, without_groups: Sequence[int]) -> int:
    """Return the newest checkpoint before a step, if all rollouts from there on are stored.

    Steps in `without_groups` trained on nothing; they have no file if earlier steps dropped all of their groups.
    """
    run, saved = str(directory.path), checkpoints.steps()
    stored = [file.step for file in list_files(directory.rollouts) if file.purpose == TRAINING]
    newest = max([*stored, *saved, *without_groups], default=0)
    if not 1 <= step <= newest:
        steps = f"its steps are 1 to {newest}" if newest else "it has done none"
        raise ReplayError(f"run {run!r} has no step {step}; {steps}")
    before = [number for number in saved if number < step]
    if not before:
        raise ReplayError(
            f"step {step} of run {run!r} needs a checkpoint of an earlier step, but the run has only those of {saved}; "
            "replay a later step, or keep more checkpoints in the next run (checkpoint.keep_every)"
        )
    missing = [number for number in range(before[-1] + 1, step + 1) if number not in {*stored, *without_groups}]
    if missing:
        kept = f"steps {min(stored)} to {max(stored)}" if stored else "no step"
        raise ReplayError(
            f"step {step} is replayed from the checkpoint of step {before[-1]}, which needs the rollouts of step "
            f"{missing[0]}, but {directory.rollouts} has only those of {kept}: they were not stored "
            "(rollout_store.every), or removed to make room (rollout_store.max_mb)"
        )
    return before[-1]


def _read_groups(
    directory: RunDirectory,
    group_size: int,
    records: Mapping[int, Mapping[str, int | float]],
    step: int,
    *,
    drops: bool,
) -> StoredGroups:
    """Read the groups that a step trained on, and check that all of them are stored completely."""
    stored = StoredGroups([], {})
    for table in read_rollouts(directory.rollouts, [step], COLUMNS, [TRAINING]):
        stored = groups_of_table(table)
    if drops:
        # The store has the status of a failed rollout, and not whether its group was dropped.
        stored = stored._replace(groups=[group for group in stored.groups if any(r.rewards for r in group.rollouts)])
    kept = records.get(step, {}).get("filter/kept_groups", len(stored.groups))
    if kept != len(stored.groups) or any(len(group.rollouts) != group_size for group in stored.groups):
        raise ReplayError(
            f"{directory.rollouts} has only a part of the rollouts of step {step}, but a replay needs all of them; "
            "replay another step"
        )
    return stored


def _restore_initial(parts: RunParts, checkpoints: Checkpoints) -> TrainedPolicy:
    if 0 not in checkpoints.steps():
        raise ReplayError(
            "kl or distillation needs the initial policy, but the run stored no reference_logprobs and kept no "
            "checkpoint of step 0; replay with --kl.type none, or start a run with kl: {type: none, watch: true}"
        )
    first = checkpoints.open(0)
    return parts.policy_spec(first.vocab_size).restore_policy(first)


def _make_builder(
    parts: RunParts, open_reference: Callable[[], ScoreReference | None], stored: StoredGroups
) -> BatchBuilder:
    """Make a batch builder that uses stored scores, and computes those that are not stored."""
    config = parts.config
    graded = [rollout for group in stored.groups for rollout in group.rollouts if rollout.rewards]

    def lacks(name: str) -> bool:
        return any(name not in stored.scores[rollout.id] for rollout in graded)

    needs_own = config.off_policy_correction.needs_sampling_logprobs
    score: ScoreFunction = functools.partial(_stored_scores, stored.scores, "learner_logprobs")
    lacks_scores = (needs_own and lacks("learner_logprobs")) or (config.critic is not None and lacks("values"))
    if lacks_scores or parts.scores_experts:
        score = parts.score
    score_reference: ScoreReference | None = None
    if config.needs_reference:
        if lacks("reference_logprobs"):
            score_reference = open_reference()
        else:
            read = functools.partial(_stored_scores, stored.scores, "reference_logprobs", None)
            score_reference = lambda step: read(step.batch).logprobs  # noqa: E731
    return BatchBuilder(parts, score, score_reference)


def _stored_scores(scores: Mapping[str, TokenScores], logprobs: str, model: Any, batch: RolloutBatch) -> Scores:
    """Return stored scores, by rollout id and column, in the form of a scorer. The model is not used."""

    def read(name: str) -> np.ndarray:
        counts = zip(batch.ids, batch.num_loss_tokens, strict=True)
        per_rollout = [scores[id].get(name, np.zeros(count)) for id, count in counts]
        return batch.from_actions(name, per_rollout).astype(np.float32)

    return Scores(read(logprobs), read("values"))


def largest_difference(model: Any, other: Any) -> float:
    """Return the largest absolute difference between two models of the same structure."""

    @jax.jit
    def differences(first: list[jax.Array], second: list[jax.Array]) -> jax.Array:
        # NaN differs from everything, NaN included.
        pairs = zip(first, second, strict=True)
        return jnp.max(jnp.stack([jnp.max(jnp.abs(a - b)).astype(jnp.float32) for a, b in pairs]))

    return float(differences(jax.tree.leaves(model), jax.tree.leaves(other)))


# Synthetic rollouts.

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class FakeShape(NamedTuple):
    """Lengths of synthetic rollouts, and the number of steps that train on them."""

    prompt: tuple[int, int]
    """Minimum and maximum tokens of a prompt."""
    completion: tuple[int, int]
    """Minimum and maximum sampled tokens of a rollout."""
    steps: int
    """Number of steps; the first one compiles."""


def parse_shape(text: str, max_length: int) -> FakeShape:
    """Parse a shape such as `prompt=32,completion=16-64,steps=4`.

    `prompt` and `completion` are numbers of tokens, or ranges from which lengths are drawn; `steps` is 4 by default.
    `max_length` is `rollouts.max_length`, which rollouts must not exceed.

    Raises:
        ValueError: if a name is unknown, missing or repeated, a number is invalid, or a rollout is too long.
    """
    parts = [part.partition("=") for part in text.split(",")]
    given = {name: _RANGE.fullmatch(value) for name, _, value in parts}
    ranges = {name: (int(match[1]), int(match[2] or match[1])) for name, match in given.items() if match is not None}
    first, last = ranges.setdefault("steps", (4, 4))
    if len(ranges) != 3 or not {*given, "prompt", "completion"} <= {*ranges} or len(given) != len(parts):
        raise ValueError(f"--fake is {text!r}; it must have the form prompt=32,completion=16-64,steps=4")
    if first != last or any(not 1 <= low <= high for low, high in ranges.values()):
        raise ValueError(f"--fake is {text!r}; numbers must be at least 1, ranges in order, and steps one number")
    shape = FakeShape(ranges["prompt"], ranges["completion"], first)
    if (longest := shape.prompt[1] + shape.completion[1]) > max_length:
        raise ValueError(
            f"--fake {text!r}: rollouts of {longest} tokens exceed rollouts.max_length, {max_length}; add "
            f"--rollouts.max_length {longest}, or lower prompt or completion"
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

    def describe(self, steps: int) -> str:
        """Return the measurements of a number of steps as lines of text."""
        width, device = max(map(len, self.median)), self.device_peak_bytes
        peak = "not tracked on this platform" if device is None else f"{device / 2**30:.2f} GiB"
        return "\n".join(
            [
                f"{self.rollouts} rollouts, {self.tokens:,} tokens",
                f"first step, with compilation: {self.first_step_seconds:.3g} s",
                f"medians of the other {steps - 1} steps:" if steps > 1 else "this step:",
                *(f"  {name:<{width}}  {value:.6g}" for name, value in self.median.items()),
                f"tokens per second, prompts included: {self.tokens_per_second:,.0f}",
                f"peak memory: device {peak}, host {self.host_peak_bytes / 2**30:.2f} GiB",
            ]
        )


def train_on_fake(config: TrainConfig, shape: FakeShape) -> FakeRun:
    """Train random weights, or a new adapter, on the same synthetic rollouts for some steps. Nothing is stored.

    The config has its `model` set.
    """
    parts = RunParts.start(dataclasses.replace(config, rollout_store=RolloutStoreConfig(every=0)))
    if config.lora is None:
        policy = first_policy(None, parts.model, parts.tokenizer, parts.trainer, config.seed)
    else:
        policy = parts.first_policy()
    vocab_size = parts.assemble(policy).vocab_size
    mixture = mixture_shape(parts.model) if config.samples_experts else None
    sizes = config.rollouts.prompts_per_step, config.rollouts.group_size, vocab_size
    groups = make_groups(shape, *sizes, config.seed, mixture)
    reference, learner = None, parts.learner
    if config.loads_reference:
        # The updates donate the weights. A teacher of another size takes other times.
        copied = parts.assemble(jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, policy))
        reference = Teacher(parts, copied).score if config.needs_reference else None
        if config.kl.needs_teacher:
            learner = parts.make_learner(parts.layout, parts.base, parts.trainer.mp.cast_to_compute(copied))
    state, steps = parts.first_state(policy), []
    builder = BatchBuilder(parts, parts.score, reference)
    for number in range(1, 1 + shape.steps):
        trained, metrics = timed_step(parts.model, learner, builder, state, groups, number, vocab_size)
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


def make_groups(
    shape: FakeShape, count: int, group_size: int, vocab_size: int, seed: int, mixture: MixtureShape | None = None
) -> list[RolloutGroup]:
    """Make groups with random tokens, lengths and rewards between 0 and 1, and random experts of a mixture.

    The rollouts of a group share a prompt. Log-probs are those of a uniform distribution.
    """
    random = np.random.default_rng(derive_seed(seed, "fake rollouts"))
    logprob = -float(np.log(vocab_size))

    def tokens(lengths: tuple[int, int]) -> tuple[int, ...]:
        return tuple(random.integers(vocab_size, size=random.integers(lengths[0], lengths[1] + 1)).tolist())

    groups = []
    for number in range(count):
        name, prompt = f"fake-{number}", tokens(shape.prompt)
        task = Task(name, "fake", ({"role": "user", "content": ""},), "")
        rollouts = []
        for index in range(group_size):
            sampled = tokens(shape.completion)
            experts = None
            if mixture is not None:
                size = (len(prompt) + len(sampled) - 1, mixture.layers, mixture.per_token)
                experts = random.integers(mixture.experts, size=size).astype(mixture.dtype)
            generation = Generation(sampled, (logprob,) * len(sampled), StopReason.STOP, 0, 0, experts)
            turn = Turn(prompt, generation, (), anchor_state=name, starts_sequence=True)
            rewards = {"fake": float(random.random())}
            rollouts.append(Rollout(f"{name}-{index}", name, task, (turn,), RolloutStatus.COMPLETED, rewards))
        groups.append(RolloutGroup(name, rollouts))
    return groups
