# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loop. Read this file first.

One iteration:

    tasks -> rollouts -> advantages -> batch -> update(s) -> weights -> (evaluation, checkpoint) -> record

The record of step n is written once, after step n. It holds the evaluation of the weights after step n, and the
metrics of the rollouts of step n, which in sync mode were sampled with the weights after step n - 1. A step is one
update of the weights, or several if `updates` sets epochs or minibatches.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from levanter.metrics import Metric

from marin_rl.batching.rl_example import PackedBatch
from marin_rl.learner.loss import first_log_ratios, loss_metrics
from marin_rl.objectives.importance import mismatch_metrics
from marin_rl.runtime.collect import Collected, collect_groups
from marin_rl.runtime.evaluation import evaluate
from marin_rl.runtime.rollout_source import StopRequestedError
from marin_rl.runtime.shared_run import require_same_batch
from marin_rl.runtime.throughput import model_flops_utilization, throughput_metrics
from marin_rl.runtime.training_batch import build_batch, minibatches
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.timing import PhaseTimer


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
    config, progress = run.config, run.progress
    saved = progress.step
    while progress.step < config.num_steps:
        started, step = time.perf_counter(), progress.step + 1
        timer = PhaseTimer()
        try:
            collected = collect_groups(run, step, timer, sink.stop_requested)
        except StopRequestedError:
            if saved < progress.step:
                run.save()
            break
        batch = build_batch(run, collected.groups, timer)
        with timer.phase("batch"):
            updates = list(minibatches(run, batch, step))
            require_same_batch(step, [microbatch for packed in updates for microbatch in packed.microbatches])
        with timer.phase("step"):
            update_metrics = _update(run, updates)
        _advance(run, collected, updates)
        with timer.phase("transfer"):
            run.publish()
        with timer.phase("store"):
            run.store_rollouts(step, collected.sampled, batch.stored, collected.stale)
        elapsed = time.perf_counter() - started
        metrics = {name: metric.value for name, metric in collected.metrics.items()}
        if update_metrics:
            metrics |= loss_metrics(update_metrics)
            metrics |= batch.mismatch or mismatch_metrics(first_log_ratios(update_metrics))
        metrics |= batch.metrics
        metrics |= _rates(run, collected, updates, timer.seconds, elapsed)
        if config.evaluation.is_due(step, config.num_steps):
            progress.evaluations["after RL"] = evaluate(
                run.runner,
                config.evaluation,
                temperature=config.sampling.temperature,
                seed=config.seed,
                keep=run.store_evaluation,
            )
            metrics |= progress.evaluations["after RL"]
        sink.record(step, metrics)
        last = step == config.num_steps or sink.stop_requested()
        if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
            run.save()
            saved = step
        if last:
            break
    return progress.step >= config.num_steps


def _update(run: TrainingRun, updates: Sequence[PackedBatch]) -> list[dict[str, Metric]]:
    """Run one weight update per batch, and return the metrics of each; `updates` is empty if no group was kept."""
    metrics = []
    for packed in updates:
        run.state, measured = run.learner.step(run.state, packed.microbatches)
        metrics.append(measured)
    return metrics


def _advance(run: TrainingRun, collected: Collected, updates: Sequence[PackedBatch]) -> None:
    progress = run.progress
    rollouts = [rollout for group in collected.finished for rollout in group.rollouts]
    progress.step += 1
    progress.updates += len(updates)
    progress.episodes += len(rollouts)
    progress.sampled_tokens += sum(rollout.num_generated_tokens for rollout in rollouts)
    progress.trained_tokens += sum(packed.num_loss_tokens for packed in updates)


def _rates(
    run: TrainingRun,
    collected: Collected,
    updates: Sequence[PackedBatch],
    seconds: Mapping[str, float],
    elapsed: float,
) -> dict[str, float]:
    assert run.config.model is not None
    return {
        "episode": float(run.progress.episodes),
        "updates": float(run.progress.updates),
        **throughput_metrics(collected.finished, updates, seconds, elapsed),
        **model_flops_utilization(run.config.model, run.progress.vocab_size, updates, seconds["step"]),
    }
