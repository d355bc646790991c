# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Replay buffer of finished groups that wait to be trained on, with limits on their age and number of uses."""

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping

from marin_rl.distributed.scheduler import GroupRequest, RequestNumber, oldest_version
from marin_rl.rollouts.group_codec import OtherFormatError, decode_group, encode_group, join_parts, split_parts
from marin_rl.types import RolloutGroup, Task, WeightVersion
from marin_rl.utils.errors import UserError


class ReplayFileError(UserError):
    """Raised when a saved buffer cannot be read; the message names the file."""


@dataclasses.dataclass(frozen=True)
class WaitingGroup:
    """A group in the buffer."""

    number: RequestNumber
    """Number of its request."""
    group: RolloutGroup
    """The rollouts."""
    uses_left: int
    """Number of batches that may still use it."""
    oldest_version: WeightVersion | None
    """Weight version of its oldest token; None if no token was sampled because every rollout failed at once."""

    @property
    def task(self) -> Task:
        """Task of the rollouts."""
        return self.group.rollouts[0].task

    def age(self, version: WeightVersion) -> int:
        """Return the staleness for an update of weights of this version."""
        return 0 if self.oldest_version is None else version - self.oldest_version


@dataclasses.dataclass(kw_only=True, eq=False)
class ReplayBuffer:
    """Buffer of groups between rollout source and trainer.

    A request is added once; a duplicate is an error.
    """

    max_staleness: int
    """Maximum versions between the oldest token and the updated weights."""
    max_uses: int = 1
    """Number of batches that use a group."""
    _waiting: dict[RequestNumber, WaitingGroup] = dataclasses.field(default_factory=dict, init=False)

    def copy(self) -> "ReplayBuffer":
        """Return an independent buffer with the same settings and groups."""
        copied = dataclasses.replace(self)
        copied._waiting = dict(self._waiting)
        return copied

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def uses_left(self) -> int:
        """Remaining uses of all groups."""
        return sum(waiting.uses_left for waiting in self._waiting.values())

    def add(self, number: RequestNumber, group: RolloutGroup) -> None:
        """Add a group.

        Raises:
            ValueError: if it is already in the buffer.
        """
        if number in self._waiting:
            raise ValueError(f"group {group.id} is already in the replay buffer; each request is added once")
        self._waiting[number] = WaitingGroup(number, group, self.max_uses, oldest_version(group))

    def expire(self, version: WeightVersion) -> list[WaitingGroup]:
        """Remove and return, in order, the groups that are too old to update weights of this version."""
        stale = [item for item in self._in_order() if item.age(version) > self.max_staleness]
        for item in stale:
            del self._waiting[item.number]
        return stale

    def mix(self, count: int, pending: Iterable[GroupRequest]) -> dict[str, int]:
        """Return the share of each environment in the next batch: that of the oldest requests, finished or not.

        The order of completion differs from the order of requests: groups of a slow environment would be rare in the
        batches, and many of them too old when it is their turn. So a batch waits for its share of each environment. A
        group that is overtaken by others of its environment is part of the share of a later batch. `count` is the
        number of groups in the batch; `pending` are the requests without a finished group.

        Returns:
            Number of groups by environment.
        """
        waiting = [(item.number, item.task.environment) for item in self._waiting.values()]
        queue = sorted([*waiting, *((request.number, request.task.environment) for request in pending)])
        return dict(collections.Counter(environment for _, environment in queue[:count]))

    def holds(self, mix: Mapping[str, int]) -> bool:
        """Return whether the buffer has the given number of groups of each environment."""
        counts = collections.Counter(item.task.environment for item in self._waiting.values())
        return all(counts[environment] >= count for environment, count in mix.items())

    def draw(self, mix: Mapping[str, int], version: WeightVersion) -> list[RolloutGroup]:
        """Draw the groups of a batch, the oldest requests of each environment first, in the order of their numbers.

        `mix` has the number of groups of each environment; fewer are drawn if there are not enough. Call `expire`
        first, with the same version of the weights to update.

        Raises:
            ValueError: if a group is too old.
        """
        candidates = self._in_order()
        for item in candidates:
            if item.age(version) > self.max_staleness:
                raise ValueError(
                    f"group {item.group.id} has tokens of version {item.oldest_version}, too old for weights of "
                    f"version {version} with max_staleness {self.max_staleness}; expire it first"
                )
        left = dict(mix)
        drawn = []
        for item in candidates:
            if left.get(item.task.environment, 0):
                left[item.task.environment] -= 1
                drawn.append(item)
        for item in drawn:
            if item.uses_left > 1:
                self._waiting[item.number] = dataclasses.replace(item, uses_left=item.uses_left - 1)
            else:
                del self._waiting[item.number]
        return [item.group for item in drawn]

    def ages(self, version: WeightVersion) -> list[int]:
        """Return the staleness of every group under weights of this version, in order."""
        return [item.age(version) for item in self._in_order()]

    def encode(self) -> bytes:
        """Return the buffer as bytes: JSON with a row for each group, then the encoded groups."""
        waiting = self._in_order()
        rows = [[item.number.step, item.number.index, item.uses_left] for item in waiting]
        return join_parts([json.dumps(rows).encode(), *(encode_group(item.group) for item in waiting)])

    def load(self, content: bytes, file: object) -> None:
        """Load an empty buffer with content from `encode`; errors name the file.

        Raises:
            ReplayFileError: if the content is not a saved buffer.
        """
        try:
            rows, *groups = split_parts(content)
            for (step, index, uses_left), group in zip(json.loads(rows), groups, strict=True):
                number = RequestNumber(step, index)
                self.add(number, decode_group(group))
                self._waiting[number] = dataclasses.replace(self._waiting[number], uses_left=uses_left)
        except OtherFormatError as error:
            raise ReplayFileError(
                f"the replay buffer in {file} was written by another version of marin_rl: {error}; resume with that "
                "version, or move the folder of the checkpoint elsewhere to go on from the one before it"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ReplayFileError(
                f"the replay buffer in {file} cannot be read: {error}; move the folder of its checkpoint elsewhere to "
                "go on from the one before it"
            ) from error

    def _in_order(self) -> list[WaitingGroup]:
        return [self._waiting[number] for number in sorted(self._waiting)]
