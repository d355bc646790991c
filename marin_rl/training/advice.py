# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Advice to the user of a run that looks healthy and learns little, or that waits for its reward functions."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from marin_rl.rollouts.metrics import is_correct
from marin_rl.types import RolloutGroup

WINDOW = 5
"""Steps in a row before an advice."""
MOST = 0.9
"""Share of groups without signal in each of these steps."""
SLOW_REWARDS = 0.5
"""Share of the time of these steps in reward functions."""
QUICK_CALL = 0.05
"""Seconds per call up to which a call takes hardly longer than the start of its process."""


def count_silent(metrics: Mapping[str, int | float]) -> tuple[int, int]:
    """Return the number of a step's groups that teach nothing, those that the filter dropped included, and of all."""
    dropped = sum(metrics.get(f"filter/dropped_{reason}", 0) for reason in ("zero_spread", "ungraded"))
    silent = metrics.get("groups/no_signal", 0) + dropped
    return int(silent), int(metrics.get("filter/kept_groups", 0) + dropped)


@dataclasses.dataclass
class Advice:
    """Gives each advice at most once per start of a run."""

    report: Callable[[str], None]
    """Prints a message."""
    separate_calls: Sequence[str] = ()
    """Names of the reward functions whose calls have a process each and are not declared stateless."""
    _silent: list[tuple[Mapping[str, float], Sequence[RolloutGroup]]] = dataclasses.field(default_factory=list)
    _slow: list[Mapping[str, float]] = dataclasses.field(default_factory=list)

    def add(self, step: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """Add the groups and metrics of a step."""
        silent, total = count_silent(metrics)
        if len(self._silent) < WINDOW:
            self._silent = [*self._silent, (metrics, groups)] if total and silent >= MOST * total else []
            if len(self._silent) == WINDOW:
                self.report(f"steps {step - WINDOW + 1} to {step}: {_without_signal(self._silent)}")
        if self.separate_calls and len(self._slow) < WINDOW:
            is_slow = metrics["seconds/reward"] > SLOW_REWARDS * metrics["seconds/total"]
            self._slow = [*self._slow, metrics] if is_slow else []
            if len(self._slow) == WINDOW:
                self._advise_stateless(step, len(groups) and sum(len(group.rollouts) for group in groups))

    def _advise_stateless(self, step: int, rollouts: int) -> None:
        reward, total = (sum(of_step[f"seconds/{name}"] for of_step in self._slow) for name in ("reward", "total"))
        calls = rollouts * len(self.separate_calls)
        if reward / WINDOW > QUICK_CALL * max(calls, 1):
            return
        self.report(
            f"steps {step - WINDOW + 1} to {step}: reward functions take {reward / total:.0%} of the time "
            f"({reward / WINDOW:.2f} of {total / WINDOW:.2f} s per step, {calls:,} calls), because each call of "
            f"{' and '.join(map(repr, self.separate_calls))} starts a process; declare a function that keeps no state "
            "between calls and does not run text of the reply with @reward_function(stateless=True)"
        )


def _without_signal(steps: Sequence[tuple[Mapping[str, float], Sequence[RolloutGroup]]]) -> str:
    """Name the causes that the groups show, and the remedies."""
    counts = [count_silent(metrics) for metrics, _ in steps]
    silent, total = (sum(numbers) for numbers in zip(*counts, strict=True))
    groups = [group for _, of_step in steps for group in of_step]
    right = sum(all(map(is_correct, group.rollouts)) for group in groups)
    wrong = sum(not any(map(is_correct, group.rollouts)) for group in groups)
    tasks = collections.Counter((task.environment, task.id) for task in (group.rollouts[0].task for group in groups))
    causes = [
        (right, f"in {right:,} all attempts are right: the tasks are too easy, or the reward tells no replies apart"),
        (wrong, f"in {wrong:,} none is right: they are too hard; use easier ones, a warm start or better weights"),
        (len(groups) if 4 * len(tasks) <= len(groups) else 0, f"there are only {len(tasks):,} tasks; add others"),
    ]
    shown = "; ".join(text for count, text in causes if 4 * count >= len(groups))
    return (
        f"no signal in {silent:,} of {total:,} groups, because all attempts at a task get the same reward, so hardly "
        f"anything is learned; {shown or 'the rewards do not tell replies apart'}. Also a larger rollouts.group_size, "
        "filter: {type: resample} or a curriculum give more groups a signal"
    )
