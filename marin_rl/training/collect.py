# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Collection of a step's rollout groups: request, shape rewards, filter, and draw from the replay buffer.

Without staleness, a step requests its groups when its weights are available, and waits for all of them. With
staleness, groups are requested steps ahead, and a step takes the first complete groups of each environment.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from marin_rl.distributed.rollout_source import RolloutSource
from marin_rl.distributed.scheduler import RequestNumber
from marin_rl.environments.base import AbstractEnvironment, Split, TaskStream
from marin_rl.objectives.shaping import OverlongConfig, TruncationConfig, shape_rewards
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.config import FilterConfig, rewards_differ
from marin_rl.rollouts.metrics import environment_metrics, reward_metrics, rollout_metrics, staleness_metrics
from marin_rl.rollouts.run_rollouts import require_one_success
from marin_rl.sampling.sampler import PromptTooLongError
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.training.run_state import Progress, RunState
from marin_rl.types import RolloutGroup, Task
from marin_rl.utils.timing import PhaseTimer


class Collected(NamedTuple):
    """The rollout groups of a step."""

    groups: list[RolloutGroup]
    """Groups to train on."""
    left_out: list[RolloutGroup]
    """Groups that the filter dropped."""
    finished: list[RolloutGroup]
    """Groups that finished since the previous step; with staleness they differ from `groups`."""
    metrics: Callable[[], dict[str, float]]
    """Computes metrics of the groups that finished since the previous step, and counts of the filter and the replay
    buffer. They are not needed before the update."""
    stale: Sequence[RolloutGroup] = ()
    """Groups that became too old before any step trained on them, and were dropped."""

    @property
    def sampled(self) -> list[RolloutGroup]:
        """Groups to train on and groups that the filter dropped."""
        return [*self.groups, *self.left_out]


