# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loop. Read this file first.

One turn of the loop takes one prompt from task to weights:

    tasks -> rollouts -> advantages -> batch -> update -> weights -> (evaluation, checkpoint) -> record

The record of step n is written once, after update n. Its evaluation is of the weights after update n;
its rollouts are the ones that update n was made of, sampled with the weights after update n - 1.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from marin_rl.batching.rl_example import RlExample
from marin_rl.environments.base import Split
from marin_rl.learner.loss import loss_metrics
from marin_rl.rollouts.rollout_metrics import rollout_metrics
from marin_rl.rollouts.run_rollouts import run_groups
from marin_rl.rollouts.store import write_rollouts
from marin_rl.runtime.evaluation import evaluate
from marin_rl.runtime.throughput import model_flops_utilization, throughput_metrics
from marin_rl.runtime.training_batch import build_batch
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.seeds import derive_seed
from marin_rl.types import Rollout, RolloutGroup, Task


@runtime_checkable
class StepSink(Protocol):
    """Where the loop reports."""

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Take the complete record of one update."""
        ...

    def stop_requested(self) -> bool:
        """Whether to save and stop after the update that is under way."""
        ...


def train(run: TrainingRun, sink: StepSink) -> bool:
    """Train until the configured number of updates is done, or the sink asks to stop.

    Args:
        run: a run, fresh or taken up again; its state moves on in place.
        sink: takes the record of every update.

    Returns:
        Whether the run is complete.
    """
    config, progress = run.config, run.progress
    while progress.step < config.num_steps:
        started, step = time.perf_counter(), progress.step + 1
        player = run.player
        timer = player.timer
        groups = run_groups(
            player,
            draw_tasks(run, step),
            group_size=config.rollouts.group_size,
            temperature=config.sampling.temperature,
            seed_parts=(config.seed, "train", step),
        )
        metrics = {name: metric.value for name, metric in rollout_metrics(groups, progress.step).items()}
        batch = build_batch(run, groups, timer)
        with timer.phase("step"):
            run.state, measured = run.learner.step(run.state, batch.example)
        _advance(run, groups, batch.example)
        with timer.phase("transfer"):
            run.publish()
        elapsed = time.perf_counter() - started
        metrics |= {**batch.metrics, **loss_metrics(measured)}
        metrics |= _rates(run, groups, batch.example, timer.seconds, elapsed)
        if step == config.num_steps or (config.evaluation.every and step % config.evaluation.every == 0):
            progress.evaluations["after RL"] = evaluate(
                run.player, config.evaluation, temperature=config.sampling.temperature, seed=config.seed
            )
            metrics |= progress.evaluations["after RL"]
            write_rollouts(run.rollouts, step, groups, batch.advantages)
        sink.record(step, metrics)
        last = step == config.num_steps or sink.stop_requested()
        if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
            run.save()
        if last:
            break
    return progress.step >= config.num_steps


def draw_tasks(run: TrainingRun, step: int) -> list[Task]:
    """The training tasks of an update: each task once per pass, every pass in its own order.

    A function of the run's seed and the step alone, so a resumed run draws what it would have drawn.
    """
    tasks = run.environment.tasks(Split.TRAIN)
    count = run.config.rollouts.prompts_per_step
    drawn = []
    for index in range((step - 1) * count, step * count):
        epoch, position = divmod(index, len(tasks))
        drawn.append(tasks[_order(run.config.seed, epoch, len(tasks))[position]])
    return drawn


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng(derive_seed(seed, "task order", epoch)).permutation(size)


def _advance(run: TrainingRun, groups: Sequence[RolloutGroup], batch: RlExample) -> None:
    progress = run.progress
    rollouts: list[Rollout] = [rollout for group in groups for rollout in group.rollouts]
    progress.step += 1
    progress.episodes += len(rollouts)
    progress.sampled_tokens += sum(rollout.num_generated_tokens for rollout in rollouts)
    progress.trained_tokens += int(np.asarray(batch.loss_mask.array).sum())


def _rates(
    run: TrainingRun, groups: Sequence[RolloutGroup], batch: RlExample, seconds: Mapping[str, float], elapsed: float
) -> dict[str, float]:
    assert run.config.model is not None
    return {
        "episode": float(run.progress.episodes),
        **throughput_metrics(groups, batch, seconds, elapsed),
        **model_flops_utilization(run.config.model, run.progress.vocab_size, batch, seconds["step"]),
    }
