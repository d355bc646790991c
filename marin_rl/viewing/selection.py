# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which stored rollouts to look at.

A rollout is a row of `marin_rl.rollouts.stored_rollout.SCHEMA`, as a mapping of its columns.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marin_rl.rollouts.store import EVALUATION, TRAINING, StoredFile, StoredFormat, list_files, read_file
from marin_rl.runtime.run_directory import RunDirectoryError, open_existing
from marin_rl.types import RolloutStatus

Row = Mapping[str, Any]

SUMMARY_COLUMNS = (
    *("step", "purpose", "id", "group_id", "environment", "status", "not_trained", "reward", "rewards", "advantage"),
    *("num_turns", "num_generated_tokens"),
)
"""What a list shows; reading these alone leaves the tokens on the disk."""


class RolloutNotFoundError(ValueError):
    """No stored rollout is the one that was asked for; the message says what there is."""


@dataclasses.dataclass(frozen=True)
class RolloutSource:
    """Where rollouts are read from: a run directory, or one file."""

    path: Path
    """The run directory or the file."""
    rollouts: Path
    """The folder of stored rollouts, or the file."""
    metrics: Path | None
    """The run's metrics.jsonl; None for a single file."""

    @property
    def is_file(self) -> bool:
        """Whether it is a single file."""
        return self.metrics is None


def open_source(path: Path) -> RolloutSource:
    """The source at a path.

    Args:
        path: a run directory, or a file of rollouts of any name that ends in `.parquet` or `.jsonl`.

    Raises:
        RunDirectoryError: if it is neither.
    """
    if not path.is_file():
        directory = open_existing(path)
        return RolloutSource(directory.path, directory.rollouts, directory.metrics)
    endings = tuple(f".{kind.value}" for kind in StoredFormat)
    if path.suffix not in endings:
        raise RunDirectoryError(
            f"{str(path)!r} is neither a run directory nor a file of rollouts, which ends in {' or '.join(endings)}"
        )
    return RolloutSource(path, path, None)


class SortKey(enum.StrEnum):
    """What a list is sorted by."""

    REWARD = "reward"
    """Total reward."""
    ADVANTAGE = "advantage"
    """Mean advantage."""
    TOKENS = "num_generated_tokens"
    """Tokens sampled."""
    TURNS = "num_turns"
    """Turns."""
    STEP = "step"
    """Step."""
    ID = "id"
    """Id."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Filters, all of which a rollout must pass; by default all rollouts of training."""

    steps: range | None = None
    """Steps; None for all."""
    evaluation: bool = False
    """Those of evaluations instead of those of training; of a single file, which may hold either, those alone."""
    environment: str | None = None
    """Name of the environment."""
    status: RolloutStatus | None = None
    """How they ended."""
    min_reward: float | None = None
    """Least total reward; leaves out those that have none."""
    max_reward: float | None = None
    """Greatest total reward; leaves out those that have none."""

    def files(self, source: RolloutSource) -> list[StoredFile]:
        """The files that may hold such rollouts, the oldest first."""
        files = list_files(source.rollouts)
        if source.is_file:
            return files
        purpose = EVALUATION if self.evaluation else TRAINING
        files = [file for file in files if file.purpose == purpose]
        return [file for file in files if self.steps is None or file.step in self.steps]

    def accepts(self, row: Row) -> bool:
        """Whether a rollout of such a file passes the filters."""
        reward = row["reward"]
        return (
            (self.steps is None or row["step"] in self.steps)
            and (not self.evaluation or row["purpose"] == EVALUATION)
            and (self.environment is None or row["environment"] == self.environment)
            and (self.status is None or row["status"] == self.status.value)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
        )


class Listing(NamedTuple):
    """What a list shows."""

    rows: list[Row]
    """The rollouts, sorted."""
    found: int
    """How many there are without the limit."""


def parse_steps(text: str) -> range:
    """Steps as a user writes them: `12`, `10-20`, `10-`, `-20`; both ends are included.

    Raises:
        ValueError: if it is none of these.

    >>> parse_steps("10-12")
    range(10, 13)
    """
    first, dash, last = text.strip().partition("-")
    ends = [end.strip() for end in (first, last if dash else first)]
    if not any(ends) or not all(end == "" or end.isdecimal() for end in ends):
        raise ValueError(f"{text!r} names no steps; write 12, 10-20, 10- (and later) or -20 (and earlier)")
    return range(int(ends[0] or 0), int(ends[1]) + 1 if ends[1] else 10**12)


def list_rollouts(
    source: RolloutSource, selection: Selection, *, sort: SortKey | None = None, descending: bool = False, limit: int
) -> Listing:
    """Summaries of the selected rollouts.

    Args:
        source: where they are stored.
        selection: which ones.
        sort: by what; None keeps the order in which they were stored. Those without a value come last.
        descending: the greatest first.
        limit: most rows.

    Raises:
        RolloutStoreError: if a file is damaged, naming it.
    """
    tables = [read_file(file.path, SUMMARY_COLUMNS) for file in selection.files(source)]
    rows = [row for table in tables if table is not None for row in table.to_pylist() if selection.accepts(row)]
    if sort is not None:
        rows = _sorted(rows, sort.value, descending)
    return Listing(rows[:limit], len(rows))


def _sorted(rows: Sequence[Row], key: str, descending: bool) -> list[Row]:
    known = sorted((row for row in rows if row[key] is not None), key=lambda row: row[key], reverse=descending)
    return known + [row for row in rows if row[key] is None]


def newest_step(source: RolloutSource, *, evaluation: bool) -> int | None:
    """The last step of which there are rollouts; None where there are none."""
    files = Selection(evaluation=evaluation).files(source)
    return files[-1].step if files else None


def find_rollout(source: RolloutSource, id: str, steps: range | None = None) -> Row:
    """One rollout in full; of several evaluations that hold it, the newest.

    Args:
        source: where it is stored.
        id: its id.
        steps: where to look; None for everywhere.

    Raises:
        RolloutNotFoundError: if there is none.
        RolloutStoreError: if a file is damaged, naming it.
    """
    files = [file for file in list_files(source.rollouts) if source.is_file or steps is None or file.step in steps]
    for file in reversed(files):
        table = read_file(file.path, ["id", "step"])
        rows = [] if table is None else table.to_pylist()
        places = [at for at, row in enumerate(rows) if row["id"] == id and (steps is None or row["step"] in steps)]
        whole = read_file(file.path) if places else None
        if whole is not None:
            return whole.slice(places[-1], 1).to_pylist()[0]
    there = f"steps {files[0].step} to {files[-1].step} are stored" if files else "nothing is stored there"
    raise RolloutNotFoundError(f"no stored rollout has the id {id!r}; {there}. List some with --steps, without --id")
