# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which groups are asked for, by whom they are owed, and how far ahead of training they may be.

A group is ordered before it is played. Orders are numbered within the step that they are drawn for, and everything
random about a group follows from its number, so that it does not matter who plays it, when, or how often it is lost
and begun anew.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from marin_rl.rollouts.group_codec import decode_task, encode_task
from marin_rl.types import RolloutGroup, Task, WeightVersion


class RequestNumber(NamedTuple):
    """Names an order; earlier ones are smaller."""

    step: int
    """The step that it is ordered for; it may be trained on in a later one."""
    index: int
    """Its place among those; replacements of dropped groups come after the others."""

    @property
    def group_id(self) -> str:
        """The name of its group."""
        return f"train-{self.step}-{self.index}"


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """A group that is to be played."""

    number: RequestNumber
    """Names it, and all randomness in it."""
    task: Task
    """What is to be attempted."""
    min_version: WeightVersion
    """The oldest weights to begin it with: with older ones it would be too stale when its turn comes."""


@dataclasses.dataclass(frozen=True)
class StalenessLimits:
    """How far sampling may be ahead of training."""

    groups_per_step: int
    """Groups in the batch of a step."""
    max_staleness: int = 0
    """Most steps between the weights that sampled a token and those that are updated with it."""
    max_uses: int = 1
    """Batches that a group is part of."""
    replacements_per_step: int = 0
    """Most groups that are ordered in place of dropped ones, for each step."""
    capacity: int | None = None
    """Most groups that are ordered or waiting at a time; None leaves it to the other bounds."""
    last_step: int | None = None
    """No group is ordered that only later steps could train on; None for no end."""

    def __post_init__(self) -> None:
        for name, least in (
            ("groups_per_step", 1),
            ("max_staleness", 0),
            ("max_uses", 1),
            ("replacements_per_step", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.capacity is not None and self.capacity < self.groups_per_step:
            raise ValueError(
                f"capacity is {self.capacity} groups, but a step takes {self.groups_per_step} together; raise it"
            )
        if self.max_uses > self.max_staleness + 1:
            raise ValueError(
                f"max_uses is {self.max_uses}, but a group is in one batch of a step, so with "
                f"max_staleness {self.max_staleness} it can be used {self.max_staleness + 1} times at most; raise "
                "max_staleness"
            )

    @property
    def horizon(self) -> int:
        """Uses before those of a group that is ordered now; with as many as this, its last use would be too old."""
        return (self.max_staleness + 2 - self.max_uses) * self.groups_per_step

    @property
    def room(self) -> int:
        """Most uses that are ordered or waiting at a time."""
        most = max(self.horizon + self.max_uses - 1, self.groups_per_step * self.max_uses)
        return most if self.capacity is None else min(most, self.capacity * self.max_uses)


class RolloutScheduler:
    """The orders of a run. What was settled once is settled: no group is taken twice."""

    def __init__(self, pace: StalenessLimits, state: Mapping[str, Any] | None = None) -> None:
        """Open the book.

        Args:
            pace: how far ahead to order.
            state: what `state` gave; None at the beginning.
        """
        self.pace = pace
        self._next_index: dict[int, int] = {}
        self._replaced: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._outstanding: dict[RequestNumber, GroupRequest] = {}
        self._again: list[Task] = []
        if state:
            self._next_index = {int(step): count for step, count in state["next_index"].items()}
            self._replaced = {int(step): count for step, count in state["replaced"].items()}
            self._missing = {int(step): count for step, count in state["missing"].items()}
            self._again = [decode_task(task) for task in state["again"]]
            for order in state["outstanding"]:
                number = RequestNumber(*order["number"])
                self._outstanding[number] = GroupRequest(number, decode_task(order["task"]), order["min_version"])

    @property
    def state(self) -> dict[str, Any]:
        """The book as JSON values."""
        return {
            "next_index": {str(step): count for step, count in self._next_index.items()},
            "replaced": {str(step): count for step, count in self._replaced.items()},
            "missing": {str(step): count for step, count in self._missing.items()},
            "again": [encode_task(task) for task in self._again],
            "outstanding": [
                {"number": list(order.number), "task": encode_task(order.task), "min_version": order.min_version}
                for order in self.outstanding
            ],
        }

    @property
    def outstanding(self) -> list[GroupRequest]:
        """Orders whose groups have not come, in order."""
        return [self._outstanding[number] for number in sorted(self._outstanding)]

    def again(self, tasks: Iterable[Task]) -> None:
        """Order these tasks anew before others are drawn: their groups came too late to be trained on.

        Otherwise the tasks that take long would be trained on less often than they are drawn.
        """
        self._again += tasks

    def wanted(self, step: int) -> int:
        """Groups that a step waits for: all but those that were dropped and not replaced."""
        return self.pace.groups_per_step - self._missing.get(step, 0)

    def order(
        self, version: WeightVersion, waiting_uses: int, waiting_groups: int, draw: Callable[[int], Sequence[Task]]
    ) -> list[GroupRequest]:
        """Order as many groups as there is room for: of tasks that are to be ordered anew, then of new ones.

        Args:
            version: the newest weights.
            waiting_uses: how often what has come will still be trained on.
            waiting_groups: how many groups that is.
            draw: gives so many tasks, the next ones.
        """
        pace = self.pace
        for counts in (self._next_index, self._replaced, self._missing):
            for over in [step for step in counts if step <= version]:
                del counts[over]
        # The place of a group that was dropped and not replaced stays empty: its step is smaller, and those behind it
        # come no sooner.
        ahead = waiting_uses + pace.max_uses * len(self._outstanding) + sum(self._missing.values())
        there = waiting_groups + len(self._outstanding)
        # A step takes each group once at most, so a few with many uses left are not enough.
        count = max(math.ceil((pace.horizon - ahead) / pace.max_uses), self.wanted(version + 1) - there)
        if pace.capacity is not None:
            count = min(count, pace.capacity - there)
        if pace.last_step is not None:
            still = (pace.last_step - version) * pace.groups_per_step - sum(self._missing.values())
            count = min(count, still - there)
        count = max(count, 0)
        tasks, self._again = self._again[:count], self._again[count:]
        if missing := count - len(tasks):
            tasks += draw(missing)
        return [
            self._open(task, version, self._first_use(version, ahead + place * pace.max_uses))
            for place, task in enumerate(tasks)
        ]

    def replace(
        self,
        dropped: Iterable[RequestNumber],
        version: WeightVersion,
        draw: Callable[[int], Sequence[Task]],
    ) -> list[GroupRequest]:
        """Order a further group for each that was dropped, as far as the bound of its step allows.

        Args:
            dropped: numbers that were settled; of a step that is over they count for the next one.
            version: the newest weights.
            draw: gives so many tasks, the next ones.
        """
        steps = []
        for step in sorted(max(number.step, version + 1) for number in dropped):
            replaced = self._replaced.get(step, 0)
            if replaced < self.pace.replacements_per_step:
                self._replaced[step] = replaced + 1
                steps.append(step)
            else:
                self._leave_empty(step)
        tasks = draw(len(steps)) if steps else ()
        return [self._open(task, version, step) for step, task in zip(steps, tasks, strict=True)]

    def _leave_empty(self, step: int) -> None:
        # Where groups were ordered anew, a step's number may be on more of them than it takes: later ones lack those.
        while self.wanted(step) < 1:
            step += 1
        self._missing[step] = self._missing.get(step, 0) + 1

    def complete(self, number: RequestNumber) -> bool:
        """Take note that a group has come. False where nobody owes it: it came before."""
        return self._outstanding.pop(number, None) is not None

    def _first_use(self, version: WeightVersion, ahead: int) -> int:
        latest = self.pace.max_staleness + 1 - self.pace.max_uses
        return version + 1 + min(ahead // self.pace.groups_per_step, latest)

    def _open(self, task: Task, version: WeightVersion, step: int) -> GroupRequest:
        number = RequestNumber(step, self._next_index.get(step, 0))
        self._next_index[step] = number.index + 1
        # Step s updates the weights of version s - 1, and the last use is some steps after the first.
        last_updated = step - 1 + self.pace.max_uses - 1
        order = GroupRequest(number, task, max(last_updated - self.pace.max_staleness, 0))
        self._outstanding[number] = order
        return order


def oldest_version(group: RolloutGroup) -> WeightVersion | None:
    """Version of the weights behind the oldest token of a group; None where no token was sampled."""
    versions = [turn.generation.first_version for rollout in group.rollouts for turn in rollout.turns]
    return min(versions, default=None)
