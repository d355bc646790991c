# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Scheduler of group requests: which groups are pending, and how far sampling may run ahead of training.

A group is requested before it is sampled. Requests are numbered within the step that they are drawn for. All randomness
of a group follows from its number, so the result does not depend on the worker, the time or the number of attempts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from marin_rl.rollouts.group_codec import decode_task, encode_task
from marin_rl.types import RolloutGroup, Task, WeightVersion


class RequestNumber(NamedTuple):
    """Number of a group request; earlier requests are smaller."""

    step: int
    """Step that the group is requested for; it may be trained on in a later step."""
    index: int
    """Index within the step; replacements of dropped groups follow the others."""

    @property
    def group_id(self) -> str:
        """Id of the group."""
        return f"train-{self.step}-{self.index}"


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """Request for a group of rollouts."""

    number: RequestNumber
    """Number of the request, which seeds all its randomness."""
    task: Task
    """Task of the rollouts."""
    min_version: WeightVersion
    """Oldest weights that may start the group; with older weights it would be too stale for its step."""


@dataclasses.dataclass(frozen=True)
class StalenessLimits:
    """Limits on how far sampling may run ahead of training; the run's config validates them."""

    groups_per_step: int
    """Number of groups in the batch of a step."""
    max_staleness: int = 0
    """Maximum number of steps between the weights that sampled a token and the weights that it updates."""
    max_uses: int = 1
    """Number of batches that a group is used in."""
    replacements_per_step: int = 0
    """Maximum number of requests per step that replace dropped groups."""
    last_step: int | None = None
    """Last step of the run: no group is requested for later steps. None for no end."""

    @property
    def horizon(self) -> int:
        """Uses that may precede those of a new group; with more, its last use would be too old."""
        return (self.max_staleness + 2 - self.max_uses) * self.groups_per_step

    @property
    def room(self) -> int:
        """Maximum number of uses that are requested or waiting."""
        return max(self.horizon + self.max_uses - 1, self.groups_per_step * self.max_uses)


