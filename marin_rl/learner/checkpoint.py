# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Atomic checkpoints: a checkpoint is complete and verified, or it does not exist.

```
checkpoints/
  step-00000040/
    state/          weights, optimizer moments and random key (TensorStore, restorable on any mesh)
    manifest.json   format, step, host-side progress, shape and dtype of every array, size and checksum of every file
```

The manifest lists every chunk of every array of the state. A save with a missing chunk fails, and a checkpoint with a
missing chunk is not opened: TensorStore would read the missing chunk as zeros.

A checkpoint is written into a folder with a leading dot, synced to disk and then renamed; the next save removes partial
folders. In a multi-host run every process writes its own shards and the main process writes the rest, into a folder
that all processes share.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
from haliax import NamedArray
from levanter.checkpoint import load_checkpoint as levanter_load
from levanter.checkpoint import save_checkpoint as levanter_save
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.jax_utils import leaf_key_paths

from marin_rl import multihost
from marin_rl.atomic_files import remove, replace_folder
from marin_rl.errors import UserError

logger = logging.getLogger(__name__)
# Levanter warns about every leaf with the value None; each static field of an optimizer's state is such a leaf.
logging.getLogger("levanter.tensorstore_serialization").addFilter(
    lambda record: "Unknown leaf type <class 'NoneType'>" not in record.getMessage()
)

