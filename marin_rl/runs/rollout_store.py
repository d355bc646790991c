# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollout files in the run directory: one file per step and one row per rollout, readable while the run continues.

```
rollouts/
  step-00000012.parquet    the rollouts of step 12
  eval-00000050.parquet    the rollouts of the evaluation after step 50
```

They are Parquet files, written atomically, with the columns of `marin_rl.runs.stored_rollout.SCHEMA`.
"""

import dataclasses
import logging
import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
from annotated_types import Ge, Gt

from marin_rl.runs.stored_rollout import SCHEMA, SCHEMA_VERSION, VERSION_KEY, PieceOf, StoredAdvantages, as_table
from marin_rl.types import Rollout, RolloutGroup
from marin_rl.utils.errors import UserError
from marin_rl.utils.event_loop import BackgroundJob
from marin_rl.utils.remote_path import RemotePath, StorageError
from marin_rl.utils.settings.checks import ConfigSection
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of, file_sizes, write_bytes

logger = logging.getLogger(__name__)

TRAINING, EVALUATION = "training", "evaluation"
"""The purpose of rollouts; values of the `purpose` column."""

_PREFIX = {TRAINING: "step", EVALUATION: "eval"}
_NAME = re.compile(r"(step|eval)-(\d{8,})\.parquet")
_BYTES_IN_MB = 1e6


class RolloutStoreError(UserError):
    """A rollout file cannot be read; the message names the file and the remedy."""


@dataclasses.dataclass(frozen=True)
class RolloutStoreConfig(ConfigSection):
    """Stored rollouts: steps, and size of all files."""

    every: Annotated[int, Ge(0)] = 1
    """Store the rollouts of every `every`-th step and of every evaluation. 0: store nothing."""
    max_mb: Annotated[float, Gt(0)] = 1000.0
    """Maximum megabytes of all files together. The oldest files are removed first; the newest file is always kept."""
    learner_logprobs: bool = False
    """Also store each token's log-probability under the learner's weights before the update, to compare sampler and
    learner. Costs one forward pass over the step's rollouts, unless a critic or an off-policy correction needs it
    anyway."""
    stale: bool = False
    """Also store groups that became too old before any step trained on them (`mode: async`), with the step that dropped
    them; their `not_trained` is `stale`."""
    experts: bool = False
    """Also store the experts that the router of a mixture of experts chose when it sampled, so that a replay can route
    by them. A token needs (layers with experts) · (experts per token) bytes, twice as many with more than 255 experts,
    before compression."""

    def stores(self, step: int, purpose: str = TRAINING) -> bool:
        """Whether to store the rollouts of a step."""
        return self.every > 0 and (purpose == EVALUATION or step % self.every == 0)

    def scores_learner(self, step: int) -> bool:
        """Whether to compute the learner's log-probabilities of a step's rollouts."""
        return self.learner_logprobs and self.stores(step)


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """One rollout file."""

    step: int
    """The step that trained on the rollouts, or the step before an evaluation."""
    purpose: str
    """`training` or `evaluation`."""
    path: StoragePath
    """The file."""

    @property
    def age(self) -> tuple[int, bool, str]:
        """Sort key, oldest first; an evaluation follows its step."""
        return self.step, self.purpose != TRAINING, self.path.name


def list_files(source: StoragePath) -> list[StoredFile]:
    """List the rollout files of a run directory's `rollouts/`, oldest first, or a single file with any name.

    The first row of a single file has the step and purpose. The list is empty if folder or file does not exist or is
    empty.

    Raises:
        RolloutStoreError: if a single file is damaged.
    """
    if source.is_file():
        table = read_file(source, ["step", "purpose"])
        rows = [] if table is None else table.slice(0, 1).to_pylist()
        return [StoredFile(row["step"], row["purpose"], source) for row in rows]
    if not source.is_dir():
        return []
    purposes = {prefix: purpose for purpose, prefix in _PREFIX.items()}
    named = [(match, path) for path in source.iterdir() if (match := _NAME.fullmatch(path.name))]
    files = [StoredFile(int(match[2]), purposes[match[1]], path) for match, path in named]
    return sorted(files, key=lambda file: file.age)


def read_rollouts(
    folder: StoragePath,
    steps: Container[int] | None = None,
    columns: Sequence[str] | None = None,
    purposes: Container[str] = (TRAINING, EVALUATION),
) -> Iterator[pa.Table]:
    """Read the stored rollouts lazily, one table per file, oldest first.

    A file that is removed meanwhile, because the store is full, is skipped. `folder` is a run directory's `rollouts/`.
    `steps` and `columns` of `SCHEMA` are None for all.

    Yields:
        The rollouts of one file.

    Raises:
        RolloutStoreError: if a file is damaged or has another version; names the file.
    """
    for file in list_files(folder):
        if (steps is None or file.step in steps) and file.purpose in purposes:
            table = read_file(file.path, columns)
            if table is not None:
                yield table


def read_file(path: StoragePath, columns: Sequence[str] | None = None) -> pa.Table | None:
    """Read all or some columns of the rollouts in one file; None if the file does not exist.

    Raises:
        RolloutStoreError: if the file is damaged or has another version; names the file.
    """
    try:
        return _read_parquet(path, SCHEMA.names if columns is None else columns)
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        raise RolloutStoreError(
            f"{path} is not a readable rollout file ({error}); if it belongs to a run, delete it to continue without it"
        ) from error


def _read_parquet(path: StoragePath, columns: Sequence[str]) -> pa.Table:
    # Neither a Python object nor threads: a thread of Arrow that releases a Python object while the interpreter exits
    # aborts the process.
    source = pa.BufferReader(path.read_bytes()) if isinstance(path, RemotePath) else str(path)
    with pq.ParquetFile(source) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
        if version is None:
            raise ValueError("it has no schema version")
        if version != SCHEMA.metadata[VERSION_KEY]:
            raise RolloutStoreError(
                f"{path} was written by another version of marin_rl: its schema version is {version.decode()}, this "
                f"program reads version {SCHEMA_VERSION}. Read it with that version; to continue with this version, "
                "set another run_dir, or move the rollouts/ folder out of the run directory"
            )
        table = parquet.read(columns=list(columns), use_threads=False)
    types = {field.name: field.type for field in table.schema}
    for name in columns:
        if types.get(name) != SCHEMA.field(name).type:
            raise ValueError(f"column {name!r} is {types.get(name, 'absent')}, expected {SCHEMA.field(name).type}")
    return table


def as_parquet(table: pa.Table) -> bytes:
    """Convert a table to the content of a Parquet file."""
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd", write_statistics=False)
    return content.getvalue().to_pybytes()


class RolloutStore:
    """Writes a run's rollouts in a background thread.

    `write` waits for the previous call, so that at most one step is being written. The next call raises errors of the
    thread.
    """

    def __init__(self, folder: StoragePath, config: RolloutStoreConfig, piece: PieceOf):
        """Open an existing folder, which may contain files. `piece` maps a token id to its bytes."""
        self.folder = folder
        """The folder of the files."""
        self._config, self._piece = config, piece
        self._job = BackgroundJob("rollout-store")
        self._sizes: dict[StoredFile, int] = {}
        self._digests: dict[str, FileDigest] = {}
        """By name, of the files that this process has written or verified."""
        self._count_files()

    def write(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        advantages: Mapping[str, StoredAdvantages],
        purpose: str = TRAINING,
        stale: Sequence[RolloutGroup] = (),
    ) -> None:
        """Store the configured rollouts of a step in the background; a later call or `flush` raises its errors.

        Args:
            step: the step that trained on the rollouts, or the step before an evaluation.
            groups: all groups of the step, including filtered ones.
            advantages: advantages by rollout id, for the rollouts that were trained on.
            purpose: `training` or `evaluation`.
            stale: groups that were dropped for their age; stored only if configured.

        Raises:
            OSError: if the file of an earlier call could not be written.
        """
        self.flush()
        if not self._config.stores(step, purpose):
            return
        dropped = list(stale) if self._config.stale else []
        if rollouts := [rollout for group in (*groups, *dropped) for rollout in group.rollouts]:
            stale_ids = frozenset(group.id for group in dropped)
            self._job.start(self._write, step, rollouts, advantages, purpose, stale_ids)

    def flush(self) -> None:
        """Wait until all rollouts are on disk.

        Raises:
            OSError: if a file could not be written.
        """
        self._job.flush()

    def close(self) -> None:
        """Wait until all rollouts are on disk, and end the thread."""
        self._job.close()

    def digests(self) -> dict[str, FileDigest]:
        """Return size and checksum of all files by name; waits until they are on disk."""
        self.flush()
        names = {file.path.name: file.path for file in self._sizes}
        self._digests = {name: self._digests.get(name) or digest_of(path) for name, path in names.items()}
        return dict(self._digests)

    def truncate(self, after_step: int, digests: Mapping[str, FileDigest] | None = None) -> None:
        """Remove the rollouts of steps after `after_step`, and incomplete files.

        A run that resumes from a checkpoint repeats those steps. `digests` are of verified files, by name; other files
        are read when they are needed.
        """
        self.flush()
        self._digests = dict(digests or {})
        for partial in self.folder.glob(".*.partial"):
            partial.unlink()
        for file in list_files(self.folder):
            if file.step > after_step:
                file.path.unlink()
        self._count_files()

    def _count_files(self) -> None:
        sizes = file_sizes(self.folder)
        self._sizes = {file: sizes[file.path.name] for file in list_files(self.folder)}

    def _write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        advantages: Mapping[str, StoredAdvantages],
        purpose: str,
        stale_ids: Collection[str],
    ) -> None:
        experts = self._config.experts
        table = as_table(rollouts, step, purpose, advantages, self._piece, stale_ids, experts=experts)
        data = as_parquet(table)
        target = self.folder / f"{_PREFIX[purpose]}-{step:08d}.parquet"
        write_bytes(target, data)
        self._sizes[StoredFile(step, purpose, target)] = len(data)
        self._digests[target.name] = digest_of(data)
        self._make_room(target)

    def _make_room(self, newest: StoragePath) -> None:
        limit, total = self._config.max_mb * _BYTES_IN_MB, sum(self._sizes.values())
        removed: list[StoredFile] = []
        for file in sorted(self._sizes, key=lambda file: file.age):
            if total <= limit or file.path == newest:
                break
            file.path.unlink(missing_ok=True)
            total -= self._sizes.pop(file)
            removed.append(file)
        if removed:
            logger.info(
                "rollouts/: removed %d files (steps %d to %d) to stay within rollout_store.max_mb = %g; %.1f MB remain",
                len(removed),
                removed[0].step,
                removed[-1].step,
                self._config.max_mb,
                total / _BYTES_IN_MB,
            )