class RolloutScheduler:
    """Requests groups and tracks the pending ones. A request is completed once."""

    def __init__(self, limits: StalenessLimits, state: Mapping[str, Any] | None = None) -> None:
        """Make a scheduler from a saved `state`; None for a new run."""
        self.limits = limits
        self._next_index: dict[int, int] = {}
        self._replaced: dict[int, int] = {}
        self._missing: dict[int, int] = {}
        self._outstanding: dict[RequestNumber, GroupRequest] = {}
        self._retries: list[Task] = []
        if state:
            self._next_index = {int(step): count for step, count in state["next_index"].items()}
            self._replaced = {int(step): count for step, count in state["replaced"].items()}
            self._missing = {int(step): count for step, count in state["missing"].items()}
            self._retries = [decode_task(task) for task in state["again"]]
            for request in state["outstanding"]:
                number = RequestNumber(*request["number"])
                self._outstanding[number] = GroupRequest(number, decode_task(request["task"]), request["min_version"])

    @property
    def state(self) -> dict[str, Any]:
        """State of the scheduler as JSON values."""
        return {
            "next_index": {str(step): count for step, count in self._next_index.items()},
            "replaced": {str(step): count for step, count in self._replaced.items()},
            "missing": {str(step): count for step, count in self._missing.items()},
            "again": [encode_task(task) for task in self._retries],
            "outstanding": [
                {"number": list(request.number), "task": encode_task(request.task), "min_version": request.min_version}
                for request in self.outstanding
            ],
        }

    @property
    def outstanding(self) -> list[GroupRequest]:
        """Pending requests, in order."""
        return [self._outstanding[number] for number in sorted(self._outstanding)]

    def retry(self, tasks: Iterable[Task]) -> None:
        """Request these tasks again before new ones are drawn, because their groups were too old to train on.

        Without this, slow tasks would be trained on less often than they are drawn.
        """
        self._retries += tasks

    def groups_needed(self, step: int) -> int:
        """Return the number of groups that a step waits for: all but those dropped without replacement."""
        return self.limits.groups_per_step - self._missing.get(step, 0)

    def request(
        self, version: WeightVersion, waiting_uses: int, waiting_groups: int, draw: Callable[[int], Sequence[Task]]
    ) -> list[GroupRequest]:
        """Request as many groups as the limits allow: first tasks to retry, then new tasks.

        `version` is that of the newest weights. `waiting_uses` are the remaining uses of all `waiting_groups` finished
        groups. `draw` returns the given number of tasks.
        """
        limits = self.limits
        for counts in (self._next_index, self._replaced, self._missing):
            for past in [step for step in counts if step <= version]:
                del counts[past]
        # A group that was dropped without replacement keeps its slot: its step is smaller, and later groups are not
        # trained on earlier.
        ahead = waiting_uses + limits.max_uses * len(self._outstanding) + sum(self._missing.values())
        present = waiting_groups + len(self._outstanding)
        # A step uses each group at most once, so few groups with many uses left do not suffice.
        count = max(math.ceil((limits.horizon - ahead) / limits.max_uses), self.groups_needed(version + 1) - present)
        if limits.last_step is not None:
            remaining = (limits.last_step - version) * limits.groups_per_step - sum(self._missing.values())
            count = min(count, remaining - present)
        count = max(count, 0)
        tasks, self._retries = self._retries[:count], self._retries[count:]
        if missing := count - len(tasks):
            tasks += draw(missing)
        return [
            self._make_request(task, version, self._first_use(version, ahead + place * limits.max_uses))
            for place, task in enumerate(tasks)
        ]

    def replace(
        self,
        dropped: Iterable[RequestNumber],
        version: WeightVersion,
        draw: Callable[[int], Sequence[Task]],
    ) -> list[GroupRequest]:
        """Request a replacement for each dropped group, up to the limit per step.

        `dropped` are numbers of completed requests; those of past steps count for the next step. `version` is that of
        the newest weights. `draw` returns the given number of tasks.
        """
        steps = []
        for step in sorted(max(number.step, version + 1) for number in dropped):
            replaced = self._replaced.get(step, 0)
            if replaced < self.limits.replacements_per_step:
                self._replaced[step] = replaced + 1
                steps.append(step)
            else:
                self._skip_slot(step)
        tasks = draw(len(steps)) if steps else ()
        return [self._make_request(task, version, step) for step, task in zip(steps, tasks, strict=True)]

    def _skip_slot(self, step: int) -> None:
        # Because of retries, more groups may be numbered for a step than it takes; then a later step gets fewer.
        while self.groups_needed(step) < 1:
            step += 1
        self._missing[step] = self._missing.get(step, 0) + 1

    def complete(self, number: RequestNumber) -> bool:
        """Complete a request. Return False if it is not pending, because it was completed before."""
        return self._outstanding.pop(number, None) is not None

    def _first_use(self, version: WeightVersion, ahead: int) -> int:
        latest = self.limits.max_staleness + 1 - self.limits.max_uses
        return version + 1 + min(ahead // self.limits.groups_per_step, latest)

    def _make_request(self, task: Task, version: WeightVersion, step: int) -> GroupRequest:
        number = RequestNumber(step, self._next_index.get(step, 0))
        self._next_index[step] = number.index + 1
        # Step s updates weights of version s - 1; the last use is max_uses - 1 steps after the first.
        last_updated = step - 1 + self.limits.max_uses - 1
        request = GroupRequest(number, task, max(last_updated - self.limits.max_staleness, 0))
        self._outstanding[number] = request
        return request


def oldest_version(group: RolloutGroup) -> WeightVersion | None:
    """Return the weight version of the oldest token of a group; None if no token was sampled."""
    versions = [turn.generation.first_version for rollout in group.rollouts for turn in rollout.turns]
    return min(versions, default=None)
