# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Atomic checkpoints: a checkpoint is complete, or it does not exist.

```
checkpoints/
  step-00000040/
    state/          chunks of the arrays: weights, optimizer moments and random key, restorable on any mesh
    replay.bin      groups that wait for training
    manifest.json   format, step, host-side progress, all arrays, all files with their sizes and checksums
```

`save` copies the arrays to the host and returns; a thread writes them while training continues. Every process of a
multi-host run writes the shards of its devices, the main process writes the rest. On a local file system a checkpoint
is written into a folder with a leading dot, synced to disk and then renamed. In an object store all other files are in
a folder with a random name of the save, the manifest is written last, and a folder without a manifest is not a
checkpoint. The next save removes what an interrupted save has left.
"""

import contextlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from levanter.trainer_state import TrainerState

from marin_rl.runs.array_files import STATE, HostArray, copy_to_host, write_arrays
from marin_rl.runs.run_directory import (
    MANIFEST,
    CheckpointConfig,
    CheckpointError,
    folder_name,
    is_committed,
    list_steps,
    step_of,
)
from marin_rl.runs.saved_checkpoint import Checkpoint, DamagedCheckpointError, open_checkpoint
from marin_rl.utils import multihost
from marin_rl.utils.event_loop import BackgroundJob
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of, file_sizes, remove, replace_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_TIMEOUT = 3600.0
"""Seconds after which a save fails if another process has not written its arrays."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: StoragePath, config: CheckpointConfig, keep_first: bool = False) -> None:
        """Set up without reading.

        With `keep_first`, the checkpoint of step 0 is always kept, because its weights are the KL reference.
        """
        self.folder = folder
        """Folder of the checkpoints."""
        self._config = config
        self.keep_first = keep_first
        """Whether to always keep the checkpoint of step 0."""
        self._job = BackgroundJob("checkpoint")

    def save(
        self, state: TrainerState, step: int, progress: Mapping[str, Any], files: Mapping[str, bytes] | None = None
    ) -> StoragePath:
        """Copy a training state to the host, and write it in the background; collective over all processes.

        Waits for the previous save. Checkpoints that are no longer kept are deleted after the write. The state may be
        donated when this returns. `step` is the number of finished steps and names the checkpoint. `progress` is the
        host's part of the state, serializable as JSON. The returned folder exists after `flush`.

        Raises:
            CheckpointError: if this or the previous checkpoint cannot be written (disk full, no permission), or if the
                main process does not see the files of the other processes; earlier checkpoints are then untouched.
                Also if an old checkpoint cannot be deleted.
        """
        self.flush()
        target, attempt = self._start(step)
        # A copy, because training changes it.
        own = json.loads(json.dumps(dict(progress)))
        self._job.start(self._write, target, attempt, step, own, copy_to_host(state), dict(files or {}))
        return target

    def save_now(self, state: Any, step: int, progress: Mapping[str, Any]) -> None:
        """Write a state before this returns, without a copy of it in memory; see `save`."""
        self.flush()
        self._write(*self._start(step), step, dict(progress), copy_to_host(state, donated=False), {})

    def _start(self, step: int) -> tuple[StoragePath, str]:
        """Return the folder of a checkpoint, and a unique name of this attempt."""
        target = self._path(step)
        with self._writing(target):
            return target, multihost.on_main(lambda: self._begin(target))

    def flush(self) -> None:
        """Wait for the running save.

        Raises:
            CheckpointError: if it failed.
        """
        self._job.flush()

    def raise_if_failed(self) -> None:
        """Raise the error of a save that has failed; do not wait for a running save."""
        self._job.raise_if_failed()

    def close(self) -> None:
        """Wait for the running save and end the thread; raises CheckpointError if the save failed."""
        self._job.close()

    def _begin(self, target: StoragePath) -> str:
        """Remove what interrupted saves left, create the folder and return a unique name of this attempt."""
        # Unique: after a failed save, threads of a lost process may still be writing into the old folder.
        attempt = uuid.uuid4().hex[:16]
        self._remove_partials()
        (self._partial(target, attempt) / STATE).mkdir(parents=True, exist_ok=True)
        return attempt

    def _write(
        self,
        target: StoragePath,
        attempt: str,
        step: int,
        progress: dict[str, Any],
        arrays: dict[str, HostArray],
        files: dict[str, bytes],
    ) -> None:
        """Write the shards of this process; the main process then writes the rest. Runs in the thread."""
        partial = self._partial(target, attempt)

        def write() -> str:
            return json.dumps(write_arrays(partial, arrays))

        def commit(parts: list[str]) -> None:
            written = {name: FileDigest(*digest) for part in parts for name, digest in json.loads(part).items()}
            for name, data in files.items():
                (partial / name).write_bytes(data)
                written[name] = digest_of(data)
            folder = attempt if isinstance(target, RemotePath) else ""
            described = {name: array for name, (array, _) in arrays.items()}
            checkpoint = Checkpoint(target, step, progress, folder, described, written)
            _require_complete(checkpoint, partial)
            ((target if folder else partial) / MANIFEST).write_bytes(checkpoint.manifest().encode())
            self._finish(target, partial)
            self._prune(newest=step)

        with self._writing(target):
            multihost.commit_in_background(f"checkpoint/{attempt}", write, commit, SAVE_TIMEOUT)

    def _finish(self, target: StoragePath, partial: StoragePath) -> None:
        """Give a complete checkpoint its name."""
        if isinstance(target, Path) and isinstance(partial, Path):
            replace_folder(target, partial)
            return
        # Files of an earlier save of this step.
        for stale in file_sizes(target).keys() - {MANIFEST}:
            if not stale.startswith(f"{partial.name}/"):
                (target / stale).unlink(missing_ok=True)

    def _partial(self, target: StoragePath, attempt: str) -> StoragePath:
        """The folder into which a checkpoint is written."""
        return target / attempt if isinstance(target, RemotePath) else self.folder / f".{target.name}.{attempt}.partial"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, oldest first; ignores names such as `step-1`."""
        self._job.flush()
        return list_steps(self.folder)

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint of one step; collective over all processes.

        Raises:
            CheckpointError: if it is missing or damaged.
        """
        self._job.flush()
        return open_checkpoint(self._path(step))

    def restore_newest(self, load: Callable[[Checkpoint], T]) -> T | None:
        """Load the newest checkpoint; skip damaged ones with a warning that names the damage. Collective.

        `load` runs in every process, and may raise `DamagedCheckpointError` in all of them. The result is None if there
        are no checkpoints.

        Raises:
            CheckpointError: if all checkpoints are damaged.
        """
        self._job.flush()
        damages: list[str] = []
        candidates = json.loads(multihost.on_main(lambda: json.dumps(self._candidates())))
        for step in candidates:
            try:
                return load(self.open(step))
            except DamagedCheckpointError as error:
                logger.warning("%s; falling back to the one before it", error)
                damages.append(str(error))
        if damages:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: {'; '.join(damages)}. "
                "Restore their files from a copy, or choose another run_dir"
            )
        return None

    def _candidates(self) -> list[int]:
        for path in sorted(self.folder.glob("step-*")):
            if step_of(path) is None:
                logger.warning("%s is ignored: checkpoints are folders named like %s", path, folder_name(1))
            elif not is_committed(path):
                logger.warning("%s is ignored: its save was interrupted before it wrote %s", path, MANIFEST)
        return list_steps(self.folder)[::-1]

    @contextlib.contextmanager
    def _writing(self, target: StoragePath) -> Iterator[None]:
        """Convert errors of a save to `CheckpointError`."""
        try:
            yield
        except CheckpointError:
            self._remove_partials()
            raise
        except (OSError, ValueError) as error:
            self._remove_partials()
            remedy = "free disk space or fix the permissions, then run the same command again"
            raise CheckpointError(
                f"could not write checkpoint {target}: {error}. Earlier checkpoints are untouched; {remedy}"
            ) from error

    def _remove_partials(self) -> None:
        """Remove what interrupted saves left, as far as possible; the next save removes any remaining files."""
        if not multihost.is_main():
            return
        with contextlib.suppress(OSError):
            if isinstance(self.folder, RemotePath):
                leftovers = [path for path in self.folder.glob("step-*") if not is_committed(path)]
            else:
                leftovers = list(self.folder.glob(".step-*.partial"))
            for leftover in leftovers:
                with contextlib.suppress(OSError):
                    remove(leftover)

    def _prune(self, newest: int) -> None:
        # Newer checkpoints are damaged, or the run would have resumed from them; they must not count as kept.
        every = list_steps(self.folder)
        steps = [step for step in every if step <= newest]
        kept = set(steps[-self._config.keep_last :])
        if self.keep_first:
            kept.add(0)
        if self._config.keep_every:
            kept |= {step for step in steps if step % self._config.keep_every == 0}
        for step in every:
            if step in kept:
                continue
            path = self._path(step)
            try:
                if isinstance(path, RemotePath):
                    (path / MANIFEST).unlink(missing_ok=True)
                remove(path)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint of step {newest} is complete, but the old checkpoint {path} could not be deleted: "
                    f"{error}. Fix its permissions or delete it, then run the same command again"
                ) from error

    def _path(self, step: int) -> StoragePath:
        return self.folder / folder_name(step)


def _require_complete(checkpoint: Checkpoint, partial: StoragePath) -> None:
    """Check before the commit that the main process sees every file of every array."""
    sizes = file_sizes(partial)
    absent = [name for name, file in checkpoint.files.items() if sizes.get(name) != file.size]
    absent += checkpoint.missing_files()
    if absent:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is incomplete: {len(absent)} files of its arrays are absent, the first is "
            f"{absent[0]}. Every training process writes its own shards, so all of them must see one folder: put "
            "run_dir on a file system that all training hosts share, or in an object store"
        )
