# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loop. Read this file first.

One step:

    tasks -> rollouts -> advantages -> batch -> update(s) -> weights -> (evaluation, checkpoint) -> record

The record of step n is written once, after step n. It holds the evaluation of the weights after step n, and the
metrics of the rollouts of step n, which in sync mode were sampled with the weights after step n - 1. A step is one
update of the weights, or several if `updates` sets epochs or minibatches.
"""

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.critic import assemble, policy_of
from marin_rl.learner.loss import first_log_ratios, loss_metrics
from marin_rl.learner.train_step import Learner, PendingUpdate
from marin_rl.models.flops import flops_per_token
from marin_rl.objectives.importance import mismatch_metrics
from marin_rl.rollouts.metrics import FailureReports
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.rollout_store import EVALUATION, RolloutStore
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.training.advice import Advice
from marin_rl.training.batch_builder import BatchBuilder, TrainingBatch
from marin_rl.training.collect import GroupCollector
from marin_rl.training.evaluation import evaluate
from marin_rl.training.run_state import Progress, RunFiles, RunState
from marin_rl.training.shared_run import require_same_batch
from marin_rl.types import RolloutGroup
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import collect_garbage, collect_rarely
from marin_rl.utils.host_status import StopRequestedError, raise_if
from marin_rl.utils.levanter_line import peak_flops
from marin_rl.utils.storage import FileDigest, StoragePath, writing
from marin_rl.utils.timing import PhaseTimer, compile_clock

ConfigT = TypeVar("ConfigT", bound=AbstractRunConfig)

PHASES = ("sample", "reward", "batch", "reference", "step", "transfer", "store", "wait")
"""The phases of a step; `wait` is the time outside all other phases."""


@dataclasses.dataclass(kw_only=True)
class AbstractRun(abc.ABC, Generic[ConfigT]):
    """The parts and the state of a run that the loop, the session and the records use, whatever makes its batches."""

    milestones: ClassVar[tuple[str, str]]
    """Names of the evaluations before the first step and after the last ones."""

    config: ConfigT
    """Config of the run."""
    progress: Progress
    """Counters and small state, saved in every checkpoint."""
    trainer_state: TrainerState
    """Weights, optimizer state and random key; replaced by every update."""
    learner: Learner
    """Computes weight updates."""
    base: LmHeadModel | None
    """Weights that the trained adapter changes; None if whole models are trained."""
    tokenizer: ChatTokenizer
    """Tokenizer of the policy."""
    checkpoints: Checkpoints
    """Saves and loads checkpoints."""
    resources: contextlib.ExitStack
    """Closes the opened parts."""
    files: RunFiles
    """Files of the run at the checkpoint from which it started."""
    store_records: Callable[[], FileDigest | None] = lambda: None
    """Called before every checkpoint, to store the records of the steps up to it; returns their digest."""
    command_timer: PhaseTimer = dataclasses.field(default_factory=PhaseTimer)
    """Seconds of this start of the run: `warm start`, `evaluation`, `steps`."""

    @abc.abstractmethod
    def train_step(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Train one step, and return its metrics; raises StopRequestedError if a stop ended it before the update."""

    @abc.abstractmethod
    def evaluate(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Evaluate the weights after the last step if an evaluation is due; return its metrics."""

    @abc.abstractmethod
    def save(self) -> StoragePath:
        """Start to write a checkpoint, after everything that precedes it is stored."""

    def rewind(self) -> None:
        """Remove what a former start has stored of steps that this one repeats, except for records."""

    def flush(self) -> None:
        """Wait for what the steps have started."""
        self.checkpoints.flush()

    def close(self) -> None:
        """Close the parts, and flush what they store."""
        self.resources.close()


@dataclasses.dataclass(kw_only=True)
class TrainingRun(AbstractRun[TrainConfig]):
    """An RL run; made by [`open_run`][marin_rl.training.open_run.open_run]."""

    milestones: ClassVar[tuple[str, str]] = "before RL", "after RL"

    state: RunState
    """Host-side state, with the progress."""
    collector: GroupCollector
    """Requests groups from the rollout source and collects those of a step."""
    batch_builder: BatchBuilder
    """Computes advantages and batches."""
    runner: RolloutRunner
    """Runs the episodes of evaluations, with the sampler of this process."""
    store: RolloutStore
    """Stores rollouts."""
    failures: FailureReports
    """Reports failed rollouts."""
    advice: Advice
    """Reports steps without signal and slow rewards."""

    def train_step(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Collect groups, train on them and publish the new weights; return the metrics of the step."""
        started, timer, progress = time.perf_counter(), PhaseTimer(), self.progress
        step = progress.step + 1
        collected = self.collector.collect(self.state, step, timer, stop_requested)
        self.failures.add(f"step {step}", collected.finished)

        metrics: dict[str, float] = {}

        def while_updating(batch: TrainingBatch) -> None:
            with timer.phase("store"):
                if multihost.is_main():
                    with writing(self.store.folder):
                        self.store.write(step, collected.sampled, batch.stored, stale=collected.stale)
                metrics.update(collected.metrics())
                collect_garbage(step)

        self.trainer_state, updates, trained = train_on_groups(
            self.batch_builder, self.learner, self.trainer_state, collected.groups, step, timer, while_updating
        )
        rollouts = [rollout for group in collected.finished for rollout in group.rollouts]
        progress.step = step
        progress.updates += len(updates)
        progress.episodes += len(rollouts)
        progress.sampled_tokens += sum(rollout.num_generated_tokens for rollout in rollouts)
        progress.trained_tokens += sum(packed.num_loss_tokens for packed in updates)
        with timer.phase("transfer"):
            self.publish_weights()
        elapsed = time.perf_counter() - started
        metrics |= trained
        metrics["updates/skipped"] = float(self.config.updates.per_step - len(updates))
        metrics |= {"episode": float(progress.episodes), "updates": float(progress.updates)}
        metrics |= throughput_metrics(collected.finished, updates, timer.seconds, elapsed)
        metrics["seconds/compile"] = compile_clock().since(started)
        self.advice.add(step, collected.sampled, metrics)
        assert self.config.model is not None
        return metrics | model_flops_utilization(
            self.config.model, progress.vocab_size, updates, update_seconds(timer.seconds)
        )

    def evaluate(self, stop_requested: Callable[[], bool]) -> dict[str, float]:
        """Evaluate the weights and store the rollouts, if an evaluation is due after this step; return its metrics."""
        config, progress = self.config, self.progress
        if not config.evaluation.is_due(progress.step, config.num_steps):
            return {}
        runner = dataclasses.replace(self.runner, interrupt=functools.partial(raise_if, stop_requested))
        temperature = config.sampling.temperature
        metrics, groups = evaluate(runner, config.evaluation, temperature=temperature, seed=config.seed)
        self.failures.add(f"evaluation after step {progress.step}", groups, "count as wrong")
        if multihost.is_main():
            with writing(self.store.folder):
                self.store.write(progress.step, groups, {}, EVALUATION)
        progress.evaluations[self.milestones[1]] = metrics
        return metrics

    def publish_weights(self) -> None:
        """Send the weights to the sampler of this process and to the rollout source."""
        policy, version = policy_of(self.trainer_state.model), self.progress.step
        self.runner.sampler.update_weights(assemble(policy, self.base), version)
        self.collector.rollout_source.publish(policy, version)

    def save(self) -> StoragePath:
        """Start to write a checkpoint, after all rollouts and records before it are stored."""
        files = self.files
        if multihost.is_main():
            with writing(self.store.folder):
                rollouts = self.store.digests()
            files = dataclasses.replace(files, metrics=self.store_records(), rollouts=rollouts)
        return self.state.save(self.checkpoints, self.trainer_state, self.collector.rollout_source.counts, files)

    def rewind(self) -> None:
        """Remove the rollouts of steps that this start repeats."""
        with writing(self.store.folder):
            self.store.truncate(self.progress.step, self.files.rollouts)

    def flush(self) -> None:
        """Wait for the weights and checkpoints that the steps have sent."""
        self.collector.rollout_source.flush()
        self.checkpoints.flush()


def train(
    run: AbstractRun, record: Callable[[int, dict[str, float]], object], stop_requested: Callable[[], bool]
) -> bool:
    """Train until the configured number of steps is reached, or a stop is requested.

    If a stop is requested while a step waits for its groups, the step is rolled back; a resumed run repeats it. If a
    stop is requested during the evaluation after a step, a resumed run repeats the evaluation and records the step.

    Args:
        run: a new or resumed run; its state is updated in place.
        record: stores the complete metrics of a step.
        stop_requested: returns whether this process was asked to save and stop. All processes stop if one was asked:
            immediately if a step waits for its groups or is evaluated, otherwise after the step.

    Returns:
        Whether the run is complete; the last checkpoint is then written.
    """
    with collect_rarely():
        complete = _train_steps(run, record, stop_requested)
    run.flush()
    return complete


def _train_steps(
    run: AbstractRun, record: Callable[[int, dict[str, float]], object], stop_requested: Callable[[], bool]
) -> bool:
    config, progress = run.config, run.progress
    saved = progress.step
    while progress.unrecorded or progress.step < config.num_steps:
        try:
            with run.command_timer.phase("steps"):
                progress.unrecorded = progress.unrecorded or run.train_step(stop_requested)
            with run.command_timer.phase("evaluation"):
                metrics = progress.unrecorded | run.evaluate(stop_requested)
        except StopRequestedError:
            if saved < progress.step:
                run.save()
            return False
        step = progress.step
        record(step, metrics)
        progress.unrecorded = {}
        run.checkpoints.raise_if_failed()
        last = step == config.num_steps or multihost.any_process(stop_requested())
        if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
            run.save()
            saved = step
        if last:
            break
    return progress.step >= config.num_steps


class TrainedStep(NamedTuple):
    """The result of the updates of a step."""

    state: TrainerState
    """State after the updates."""
    updates: list[PackedBatch]
    """Batches of the updates; empty if no token has loss."""
    metrics: dict[str, float]
    """Metrics of scores, advantages, loss and importance weights."""


def train_on_groups(
    batch_builder: BatchBuilder,
    learner: Learner,
    state: TrainerState,
    groups: Sequence[RolloutGroup],
    step: int,
    timer: PhaseTimer,
    while_updating: Callable[[TrainingBatch], None] = lambda batch: None,
) -> TrainedStep:
    """Compute the advantages and batches of a step, and update the weights.

    Args:
        batch_builder: computes advantages and batches.
        learner: computes weight updates.
        state: **donated**; use the returned state.
        groups: groups to train on.
        step: step that trains on the groups.
        timer: accumulates seconds of the phases `batch`, `reference` and `step`.
        while_updating: called with the training data while the devices compute.

    Raises:
        NonFiniteUpdateError: if a loss or gradient is not finite.
    """
    average = state.model_averaging
    averaged = None if average is None else eqx.combine(average.model_params, state.model)
    batch = batch_builder.build(groups, state.model, step, timer, averaged)
    with timer.phase("batch"):
        updates = list(batch_builder.minibatches(batch.rollouts, step))
        require_same_batch(step, batch.rollouts, updates)
    pending: list[PendingUpdate] = []
    with timer.phase("step"):
        for packed in updates:
            state, update = learner.dispatch(state, packed.microbatches, packed.layout.rows_per_microbatch)
            pending.append(update)
    while_updating(batch)
    with timer.phase("step"):
        finished = [update.wait() for update in pending]
    metrics = dict(batch.mismatch or {})
    if finished:
        metrics = loss_metrics(finished) | (metrics or mismatch_metrics(first_log_ratios(finished)))
    return TrainedStep(state, updates, metrics | dict(batch.metrics))


def throughput_metrics(
    groups: Sequence[RolloutGroup], updates: Sequence[PackedBatch], seconds: Mapping[str, float], elapsed: float
) -> dict[str, float]:
    """Compute rollout and token rates and the seconds per phase of one step; padding does not count as tokens.

    Args:
        groups: rollouts sampled for the step.
        updates: batches of the step's updates; a token trained on twice counts twice.
        seconds: seconds by phase; `sample` is absent when workers sample concurrently.
        elapsed: seconds from the first request to the published weights.

    Returns:
        Rates and seconds by metric name.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sampled = sum(rollout.num_generated_tokens for rollout in rollouts)
    trained = sum(packed.num_loss_tokens for packed in updates)
    slots = sum(packed.num_positions for packed in updates)
    accounted = sum(seconds.get(phase, 0.0) for phase in PHASES)
    return {
        "eps": len(rollouts) / elapsed,
        "tokens/sampled_per_second": sampled / max(seconds.get("sample", elapsed), 1e-9),
        "tokens/trained_per_second": trained / max(update_seconds(seconds), 1e-9),
        "batch/packing_efficiency": sum(packed.num_tokens for packed in updates) / max(slots, 1),
        "batch/microbatches": float(sum(len(packed.microbatches) for packed in updates)),
        **{f"seconds/{phase}": seconds.get(phase, 0.0) for phase in PHASES if phase != "wait"},
        "seconds/wait": max(elapsed - accounted, 0.0),
        "seconds/total": elapsed,
    }


def update_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds from the start to the end of a step's updates; `store` is a part of them."""
    return seconds.get("step", 0.0) + seconds.get("store", 0.0)


def model_flops_utilization(
    model: LmConfig, vocab_size: int, updates: Sequence[PackedBatch], step_seconds: float
) -> dict[str, float]:
    """Compute the model FLOPs utilization of a step's forward and backward passes.

    `mfu = 3 · flops_per_token · tokens / (seconds · peak FLOPS of all devices)`, without padding tokens. The FLOPs of
    attention are those of whole rows. `step_seconds` is the duration of all updates of the step.

    Returns:
        `mfu`, or nothing if the peak FLOPS of the device is unknown (for example on a CPU) or there was no update.
    """
    peak = peak_flops(jax.devices()[0])
    if peak is None or not updates:
        return {}
    per_token = flops_per_token(model, vocab_size, updates[0].layout.row_length)
    tokens = sum(packed.num_tokens for packed in updates)
    return {"mfu": 3 * per_token * tokens / (step_seconds * peak * jax.device_count())}
