# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Read and filter stored rollouts.

A rollout is a row of `marin_rl.runs.stored_rollout.SCHEMA`, as a mapping of its columns.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from marin_rl.runs.rollout_store import EVALUATION, TRAINING, StoredFile, list_files, read_file
from marin_rl.runs.run_directory import open_existing
from marin_rl.runs.viewer import summary
from marin_rl.runs.viewer.summary import Row
from marin_rl.types import RolloutStatus
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.storage import StoragePath

LISTED_COLUMNS = (
    *("step", "purpose", "id", "group_id", "environment", "status", "not_trained", "reward", "rewards", "advantage"),
    *("num_turns", "num_generated_tokens"),
)
"""Columns that select rollouts. Reading only these avoids loading the tokens."""


class RolloutNotFoundError(ValueError):
    """A rollout is not stored. The message names the stored steps."""


@dataclasses.dataclass(frozen=True)
class StoredRollouts:
    """Source of stored rollouts: a run directory, or one file."""

    path: StoragePath
    """The run directory or the file."""
    rollouts: StoragePath
    """The folder of stored rollouts, or the file."""
    metrics: StoragePath | None
    """The run's `metrics.jsonl`; None for a single file."""

    @property
    def is_file(self) -> bool:
        """Whether it is a single file."""
        return self.metrics is None


def open_rollouts(path: StoragePath) -> StoredRollouts:
    """Open a run directory, or a file of rollouts, with any name that ends in `.parquet`.

    Raises:
        RunDirectoryError: if the path is neither.
    """
    if not path.is_file():
        directory = open_existing(path)
        return StoredRollouts(directory.path, directory.rollouts, directory.metrics)
    if path.suffix != ".parquet":
        raise RunDirectoryError(f"{str(path)!r} is neither a run directory nor a file of rollouts (.parquet)")
    return StoredRollouts(path, path, None)


