# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loop. Read this file first.

One iteration:

    tasks -> rollouts -> advantages -> batch -> update(s) -> weights -> (evaluation, checkpoint) -> record

The record of step n is written once, after step n. It holds the evaluation of the weights after step n, and the
metrics of the rollouts of step n, which in sync mode were sampled with the weights after step n - 1. A step is one
update of the weights, or several if `updates` sets epochs or minibatches.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from levanter.models.lm_model import LmConfig

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.distributed.rollout_source import StopRequestedError
from marin_rl.learner.critic import policy_of
from marin_rl.learner.loss import first_log_ratios, loss_metrics
from marin_rl.objectives.importance import mismatch_metrics
from marin_rl.timing import PhaseTimer
from marin_rl.training.evaluation import evaluate
from marin_rl.training.run_state import Progress
from marin_rl.training.shared_run import require_same_batch
from marin_rl.training.throughput import model_flops_utilization, throughput_metrics
from marin_rl.training.training_run import TrainingRun
from marin_rl.types import RolloutGroup


@runtime_checkable
class StepSink(Protocol):
    """Receives the records of the loop and can stop it."""

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Store the complete record of a step."""
        ...

    def stop_requested(self) -> bool:
        """Return whether to save and stop: immediately if a step waits for its groups, otherwise after the step."""
        ...


def train(run: TrainingRun, sink: StepSink) -> bool:
    """Train until the configured number of steps is reached, or the sink requests a stop.

    If a stop is requested while a step waits for its groups, the step is rolled back; a resumed run repeats it.

    Args:
        run: a new or resumed run; its state is updated in place.
        sink: receives the record of every step.

    Returns:
        Whether the run is complete.
    """
    config, progress = run.config, run.state.progress
    saved = progress.step
    while progress.step < config.num_steps:
        started, step = time.perf_counter(), progress.step + 1
        timer = PhaseTimer()
        try:
            collected = run.collector.collect(run.state, step, timer, sink.stop_requested)
        except StopRequestedError:
            if saved < progress.step:
                run.save()
            break
        batch = run.batch_builder.build(collected.groups, run.trainer_state.model, step, timer)
        with timer.phase("batch"):
            updates = list(run.batch_builder.minibatches(batch, step))
            require_same_batch(step, [microbatch for packed in updates for microbatch in packed.microbatches])
        with timer.phase("step"):
            update_metrics = []
            for packed in updates:
                run.trainer_state, measured = run.learner.step(run.trainer_state, packed.microbatches)
                update_metrics.append(measured)
        _advance(progress, collected.finished, updates)
        with timer.phase("transfer"):
            run.publisher.publish(policy_of(run.trainer_state.model), step)
        with timer.phase("store"):
            run.recorder.record_step(step, collected.sampled, batch.stored, collected.stale)
        elapsed = time.perf_counter() - started
        metrics = {name: metric.value for name, metric in collected.metrics.items()}
        if update_metrics:
            metrics |= loss_metrics(update_metrics)
            metrics |= batch.mismatch or mismatch_metrics(first_log_ratios(update_metrics))
        metrics |= batch.metrics
        metrics |= _rates(config.model, progress, collected.finished, updates, timer.seconds, elapsed)
        if config.evaluation.is_due(step, config.num_steps):
            keep = functools.partial(run.recorder.record_evaluation, step)
            temperature = config.sampling.temperature
            accuracy = evaluate(run.runner, config.evaluation, temperature=temperature, seed=config.seed, keep=keep)
            progress.evaluations["after RL"] = accuracy
            metrics |= accuracy
        sink.record(step, metrics)
        last = step == config.num_steps or sink.stop_requested()
        if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
            run.save()
            saved = step
        if last:
            break
    return progress.step >= config.num_steps


def _advance(progress: Progress, finished: Sequence[RolloutGroup], updates: Sequence[PackedBatch]) -> None:
    rollouts = [rollout for group in finished for rollout in group.rollouts]
    progress.step += 1
    progress.updates += len(updates)
    progress.episodes += len(rollouts)
    progress.sampled_tokens += sum(rollout.num_generated_tokens for rollout in rollouts)
    progress.trained_tokens += sum(packed.num_loss_tokens for packed in updates)


def _rates(
    model: LmConfig | None,
    progress: Progress,
    finished: Sequence[RolloutGroup],
    updates: Sequence[PackedBatch],
    seconds: Mapping[str, float],
    elapsed: float,
) -> dict[str, float]:
    assert model is not None
    return {
        "episode": float(progress.episodes),
        "updates": float(progress.updates),
        **throughput_metrics(finished, updates, seconds, elapsed),
        **model_flops_utilization(model, progress.vocab_size, updates, seconds["step"]),
    }
