# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The groups of a step: ordered, played, shaped, filtered, and taken from the replay buffer.

Without staleness the orders of a step are given when its weights are there, and the step waits for all of them. With
it they are given steps ahead, and the step takes of each environment what is there first.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from marin_rl.environments.base import Split
from marin_rl.metrics import Metric
from marin_rl.rewards.combine import evaluation_metrics
from marin_rl.rollouts.environment_metrics import environment_metrics
from marin_rl.rollouts.filters import sort_groups
from marin_rl.rollouts.rollout_metrics import rollout_metrics, staleness_metrics
from marin_rl.rollouts.run_rollouts import require_one_success
from marin_rl.rollouts.scheduler import RequestNumber
from marin_rl.rollouts.shape_rewards import shape_rewards
from marin_rl.runtime.rollout_runner import make_limits
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.sampling.sampler import PromptTooLongError
from marin_rl.timing import PhaseTimer
from marin_rl.types import RolloutGroup, Task


class Collected(NamedTuple):
    """What a step is made of."""

    groups: list[RolloutGroup]
    """Groups to train on."""
    left_out: list[RolloutGroup]
    """Groups that the filter left out."""
    played: list[RolloutGroup]
    """Groups that came since the step before; with staleness not the same ones."""
    metrics: dict[str, Metric]
    """Of the groups that came since the step before, and how many of them were left out."""
    stale: Sequence[RolloutGroup] = ()
    """Groups that were dropped before any step had trained on them, because they had grown too old."""

    @property
    def sampled(self) -> list[RolloutGroup]:
        """Those to train on and those that were left out."""
        return [*self.groups, *self.left_out]


def collect_groups(
    run: TrainingRun, step: int, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False
) -> Collected:
    """Order and wait until the step has its groups, less those that were dropped and are not replaced.

    The run's task stream moves on by as many tasks as were ordered, and is told what came of those that were played.

    Args:
        run: names tasks, shaping and filter, and has those who play; its order book and replay buffer move on.
        step: the update that these groups are for.
        timer: counts where the time goes.
        stop_requested: whether to stop instead of waiting for further groups.

    Raises:
        AllRolloutsFailedError: if not one rollout was graded.
        StopRequestedError: if a stop is requested; the run's state is then the one from before the call.
    """
    with run.undone_on_stop():
        return _collect(run, step, timer, stop_requested)


def _collect(run: TrainingRun, step: int, timer: PhaseTimer, stop_requested: Callable[[], bool]) -> Collected:
    config, progress, rollout_source, orders, replay = (
        run.config,
        run.progress,
        run.rollout_source,
        run.orders,
        run.replay,
    )
    version, wanted = step - 1, config.rollouts.prompts_per_step

    def draw(count: int) -> list[Task]:
        return draw_tasks(run, count)

    skipped_before = progress.prompts_skipped
    stale = [run.drop_stale(version)]
    rollout_source.submit(orders.order(version, replay.uses_left, len(replay), draw))
    came: dict[RequestNumber, RolloutGroup] = {}
    to_train: dict[RequestNumber, RolloutGroup] = {}
    left_out: dict[RequestNumber, RolloutGroup] = {}
    replaced = 0
    while not replay.holds(mix := replay.mix(orders.wanted(step), orders.outstanding)):
        dropped = []
        for number, played in rollout_source.wait(timer, stop_requested):
            if not orders.complete(number):
                continue
            came[number] = played
            [group] = shape_rewards(
                [played], config.overlong, config.truncation, max_new_tokens=config.sampling.max_new_tokens
            )
            if config.filter.drops and not sort_groups([group]).kept:
                left_out[number] = group
                dropped.append(number)
            else:
                to_train[number] = group
                replay.add(number, group)
        if len(came) >= wanted:
            # Where everything is broken, further groups would be so too.
            require_one_success(list(came.values()))
        more = orders.replace(dropped, version, draw)
        replaced += len(more)
        rollout_source.submit(more)
        late = run.drop_stale(version)
        if late.count:
            stale.append(late)
            rollout_source.submit(orders.order(version, replay.uses_left, len(replay), draw))
    ages, fill = replay.ages(version), replay.uses_left / orders.pace.room
    groups = replay.draw(mix, version)
    in_order = [came[number] for number in sorted(came)]
    progress.task_stream = dict(run.stream.learn(progress.task_stream, in_order))
    unequal = [left_out[number] for number in sorted(left_out)]
    metrics = _metrics(run, [to_train[number] for number in sorted(to_train)], unequal)
    metrics |= staleness_metrics(groups, version)
    counts = {
        "filter/kept_groups": len(groups),
        "filter/replaced": replaced,
        "prompts/skipped": progress.prompts_skipped - skipped_before,
        "replay/stale": sum(dropped.count for dropped in stale),
        "replay/waiting": len(replay),
        "replay/age": sum(ages) / max(len(ages), 1),
        "replay/fill": fill,
    }
    metrics |= {name: Metric(float(value)) for name, value in {**counts, **rollout_source.metrics()}.items()}
    return Collected(groups, unequal, in_order, metrics, [group for one in stale for group in one.untrained])


def draw_tasks(run: TrainingRun, count: int) -> list[Task]:
    """The next training tasks of the run, whose stream moves on by as many, and by those skipped on the way.

    Args:
        run: names environment and seed, and whether tasks with long prompts are skipped.
        count: how many.

    Raises:
        PromptTooLongError: if every training task was skipped, or ten times as many as there are (and 1,000 more) in a
            row, as when a curriculum draws from lessons without a task that fits.
    """
    progress, limits = run.progress, make_limits(run.config)
    tasks: list[Task] = []
    skipped, distinct = 0, set[tuple[str, str]]()
    while len(tasks) < count:
        drawn, state = run.stream.draw(progress.task_stream, count - len(tasks))
        progress.task_stream = dict(state)
        fitting = [task for task in drawn if not limits.leave_out(task, run.tokenizer)]
        tasks += fitting
        progress.prompts_skipped += len(drawn) - len(fitting)
        if fitting:
            skipped, distinct = 0, set()
            continue
        skipped += len(drawn)
        distinct |= {(task.environment, task.id) for task in drawn}
        total = len(run.environment.tasks(Split.TRAIN))
        # Two passes have different orders, so more tasks than there are can be skipped before one that fits.
        if len(distinct) >= total or skipped >= 10 * total + 1000:
            raise PromptTooLongError(
                f"the prompts of {skipped} training tasks in a row have more than {limits.longest_prompt} tokens and "
                "were skipped (rollouts.long_prompts); raise rollouts.max_length or rollouts.max_prompt_length"
            )
    progress.tasks_drawn += count
    return tasks


def _metrics(run: TrainingRun, kept: Sequence[RolloutGroup], left_out: Sequence[RolloutGroup]) -> dict[str, Metric]:
    sampled = [*kept, *left_out]
    equal = sum(any(rollout.rewards for rollout in group.rollouts) for group in left_out)
    said = evaluation_metrics(one for group in sampled for rollout in group.rollouts for one in rollout.evaluations)
    counts = {
        "filter/dropped_zero_spread": equal,
        "filter/dropped_ungraded": len(left_out) - equal,
        **run.stream.metrics(run.progress.task_stream),
    }
    metrics = dict(said)
    if any(rollout.rewards for group in sampled for rollout in group.rollouts):
        metrics |= {**rollout_metrics(sampled), **environment_metrics(sampled, run.stream.parts)}
    return {**metrics, **{name: Metric(float(count)) for name, count in counts.items()}}
