# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A checkpoint in its folder: the manifest, its checks, and the arrays and files that it describes."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from marin_rl import multihost
from marin_rl.learner.array_files import DamagedArraysError, SavedArray, from_jsonable, load_arrays, named_arrays
from marin_rl.learner.checkpoint_folders import MANIFEST, CheckpointError, folder_name, step_of
from marin_rl.remote_path import StorageError
from marin_rl.storage import StoragePath, file_sizes
from marin_rl.trainer_config import AbstractTrainerConfig

T = TypeVar("T")

FORMAT = 4
STATE = "state"
"""The folder of the arrays in a checkpoint."""
_SET_ASIDE = "move its folder elsewhere to go on from the checkpoint before it"
_MANIFEST_TYPES = {"step": int, "progress": dict, "arrays": dict, "files": dict}


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or altered; an earlier one may be intact."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its files are present; their content is verified when it is read."""

    path: StoragePath
    """Folder of the checkpoint."""
    step: int
    """Number of finished steps when it was saved."""
    progress: Mapping[str, Any]
    """The host's part of the state."""
    arrays: Mapping[str, SavedArray]
    """Every array of the state, by path."""
    files: Mapping[str, Mapping[str, Any]]
    """Size in bytes of every file, by name; of a file without arrays also the checksum, and its path if it is not its
    name."""

    def restore(self, like: T, trainer: AbstractTrainerConfig, subpath: str = "") -> T:
        """Load the training state or a part of it, on a mesh that may differ from that of the save; collective.

        Args:
            like: a tree of the same structure, or its shapes.
            trainer: mesh and axis mapping of the parameters.
            subpath: path of the part in the state, with slashes, such as `model`; empty for the whole state.

        Raises:
            DamagedCheckpointError: in all processes, if a file is missing or altered.
            CheckpointError: if the checkpoint holds another model or optimizer than `like`.
        """
        saved = self.arrays_of(like, subpath)
        try:
            return load_arrays(self.path / STATE, saved, like, trainer.parameter_axis_mapping, trainer.device_mesh)
        except DamagedArraysError as error:
            raise DamagedCheckpointError(f"checkpoint {self.path} is damaged: {error}") from error

    def arrays_of(self, like: object, subpath: str) -> dict[str, SavedArray]:
        """Return the arrays of a part of the training state, by path in it; the arguments are those of `restore`.

        Raises:
            CheckpointError: if the checkpoint holds another model or optimizer than `like`.
        """
        prefix = "".join(f".{name}" for name in subpath.split("/") if name)
        saved = {
            name.removeprefix(prefix): found for name, found in self.arrays.items() if name.startswith(f"{prefix}.")
        }
        expected = {name: f"{array.dtype}{list(array.shape)}" for name, array in named_arrays(like).items()}
        for name in {**saved, **expected}:
            if name not in saved or str(saved[name]) != expected.get(name):
                raise CheckpointError(
                    f"checkpoint {self.path} does not fit the configured model and optimizer: {name} is "
                    f"{saved.get(name, 'absent')} in the checkpoint and {expected.get(name, 'absent')} as configured"
                )
        return saved

    def read(self, name: str) -> bytes:
        """Read and verify a file that holds no arrays: the main process reads it and sends it to all.

        Raises:
            DamagedCheckpointError: in all processes, if the file is missing or altered.
        """

        def read() -> bytes:
            with _damaged(self.path):
                data = (self.path / stored_path(name, self.files)).read_bytes()
            if checksum(data) != self.files[name]["sha256"]:
                raise DamagedCheckpointError(f"checkpoint {self.path} is damaged: {name} differs from what was written")
            return data

        return _read_on_main(read)


def open_checkpoint(path: StoragePath) -> Checkpoint:
    """Open a checkpoint as the main process sees it, in every process; collective.

    Raises:
        DamagedCheckpointError: in all processes, if it is incomplete or altered.
        CheckpointError: if it has another format.
    """
    return _parse(path, _read_on_main(lambda: read_manifest(path).encode()))


