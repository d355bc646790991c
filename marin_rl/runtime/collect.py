# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The rollouts of a step: tasks drawn, played, shaped and filtered, with a count of what was left out and why."""

from typing import NamedTuple

from marin_rl.metrics import Metric
from marin_rl.rewards.combine import evaluation_metrics
from marin_rl.rollouts.environment_metrics import environment_metrics
from marin_rl.rollouts.filters import sort_groups
from marin_rl.rollouts.rollout_metrics import rollout_metrics
from marin_rl.rollouts.run_rollouts import Player, run_groups
from marin_rl.rollouts.shape_rewards import shape_rewards
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.types import RolloutGroup, Task


class Collected(NamedTuple):
    """What a step sampled."""

    groups: list[RolloutGroup]
    """Groups to train on."""
    left_out: list[RolloutGroup]
    """Groups that the filter left out."""
    metrics: dict[str, Metric]
    """Of everything that was sampled, and how much of it was left out."""

    @property
    def sampled(self) -> list[RolloutGroup]:
        """All groups that were played."""
        return [*self.groups, *self.left_out]


def collect_groups(run: TrainingRun, player: Player, step: int) -> Collected:
    """Sample until the step has its groups, or the filter's bound on rounds is reached.

    The run's task stream moves on by as many tasks as were played, and is told what came of them.

    Args:
        run: names tasks, shaping and filter.
        player: plays them under the current weights.
        step: the update that these rollouts are for.
    """
    config, progress, stream = run.config, run.progress, run.stream
    kept: list[RolloutGroup] = []
    left_out: list[RolloutGroup] = []
    rounds = 0
    while rounds < config.filter.rounds and len(kept) < config.rollouts.prompts_per_step:
        missing = config.rollouts.prompts_per_step - len(kept)
        again = (f"round{rounds}",) if rounds else ()
        played = run_groups(
            player,
            draw_tasks(run, missing),
            group_size=config.rollouts.group_size,
            temperature=config.sampling.temperature,
            seed_parts=(config.seed, "train", step, *again),
            # A few tasks more may well all be broken ones, after a round that was not.
            all_may_fail=rounds > 0,
        )
        rounds += 1
        progress.task_stream = dict(stream.learn(progress.task_stream, played))
        shaped = shape_rewards(
            played, config.overlong, config.truncation, max_new_tokens=config.sampling.max_new_tokens
        )
        if not config.filter.drops:
            kept += shaped
            continue
        teaching, *nothing = sort_groups(shaped)
        kept += teaching
        left_out += [group for groups in nothing for group in groups]
    equal = sum(any(rollout.rewards for rollout in group.rollouts) for group in left_out)
    counts = {
        "filter/kept_groups": len(kept),
        "filter/dropped_zero_spread": equal,
        "filter/dropped_ungraded": len(left_out) - equal,
        "filter/rounds": rounds,
    }
    sampled = [*kept, *left_out]
    said = evaluation_metrics(one for group in sampled for rollout in group.rollouts for one in rollout.evaluations)
    counts |= stream.metrics(progress.task_stream)
    metrics = {**rollout_metrics(sampled, progress.step), **environment_metrics(sampled, stream.parts), **said}
    return Collected(kept, left_out, {**metrics, **{name: Metric(float(count)) for name, count in counts.items()}})


def draw_tasks(run: TrainingRun, count: int) -> list[Task]:
    """The next training tasks of the run, whose stream moves on by as many.

    Args:
        run: names environment and seed.
        count: how many.
    """
    progress = run.progress
    tasks, state = run.stream.draw(progress.task_stream, count)
    progress.task_stream = dict(state)
    progress.tasks_drawn += count
    return tasks
