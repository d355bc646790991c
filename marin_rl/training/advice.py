# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Advice for a run that looks healthy and learns little, or that waits for its reward functions."""

from collections.abc import Callable, Mapping, Sequence

from marin_rl.types import RolloutGroup

WINDOW = 5
"""Steps in a row before an advice."""
MOST = 0.9
"""Share of groups without signal in each of these steps."""
SLOW_REWARDS = 0.5
"""Share of the time of these steps in reward functions."""
QUICK_CALL = 0.05
"""Seconds up to which a call takes hardly longer than the start of its process."""


def count_silent(metrics: Mapping[str, int | float]) -> tuple[int, int]:
    """Return the number of a step's groups that teach nothing, those that the filter dropped included, and of all."""
    dropped = sum(metrics.get(f"filter/dropped_{reason}", 0) for reason in ("zero_spread", "ungraded"))
    silent = metrics.get("groups/no_signal", 0) + dropped
    return int(silent), int(metrics.get("filter/kept_groups", 0) + dropped)


class Advice:
    """Gives each advice at most once per start of a run."""

    def __init__(self, report: Callable[[str], None], functions: Sequence[str] = ()) -> None:
        """Start without steps.

        Args:
            report: prints a message.
            functions: names of the reward functions whose calls have a process each for want of `stateless=True`.
        """
        self._report, self._functions = report, functions
        self._silent: list[Mapping[str, float]] = []
        self._slow: list[Mapping[str, float]] = []
        self._tasks: set[tuple[str, str]] = set()

    def add(self, step: int, groups: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """Add the groups and metrics of a step."""
        steps, (silent, total) = f"steps {step - WINDOW + 1} to {step}", count_silent(metrics)
        tasks = {(task.environment, task.id) for task in (group.rollouts[0].task for group in groups)}
        if len(self._silent) < WINDOW:
            is_silent = total and silent >= MOST * total
            self._silent, self._tasks = ([*self._silent, metrics], self._tasks | tasks) if is_silent else ([], set())
            if len(self._silent) == WINDOW:
                self._report(f"{steps}: {_without_signal(self._silent, len(self._tasks))}")
        calls = len(self._functions) * sum(len(group.rollouts) for group in groups)
        if len(self._slow) < WINDOW:
            is_slow = SLOW_REWARDS * metrics["seconds/total"] < metrics["seconds/reward"] < QUICK_CALL * calls
            self._slow = [*self._slow, metrics] if is_slow else []
            if len(self._slow) == WINDOW:
                self._report(f"{steps}: {_separate_calls(self._slow, self._functions, calls)}")


def _without_signal(steps: Sequence[Mapping[str, float]], tasks: int) -> str:
    silent, total = (sum(counts) for counts in zip(*map(count_silent, steps), strict=True))
    right, wrong = (sum(one.get(f"groups/all_{kind}_share", 0) for one in steps) / WINDOW for kind in ("good", "bad"))
    causes = [
        (right, f"in {right:.0%} all attempts are right: the tasks are too easy, or the reward tells no replies apart"),
        (wrong, f"in {wrong:.0%} none is right: the tasks are too hard, so take easier ones or a warm start"),
        (1 - 4 * tasks / total, f"there are only {tasks} different tasks: add others"),
    ]
    return (
        f"no signal in {silent:,} of {total:,} groups, in which all attempts have the same reward, so that hardly "
        f"anything is learned; {'; '.join(text for share, text in causes if share > 0.2)}. A larger "
        "rollouts.group_size, filter: {type: resample} or a curriculum give more groups a signal"
    )


def _separate_calls(steps: Sequence[Mapping[str, float]], functions: Sequence[str], calls: int) -> str:
    reward, total = (sum(metrics[f"seconds/{name}"] for metrics in steps) / WINDOW for name in ("reward", "total"))
    return (
        f"reward functions take {reward / total:.0%} of the time ({reward:.2f} of {total:.2f} s per step, {calls:,} "
        f"calls), because each call of {' and '.join(map(repr, functions))} starts a process; declare a function that "
        "keeps no state between calls and does not run text of the reply with @reward_function(stateless=True)"
    )