T = TypeVar("T")

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state"
"""The folder of the arrays in a checkpoint."""
_MANIFEST_TYPES = {"step": int, "progress": dict, "arrays": dict, "files": dict}
ARRAY_METADATA = ".zarray"
"""TensorStore's file with the shape and the chunk shape of an array."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or read; the message names the folder and the problem."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, and which ones to keep."""

    every: int = 50
    """Steps between checkpoints; the last step is always saved. 0 saves only the last step."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; at least 2, so that an undamaged one remains if the newest is damaged."""
    keep_every: int = 0
    """Keep the checkpoints of all steps divisible by this number; 0 keeps only the last `keep_last`."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep_every < 0:
            raise ValueError("checkpoint.every and checkpoint.keep_every count steps and cannot be negative")
        if self.keep_last < 2:
            raise ValueError(f"checkpoint.keep_last is {self.keep_last}; keep at least 2, one to fall back to")


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run."""

    folder: Path
    """Folder of the checkpoints."""
    config: CheckpointConfig
    """Retention settings."""
    keep_first: bool = False
    """Whether to always keep the checkpoint of step 0, because its weights are the KL reference."""

    def save(
        self,
        state: TrainerState,
        step: int,
        progress: Mapping[str, Any],
        add_files: Callable[[Path], object] = lambda folder: None,
    ) -> Path:
        """Save a checkpoint and delete the ones that are no longer kept.

        Args:
            state: the training state.
            step: updates done so far; names the checkpoint.
            progress: the host's part of the state, serializable as JSON.
            add_files: writes additional files into the checkpoint's folder.

        Raises:
            CheckpointError: if it cannot be written (disk full, no permission), or if the main process does not see
                every file that the other processes wrote. Earlier checkpoints are untouched.
        """
        target = self._path(step)
        arrays = _array_folders(state)
        try:
            partial = self.folder / multihost.on_main(lambda: self._begin(target))
            levanter_save(state, step, partial / STATE, is_temporary=False)
            manifest = {"format": FORMAT, "step": step, "progress": dict(progress), "arrays": _array_types(state)}
            multihost.on_main(lambda: self._complete(partial, target, manifest, arrays, add_files))
        except CheckpointError:
            self._remove_partials()
            raise
        except (OSError, ValueError) as error:
            self._remove_partials()
            raise CheckpointError(
                f"could not write checkpoint {target}: {error}. Earlier checkpoints are untouched; free disk space or "
                "fix the permissions, then run the same command again"
            ) from error
        if multihost.is_main():
            self._prune(newest=step)
        return target

    def _begin(self, target: Path) -> str:
        """Create the partial folder and return its name."""
        # A unique name: after a failed save, TensorStore's threads may still be writing into the old folder.
        partial = self.folder / f".{target.name}.{uuid.uuid4().hex}.partial"
        self._remove_partials()
        partial.mkdir(parents=True)
        return partial.name

    def _complete(
        self,
        partial: Path,
        target: Path,
        manifest: dict[str, Any],
        arrays: Collection[str],
        add_files: Callable[[Path], object],
    ) -> str:
        """Write the manifest, rename the folder to its final name and return that name."""
        add_files(partial)
        files = _describe(partial)
        if absent := _absent_files(partial, files, arrays):
            raise CheckpointError(
                f"checkpoint {target} is incomplete: {len(absent)} files of its arrays are absent, the first is "
                f"{absent[0]}. Every training process writes its own shards, so all of them must see one folder: put "
                "run_dir on a file system that all training hosts share"
            )
        (partial / MANIFEST).write_text(dump_manifest({**manifest, "files": files}))
        replace_folder(target, partial)
        return target.name

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, damaged ones included, oldest first; ignores names such as `step-1`."""
        steps = (_step_of(path) for path in self.folder.glob("step-*"))
        return sorted(step for step in steps if step is not None)

    def open(self, step: int) -> "Checkpoint":
        """Open the checkpoint of one step; raises CheckpointError if it is missing or damaged."""
        return open_checkpoint(self._path(step))

    def newest_good(self) -> "Checkpoint | None":
        """Open the newest checkpoint; None if there are none. Skips damaged ones with a warning that names the damage.

        Raises:
            CheckpointError: if all checkpoints are damaged.
        """
        damages = []
        for path in sorted(self.folder.glob("step-*")):
            if _step_of(path) is None:
                logger.warning("%s is ignored: checkpoints are folders named like %s", path, _name(1))
        for step in reversed(self.steps()):
            try:
                return self.open(step)
            except CheckpointError as error:
                logger.warning("%s; falling back to the one before it", error)
                damages.append(str(error))
        if damages:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: {'; '.join(damages)}. "
                "Delete the run directory to start over"
            )
        return None

    def _remove_partials(self) -> None:
        for leftover in self.folder.glob(".step-*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)  # the next save removes any remaining files

    def _prune(self, newest: int) -> None:
        # Newer checkpoints are damaged, or the run would have resumed from them; they must not count as kept.
        steps = [step for step in self.steps() if step <= newest]
        kept = set(steps[-self.config.keep_last :])
        if self.keep_first:
            kept.add(0)
        if self.config.keep_every:
            kept |= {step for step in steps if step % self.config.keep_every == 0}
        for step in self.steps():
            if step not in kept:
                remove(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / _name(step)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step_of(path: Path) -> int | None:
    """Parse the step from a checkpoint folder's name; None if the name has another format."""
    digits = path.name.removeprefix("step-")
    is_name = digits.isascii() and digits.isdecimal() and path.name == _name(int(digits))
    return int(digits) if is_name else None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint with verified files."""

    path: Path
    """Folder of the checkpoint."""
    step: int
    """Updates done when it was saved."""
    progress: Mapping[str, Any]
    """The host's part of the state."""
    arrays: Mapping[str, str]
    """Dtype and shape of every array of the state, by path."""

    def restore(self, like: T, trainer: TrainerConfig, subpath: str = "") -> T:
        """Load the training state or a part of it, on a mesh that may differ from that of the save.

        Args:
            like: a tree of the same structure, or its shapes.
            trainer: mesh and axis mapping of the parameters.
            subpath: path of the part in the state, with slashes, such as `model`; empty for the whole state.

        Raises:
            CheckpointError: if the checkpoint holds another model or optimizer than `like`.
        """
        prefix = "".join(f".{name}" for name in subpath.split("/") if name)
        saved = {name.removeprefix(prefix): t for name, t in self.arrays.items() if name.startswith(f"{prefix}.")}
        expected = _array_types(like)
        for name in {**saved, **expected}:
            if saved.get(name) != expected.get(name):
                raise CheckpointError(
                    f"checkpoint {self.path} does not fit the configured model and optimizer: {name} is "
                    f"{saved.get(name, 'absent')} in the checkpoint and {expected.get(name, 'absent')} as configured"
                )
        try:
            return levanter_load(
                like,
                str(self.path / STATE),
                subpath=subpath or None,
                discover_latest=False,
                axis_mapping=trainer.parameter_axis_mapping,
                mesh=trainer.device_mesh,
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"could not read checkpoint {self.path}: {error}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint's files and read its manifest.

    Raises:
        CheckpointError: if it is incomplete, altered, or of an unknown format.
    """
    try:
        manifest = load_manifest((path / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}")
    for name, kind in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"checkpoint {path}: {MANIFEST} has no valid {name!r}; delete the checkpoint")
    if manifest["step"] != _step_of(path):
        raise CheckpointError(
            f"checkpoint {path} holds step {manifest['step']}, so its folder should be called "
            f"{_name(manifest['step'])}; rename it, or delete it"
        )
    try:
        actual = _describe(path)
    except OSError as error:
        # A bad block or missing permission; the previous checkpoint may still be readable.
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    for name, expected in manifest["files"].items():
        if actual.get(name) != expected:
            state = "is missing" if name not in actual else "differs from what was written"
            raise CheckpointError(f"checkpoint {path} is damaged: {name} {state}")
    arrays = [str(Path(name).parent) for name in manifest["files"] if Path(name).name == ARRAY_METADATA]
    if absent := _absent_files(path, manifest["files"], arrays):
        raise CheckpointError(
            f"checkpoint {path} is incomplete: {len(absent)} files of its arrays were never written into this folder, "
            f"the first is {absent[0]}. It was saved by training processes without a common file system, and its "
            "weights are lost; delete it"
        )
    return Checkpoint(path, manifest["step"], manifest["progress"], manifest["arrays"])


def dump_manifest(manifest: dict[str, Any]) -> str:
    """Serialize the manifest together with its checksum."""
    return json.dumps({**manifest, "sha256": _text_checksum(manifest)}, indent=1)


def load_manifest(text: str) -> dict[str, Any]:
    """Parse a manifest and verify its checksum.

    Raises:
        ValueError: if it is not JSON, or the checksum does not match.
    """
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _text_checksum(manifest):
        raise ValueError("its checksum does not match")
    return manifest


def _text_checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _array_types(tree: object) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    arrays = {path: leaf.array if isinstance(leaf, NamedArray) else leaf for path, leaf in leaves}
    return {jax.tree_util.keystr(path): f"{array.dtype}{list(array.shape)}" for path, array in arrays.items()}


def _array_folders(state: object) -> list[str]:
    """Return the folder of every array of a training state, relative to the checkpoint's."""
    names = leaf_key_paths(state, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    return [str(Path(STATE, *name.split("."))) for name in jax.tree.leaves(names)]


def _absent_files(folder: Path, files: Collection[str], arrays: Collection[str]) -> list[str]:
    """List the missing files of the arrays in the folders `arrays`. All paths are relative to the checkpoint's."""
    absent = []
    for array in arrays:
        metadata = f"{array}/{ARRAY_METADATA}"
        expected = [metadata]
        if metadata in files:
            expected = [f"{array}/{chunk}" for chunk in _chunk_names(json.loads((folder / metadata).read_text()))]
        absent += [name for name in expected if name not in files]
    return absent


def _chunk_names(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the chunk file names of an array in zarr format, version 2.

    >>> list(_chunk_names({"shape": [4, 3], "chunks": [2, 3], "dimension_separator": "."}))
    ['0.0', '1.0']
    >>> list(_chunk_names({"shape": [], "chunks": [], "dimension_separator": "."}))
    ['0']
    """
    counts = [-(-size // chunk) for size, chunk in zip(metadata["shape"], metadata["chunks"], strict=True)]
    for index in itertools.product(*map(range, counts)):
        yield metadata["dimension_separator"].join(map(str, index)) or "0"


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