def logprob_differences(turn: Row) -> list[float] | None:
    """Return log-probability of the sampler minus that of the learner, per token; None if the learner did not score."""
    learner = turn["learner_logprobs"]
    if learner is None:
        return None
    return [policy - scored for policy, scored in zip(turn["logprobs"], learner, strict=True)]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Filters of rollouts, combined by AND. The default selects all rollouts of training."""

    steps: range | None = None
    """Selected steps; None: all."""
    evaluation: bool = False
    """Whether to select rollouts of evaluations. If false: rollouts of training, or all rollouts of a single file."""
    environment: str | None = None
    """Name of the environment; None: all."""
    status: RolloutStatus | None = None
    """Final status; None: all."""
    min_reward: float | None = None
    """Minimum total reward; if set, rollouts without a reward are excluded."""
    max_reward: float | None = None
    """Maximum total reward; if set, rollouts without a reward are excluded."""

    def files(self, source: StoredRollouts) -> list[StoredFile]:
        """Files that may contain selected rollouts, oldest first.

        Raises:
            RolloutNotFoundError: if none of the selected steps is stored.
        """
        files = list_files(source.rollouts)
        if source.is_file:
            return files
        purpose = EVALUATION if self.evaluation else TRAINING
        files = [file for file in files if file.purpose == purpose]
        if self.steps is None:
            return files
        selected = [file for file in files if file.step in self.steps]
        if not selected:
            kind = "an evaluation" if self.evaluation else "training"
            raise RolloutNotFoundError(f"the selected steps have no stored rollouts of {kind}; {_stored_steps(files)}")
        return selected

    def accepts(self, row: Row) -> bool:
        """Return whether a rollout in one of `files` passes the filters."""
        reward = row["reward"]
        return (
            (self.steps is None or row["step"] in self.steps)
            and (not self.evaluation or row["purpose"] == EVALUATION)
            and (self.environment is None or row["environment"] == self.environment)
            and (self.status is None or row["status"] == self.status.value)
            and (self.min_reward is None or (reward is not None and reward >= self.min_reward))
            and (self.max_reward is None or (reward is not None and reward <= self.max_reward))
        )


def _stored_steps(files: Sequence[StoredFile]) -> str:
    return f"steps {files[0].step} to {files[-1].step} are stored" if files else "no rollouts are stored"


class Listing(NamedTuple):
    """Rollouts of a list."""

    rows: list[Row]
    """The first rollouts, at most `limit`."""
    total: int
    """Number of selected rollouts without the limit."""


def parse_steps(text: str) -> range:
    """Parse a range of steps: `12`, `10-20`, `10-` or `-20`; both ends are included.

    Raises:
        ValueError: if the text has another form, or the first step is after the last.

    >>> parse_steps("10-12")
    range(10, 13)
    """
    first, dash, last = text.strip().partition("-")
    ends = [end.strip() for end in (first, last if dash else first)]
    if not any(ends) or not all(end == "" or end.isdecimal() for end in ends):
        raise ValueError(f"{text!r} is not a range of steps; write 12, 10-20, 10- (and later) or -20 (and earlier)")
    steps = range(int(ends[0] or 0), int(ends[1]) + 1 if ends[1] else 10**12)
    if not steps:
        raise ValueError(f"the range of steps {text!r} is empty; write the lower step first: {ends[1]}-{ends[0]}")
    return steps


def list_rollouts(source: StoredRollouts, selection: Selection, *, limit: int) -> Listing:
    """List the selected rollouts, first those of groups with different rewards, otherwise in the stored order.

    At most `limit` rows are returned, with the columns `LISTED_COLUMNS` and the texts of `summary.Summary`, and the
    number of all selected rollouts.

    Raises:
        RolloutNotFoundError: if none of the selected steps is stored.
        RolloutStoreError: if a file is damaged; the message names it.
    """
    rows: list[Row] = []
    for file in selection.files(source):
        table = read_file(file.path, LISTED_COLUMNS)
        stored = [] if table is None else table.to_pylist()
        unequal = unequal_groups(stored)
        rows += [
            {**row, "place": (file.path, at), "unequal": group_key(row) in unequal}
            for at, row in enumerate(stored)
            if selection.accepts(row)
        ]
    rows.sort(key=lambda row: not row["unequal"])
    return Listing(_with_summaries(rows[:limit]), len(rows))


def unequal_groups(rows: Iterable[Row]) -> set[tuple[int, str, str]]:
    """Return the keys of the groups with different rewards, which training learns from. Rows are of whole groups."""
    rewards: dict[tuple[int, str, str], set[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            rewards.setdefault(group_key(row), set()).add(row["reward"])
    return {key for key, values in rewards.items() if len(values) > 1}


def group_key(row: Row) -> tuple[int, str, str]:
    """Identify the group of a rollout: evaluations repeat the ids of groups."""
    return row["step"], row["purpose"], row["group_id"]


def _with_summaries(rows: Sequence[Row]) -> list[Row]:
    """Replace the `place` of rows, a file and a position in it, by their texts. One file at a time is in memory."""
    by_file: dict[StoragePath, list[int]] = {}
    for index, row in enumerate(rows):
        by_file.setdefault(row["place"][0], []).append(index)
    texts = [summary.Summary("", "", "", "")] * len(rows)
    for path, indices in by_file.items():
        table = read_file(path, summary.COLUMNS)
        for index in indices:
            at = rows[index]["place"][1]
            # A run that resumes removes files of later steps.
            if table is not None and at < len(table):
                texts[index] = summary.summarize(table.slice(at, 1).to_pylist()[0])
    prompts = summary.shorten_prompts([text.prompt for text in texts], [row["environment"] for row in rows])
    return [
        {**{name: row[name] for name in LISTED_COLUMNS}, **text._asdict(), "prompt": prompt}
        for row, text, prompt in zip(rows, texts, prompts, strict=True)
    ]


def newest_step(source: StoredRollouts, *, evaluation: bool) -> int | None:
    """Last step with stored rollouts; None if no rollouts are stored."""
    files = Selection(evaluation=evaluation).files(source)
    return files[-1].step if files else None


def find_rollout(source: StoredRollouts, id: str, steps: range | None = None) -> Row:
    """Load one rollout with all columns. If several evaluations contain the id, the newest rollout is returned.

    All steps are searched if `steps` is None.

    Raises:
        RolloutNotFoundError: if the rollout is not stored.
        RolloutStoreError: if a file is damaged; the message names it.
    """
    files = list_files(source.rollouts)
    for file in reversed(files):
        if not source.is_file and steps is not None and file.step not in steps:
            continue
        table = read_file(file.path, ["id", "step"])
        rows = [] if table is None else table.to_pylist()
        indices = [at for at, row in enumerate(rows) if row["id"] == id and (steps is None or row["step"] in steps)]
        full_table = read_file(file.path) if indices else None
        if full_table is not None:
            return full_table.slice(indices[-1], 1).to_pylist()[0]
    raise RolloutNotFoundError(
        f"no stored rollout has the id {id!r}; {_stored_steps(files)}. List ids with --step, without --id"
    )
