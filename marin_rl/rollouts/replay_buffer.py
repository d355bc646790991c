# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Groups that were played and wait to be trained on: whole groups, none too old, none too often."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from marin_rl.atomic_files import open_atomically
from marin_rl.rollouts.group_codec import decode_group, encode_group
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber, oldest_version
from marin_rl.seeds import derive_seed
from marin_rl.types import RolloutGroup, Task, WeightVersion

_SCHEMA = pa.schema(
    [("step", pa.int64()), ("index", pa.int64()), ("uses_left", pa.int64()), ("group", pa.large_string())]
)


class ReplayFileError(ValueError):
    """A saved buffer that cannot be read; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A group in the buffer."""

    number: RequestNumber
    """Its order."""
    group: RolloutGroup
    """What was played."""
    uses_left: int
    """Batches that it may still be part of."""
    oldest_version: WeightVersion | None
    """Of its oldest token; None where none was sampled, because every attempt failed at once."""

    @property
    def task(self) -> Task:
        """What was attempted."""
        return self.group.rollouts[0].task

    def age(self, version: WeightVersion) -> int:
        """Its staleness under weights of this version."""
        return 0 if self.oldest_version is None else version - self.oldest_version


class ReplayBuffer:
    """Holds groups between the samplers and the trainer.

    Every order is taken once: what came before, or was dropped, is refused.
    """

    def __init__(self, *, max_staleness: int, max_uses: int = 1, half_life: float | None = None, seed: int = 0) -> None:
        """An empty buffer.

        Args:
            max_staleness: most versions between a group's oldest token and the weights that it is used to update.
            max_uses: batches that a group is part of.
            half_life: versions after which a group is half as likely to be drawn; None draws the oldest first.
            seed: of the draws.
        """
        self._max_staleness = max_staleness
        self._uses = max_uses
        self._half_life = half_life
        self._seed = seed
        self._waiting: dict[RequestNumber, Waiting] = {}

    def copy(self) -> "ReplayBuffer":
        """A buffer with the same settings and groups, which changes on its own."""
        copied = ReplayBuffer(
            max_staleness=self._max_staleness,
            max_uses=self._uses,
            half_life=self._half_life,
            seed=self._seed,
        )
        copied._waiting = dict(self._waiting)
        return copied

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def uses_left(self) -> int:
        """How often its groups may be used, all together."""
        return sum(waiting.uses_left for waiting in self._waiting.values())

    def add(self, number: RequestNumber, group: RolloutGroup) -> None:
        """Put a group in.

        Raises:
            ValueError: if it is in already.
        """
        if number in self._waiting:
            raise ValueError(f"group {group.id} is in the replay buffer already; an order is settled once")
        self._waiting[number] = Waiting(number, group, self._uses, oldest_version(group))

    def expire(self, version: WeightVersion, max_staleness: int | None = None) -> list[Waiting]:
        """Take out what is too old to update weights of this version with.

        Args:
            version: of the weights.
            max_staleness: what is too old; None for the buffer's own bound.

        Returns:
            What was taken out, in order.
        """
        bound = self._max_staleness if max_staleness is None else max_staleness
        stale = [one for one in self._in_order() if one.age(version) > bound]
        for one in stale:
            del self._waiting[one.number]
        return stale

    def mix(self, count: int, owed: Iterable[GroupRequest]) -> dict[str, int]:
        """Groups of each environment in the next batch: those of the oldest orders, whether they have come or not.

        What comes first is not what was drawn first: groups of a slow environment would be rare in the batches, and
        many of them too old when their turn came. So a batch waits for its share of each. A group may be overtaken
        by others of its environment, and is then part of a later batch's share.

        Args:
            count: groups of the batch.
            owed: orders whose groups have not come.
        """
        waiting = [(one.number, one.task.environment) for one in self._waiting.values()]
        queue = sorted([*waiting, *((order.number, order.task.environment) for order in owed)])
        return dict(collections.Counter(environment for _, environment in queue[:count]))

    def holds(self, mix: Mapping[str, int]) -> bool:
        """Whether there are so many groups of each environment."""
        counts = collections.Counter(one.task.environment for one in self._waiting.values())
        return all(counts[environment] >= count for environment, count in mix.items())

    def draw(self, mix: Mapping[str, int], version: WeightVersion) -> list[RolloutGroup]:
        """Groups for a batch, each at most once, in the order of their numbers.

        With a half-life `h` a group of staleness `s` is drawn in proportion to `2^(-s/h)`, without replacement
        (Efraimidis and Spirakis 2006: the largest of `log u / w`), among those of its environment.

        Args:
            mix: how many of each environment; fewer come where there are no more.
            version: of the weights that are to be updated; `expire` those that are too old for it first.

        Raises:
            ValueError: if a group is too old.
        """
        candidates = self._in_order()
        for one in candidates:
            if one.age(version) > self._max_staleness:
                raise ValueError(
                    f"group {one.group.id} has tokens of version {one.oldest_version}, too old for weights of version "
                    f"{version} with max_staleness {self._max_staleness}; expire it first"
                )
        if self._half_life is not None:
            candidates = self._recent_first(candidates, self._half_life, version)
        left = dict(mix)
        drawn = []
        for one in candidates:
            if left.get(one.task.environment, 0):
                left[one.task.environment] -= 1
                drawn.append(one)
        for one in drawn:
            if one.uses_left > 1:
                self._waiting[one.number] = dataclasses.replace(one, uses_left=one.uses_left - 1)
            else:
                del self._waiting[one.number]
        return [one.group for one in sorted(drawn, key=lambda one: one.number)]

    def _recent_first(self, candidates: Sequence[Waiting], half_life: float, version: WeightVersion) -> list[Waiting]:
        generator = np.random.default_rng(derive_seed(self._seed, "replay", version))
        ages = np.array([one.age(version) for one in candidates], np.float64)
        keys = np.log(generator.uniform(size=len(candidates))) * np.exp2(ages / half_life)
        return [candidates[place] for place in np.argsort(-keys, kind="stable")]

    def ages(self, version: WeightVersion) -> list[int]:
        """Staleness of every group under weights of this version, in order."""
        return [one.age(version) for one in self._in_order()]

    def save(self, file: Path) -> None:
        """Write the buffer to a Parquet file, whole or not at all."""
        rows = self._in_order()
        table = pa.table(
            [
                [one.number.step for one in rows],
                [one.number.index for one in rows],
                [one.uses_left for one in rows],
                [encode_group(one.group) for one in rows],
            ],
            schema=_SCHEMA,
        )
        with open_atomically(file) as stream:
            pq.write_table(table, stream, compression="zstd")

    def load(self, file: Path) -> None:
        """Fill an empty buffer from a file.

        Raises:
            ReplayFileError: if it is not there, or is none of `save`'s.
        """
        try:
            rows: Sequence[Mapping[str, object]] = pq.read_table(file, schema=_SCHEMA).to_pylist()
            for row in rows:
                number = RequestNumber(int(str(row["step"])), int(str(row["index"])))
                self.add(number, decode_group(str(row["group"])))
                self._waiting[number] = dataclasses.replace(self._waiting[number], uses_left=int(str(row["uses_left"])))
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise ReplayFileError(
                f"the replay buffer in {file} cannot be read: {error}; delete the checkpoint that it belongs to"
            ) from error

    def _in_order(self) -> list[Waiting]:
        return [self._waiting[number] for number in sorted(self._waiting)]