@dataclasses.dataclass(frozen=True)
class GroupCollector:
    """Requests rollout groups and collects those of each step."""

    environment: AbstractEnvironment
    """Provides the tasks."""
    tokenizer: ChatTokenizer
    """Measures prompts, to skip long ones."""
    rollout_source: RolloutSource
    """Samples the requested groups."""
    limits: Limits
    """Limits of every rollout."""
    overlong: OverlongConfig
    """Soft penalty on answers close to the length limit."""
    truncation: TruncationConfig
    """Handling of rollouts that were cut off at a limit."""
    filter: FilterConfig
    """Handling of groups in which all rewards are equal."""
    seed: int
    """Seed of the run."""

    @property
    def stream(self) -> TaskStream:
        """Stream of training tasks; its position is in `Progress`."""
        return self.environment.stream(self.seed)

    def collect(
        self, state: RunState, step: int, timer: PhaseTimer, stop_requested: Callable[[], bool] = lambda: False
    ) -> Collected:
        """Request groups and wait until the step has enough of them, except for dropped groups that are not replaced.

        Args:
            state: state of the run; task stream, scheduler and replay buffer advance.
            step: step that will train on the groups.
            timer: accumulates seconds per phase.
            stop_requested: returns whether to stop waiting.

        Raises:
            AllRolloutsFailedError: if no rollout has a reward.
            StopRequestedError: if a stop is requested; `state` is then unchanged.
        """
        with state.rolled_back_on_stop():
            return self._collect(state, step, timer, stop_requested)

    def _collect(self, state: RunState, step: int, timer: PhaseTimer, stop_requested: Callable[[], bool]) -> Collected:
        progress, scheduler, replay = state.progress, state.scheduler, state.replay
        version = step - 1
        draw = functools.partial(self.draw_tasks, progress)
        skipped_before = progress.prompts_skipped
        stale = [state.drop_stale(version)]
        self.rollout_source.submit(scheduler.request(version, replay.uses_left, len(replay), draw))
        finished: dict[RequestNumber, RolloutGroup] = {}
        to_train: dict[RequestNumber, RolloutGroup] = {}
        left_out: dict[RequestNumber, RolloutGroup] = {}
        replaced = 0
        while not replay.holds(mix := replay.mix(scheduler.groups_needed(step), scheduler.outstanding)):
            dropped = []
            for number, unshaped in self.rollout_source.wait(timer, stop_requested):
                if not scheduler.complete(number):
                    continue
                finished[number] = unshaped
                [group] = shape_rewards(
                    [unshaped], self.overlong, self.truncation, max_new_tokens=self.limits.max_new_tokens
                )
                if self.filter.drops and not rewards_differ(group):
                    left_out[number] = group
                    dropped.append(number)
                else:
                    to_train[number] = group
                    replay.add(number, group)
            if len(finished) >= scheduler.limits.groups_per_step:
                # If every rollout failed so far, further groups would fail too.
                require_one_success(list(finished.values()))
            replacements = scheduler.replace(dropped, version, draw)
            replaced += len(replacements)
            self.rollout_source.submit(replacements)
            expired = state.drop_stale(version)
            if expired.count:
                stale.append(expired)
                self.rollout_source.submit(scheduler.request(version, replay.uses_left, len(replay), draw))
        ages, fill = replay.ages(version), replay.uses_left / scheduler.limits.room
        groups = replay.draw(mix, version)
        in_order = _sorted_groups(finished)
        progress.task_stream = dict(self.stream.learn(progress.task_stream, in_order))
        counts = {
            "filter/kept_groups": len(groups),
            "filter/replaced": replaced,
            "prompts/skipped": progress.prompts_skipped - skipped_before,
            "replay/stale": sum(dropped.count for dropped in stale),
            "replay/waiting": len(replay),
            "replay/age": sum(ages) / max(len(ages), 1),
            "replay/fill": fill,
        }
        of_step = {name: float(value) for name, value in {**counts, **self.rollout_source.metrics()}.items()}

        def metrics() -> dict[str, float]:
            of_groups = self._metrics(progress, _sorted_groups(to_train), _sorted_groups(left_out))
            return of_groups | staleness_metrics(groups, version) | of_step

        untrained = [group for dropped in stale for group in dropped.untrained]
        return Collected(groups, _sorted_groups(left_out), in_order, metrics, untrained)

    def draw_tasks(self, progress: Progress, count: int) -> list[Task]:
        """Draw the next training tasks, and advance the task stream by them and by skipped tasks.

        Raises:
            PromptTooLongError: if every training task was skipped, or if the number of tasks skipped in a row reaches
                ten times the number of training tasks plus 1,000, for example because a curriculum only draws from
                parts without a fitting task.
        """
        tasks: list[Task] = []
        skipped, distinct = 0, set[tuple[str, str]]()
        while len(tasks) < count:
            drawn, stream_state = self.stream.draw(progress.task_stream, count - len(tasks))
            progress.task_stream = dict(stream_state)
            fitting = [task for task in drawn if not self.limits.should_skip(task, self.tokenizer)]
            tasks += fitting
            progress.prompts_skipped += len(drawn) - len(fitting)
            if fitting:
                skipped, distinct = 0, set()
                continue
            skipped += len(drawn)
            distinct |= {(task.environment, task.id) for task in drawn}
            total = len(self.environment.tasks(Split.TRAIN))
            # Epochs have different task orders, so more tasks than one epoch has can precede the first fitting task.
            if len(distinct) >= total or skipped >= 10 * total + 1000:
                raise PromptTooLongError(
                    f"the prompts of {skipped} training tasks in a row have more than {self.limits.longest_prompt} "
                    "tokens and were skipped (rollouts.long_prompts); raise rollouts.max_length or "
                    "rollouts.max_prompt_length"
                )
        progress.tasks_drawn += count
        return tasks

    def _metrics(
        self, progress: Progress, kept: Sequence[RolloutGroup], left_out: Sequence[RolloutGroup]
    ) -> dict[str, float]:
        sampled = [*kept, *left_out]
        equal = sum(any(rollout.rewards for rollout in group.rollouts) for group in left_out)
        results = (result for group in sampled for rollout in group.rollouts for result in rollout.evaluations)
        counts = {
            "filter/dropped_zero_spread": equal,
            "filter/dropped_ungraded": len(left_out) - equal,
            **self.stream.metrics(progress.task_stream),
        }
        metrics = reward_metrics(results)
        if any(rollout.rewards for group in sampled for rollout in group.rollouts):
            metrics |= {**rollout_metrics(sampled), **environment_metrics(sampled, self.stream.parts)}
        return {**metrics, **{name: float(count) for name, count in counts.items()}}


def _sorted_groups(groups: dict[RequestNumber, RolloutGroup]) -> list[RolloutGroup]:
    return [groups[number] for number in sorted(groups)]