def _read_on_main(read: Callable[[], bytes]) -> bytes:
    """Call a function in the main process and send its result or its `DamagedCheckpointError` to all processes."""

    def work() -> bytes:
        try:
            return b"+" + read()
        except DamagedCheckpointError as error:
            return b"-" + str(error).encode()

    answer = multihost.on_main(work)
    if answer.startswith(b"-"):
        raise DamagedCheckpointError(answer[1:].decode())
    return answer[1:]


@contextlib.contextmanager
def _damaged(path: StoragePath) -> Iterator[None]:
    """Convert errors of files, but not of an unreachable store, to `DamagedCheckpointError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        # A bad block or missing permission; the previous checkpoint may still be readable.
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def read_manifest(path: StoragePath) -> str:
    """Read and check the manifest, and check the presence and the sizes of all files; in one process.

    Raises:
        DamagedCheckpointError: if it is incomplete or altered.
        CheckpointError: if it has another format.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = load_manifest(text)
    except StorageError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    if manifest.get("format") != FORMAT:
        # Not damaged: an older checkpoint must not replace it.
        raise CheckpointError(
            f"checkpoint {path} has format {manifest.get('format')}, this version reads {FORMAT}: another version of "
            "marin_rl wrote it. Resume with that version, or start a new run from exported weights (initialize_from)"
        )
    for name, kind in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(name), kind):
            raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} has no valid {name!r}; {_SET_ASIDE}")
    if manifest["step"] != step_of(path):
        raise DamagedCheckpointError(
            f"checkpoint {path} holds step {manifest['step']}, so its folder should be called "
            f"{folder_name(manifest['step'])}; rename it, or {_SET_ASIDE}"
        )
    with _damaged(path):
        sizes = file_sizes(path)
    for name, file in manifest["files"].items():
        size = sizes.get(stored_path(name, manifest["files"]))
        if size != file["bytes"]:
            state = "is missing" if size is None else "differs from what was written"
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} {state}")
    return text


def _parse(path: StoragePath, text: bytes) -> Checkpoint:
    manifest = load_manifest(text.decode())
    try:
        arrays = from_jsonable(manifest["arrays"])
    except ValueError as error:
        raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} has no valid 'arrays'; {_SET_ASIDE}") from error
    files = manifest["files"]
    absent = [name for name in array_file_sizes(arrays) if name not in files]
    gaps = [name for name, array in arrays.items() if not array.is_complete]
    if absent or gaps:
        raise DamagedCheckpointError(
            f"checkpoint {path} is incomplete: {(absent or gaps)[0]} was not written completely; {_SET_ASIDE}"
        )
    return Checkpoint(path, manifest["step"], manifest["progress"], arrays, files)


def stored_path(name: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the path of a file in the folder of its checkpoint."""
    return files[name].get("path", name)


def array_file_sizes(arrays: Mapping[str, SavedArray]) -> dict[str, dict[str, Any]]:
    """Sizes of the files of arrays, by name."""
    sizes: dict[str, dict[str, Any]] = {}
    for piece in (piece for array in arrays.values() for box in array.boxes for piece in box.pieces):
        size = sizes.setdefault(f"{STATE}/{piece.file}", {"bytes": 0})
        size["bytes"] = max(size["bytes"], piece.offset + piece.num_bytes)
    return sizes


def require_complete(
    target: StoragePath,
    expected: Mapping[str, Mapping[str, Any]],
    arrays: Mapping[str, SavedArray],
    sizes: Mapping[str, int],
) -> None:
    """Check before the commit that the main process sees every file, and that the boxes cover every array."""
    absent = [name for name, file in expected.items() if sizes.get(stored_path(name, expected)) != file["bytes"]]
    absent += [f"a part of {name}" for name, array in arrays.items() if not array.is_complete]
    if absent:
        raise CheckpointError(
            f"checkpoint {target} is incomplete: {len(absent)} files of its arrays are absent, the first is "
            f"{absent[0]}. Every training process writes its own shards, so all of them must see one folder: put "
            "run_dir on a file system that all training hosts share, or in an object store"
        )


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
    return checksum(json.dumps(manifest).encode())


def checksum(data: bytes) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
