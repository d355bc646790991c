# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A checkpoint in its folder: the manifest, its checks, and the arrays and files that it describes."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pydantic

from marin_rl.runs.array_files import DamagedArraysError, SavedArray, SavedArrays, named_arrays
from marin_rl.runs.checkpoint_folders import MANIFEST, CheckpointError, folder_name, step_of
from marin_rl.utils import multihost
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of, file_sizes

T = TypeVar("T")

FORMAT = 4
_SET_ASIDE = "move its folder elsewhere to go on from the checkpoint before it"


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or altered; an earlier one may be intact."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of the file that is written last."""

    step: int
    """Number of finished steps."""
    progress: dict[str, Any]
    """The host's part of the state."""
    folder: str
    """Name of the folder of the files in that of the checkpoint; empty if they are not in a further one."""
    arrays: dict[str, SavedArray]
    """Every array of the state, by path."""
    files: dict[str, FileDigest]
    """Size and checksum of every file, by name."""
    format: int = FORMAT
    """Version of the form of checkpoints."""

    def saved(self, path: StoragePath) -> SavedArrays:
        """Return the arrays of the checkpoint in this folder."""
        return SavedArrays(path / self.folder if self.folder else path, self.arrays, self.files)

    def dumps(self) -> str:
        """Serialize the manifest."""
        return dump_manifest(dataclasses.asdict(self))


_JSON = pydantic.TypeAdapter(Manifest)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its files are present; their content is verified when it is read."""

    path: StoragePath
    """Folder of the checkpoint."""
    step: int
    """Number of finished steps when it was saved."""
    progress: Mapping[str, Any]
    """The host's part of the state."""
    saved: SavedArrays
    """Every array of the state, and all files."""

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
        with self.naming_damage():
            return saved.load(like, trainer.parameter_axis_mapping, trainer.device_mesh)

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Convert `DamagedArraysError` to `DamagedCheckpointError`."""
        try:
            yield
        except DamagedArraysError as error:
            raise DamagedCheckpointError(f"checkpoint {self.path} is damaged: {error}") from error

    def arrays_of(self, like: object, subpath: str) -> SavedArrays:
        """Return the arrays of a part of the training state, by path in it; the arguments are those of `restore`.

        Raises:
            CheckpointError: if the checkpoint holds another model or optimizer than `like`.
        """
        prefix = "".join(f".{name}" for name in subpath.split("/") if name)
        saved = {
            name.removeprefix(prefix): found
            for name, found in self.saved.arrays.items()
            if name.startswith(f"{prefix}.")
        }
        expected = {name: f"{array.dtype}{list(array.shape)}" for name, array in named_arrays(like).items()}
        for name in {**saved, **expected}:
            if name not in saved or str(saved[name]) != expected.get(name):
                raise CheckpointError(
                    f"checkpoint {self.path} does not fit the configured model and optimizer: {name} is "
                    f"{saved.get(name, 'absent')} in the checkpoint and {expected.get(name, 'absent')} as configured"
                )
        return dataclasses.replace(self.saved, arrays=saved)

    def read(self, name: str) -> bytes:
        """Read and verify a file that holds no arrays: the main process reads it and sends it to all.

        Raises:
            DamagedCheckpointError: in all processes, if the file is missing or altered.
        """

        def read() -> bytes:
            with _damaged(self.path), self.naming_damage():
                return self.saved.read(name)

        return _read_on_main(read)


def open_checkpoint(path: StoragePath) -> Checkpoint:
    """Open a checkpoint as the main process sees it, in every process; collective.

    Raises:
        DamagedCheckpointError: in all processes, if it is incomplete or altered.
        CheckpointError: if it has another format.
    """
    text = _read_on_main(lambda: read_manifest(path).dumps().encode())
    manifest = _JSON.validate_python(load_manifest(text.decode()))
    return Checkpoint(path, manifest.step, manifest.progress, manifest.saved(path))


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


def read_manifest(path: StoragePath) -> Manifest:
    """Read and check the manifest, and check the presence and the sizes of all files; in one process.

    Raises:
        DamagedCheckpointError: if it is incomplete or altered.
        CheckpointError: if it has another format.
    """
    try:
        entries = load_manifest((path / MANIFEST).read_text(encoding="utf-8"))
    except StorageError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    if entries.get("format") != FORMAT:
        # Not damaged: an older checkpoint must not replace it.
        raise CheckpointError(
            f"checkpoint {path} has format {entries.get('format')}, this version reads {FORMAT}: another version of "
            "marin_rl wrote it. Resume with that version, or start a new run from exported weights (initialize_from)"
        )
    try:
        manifest = _JSON.validate_python(entries)
    except pydantic.ValidationError as error:
        entry = error.errors()[0]["loc"][0]
        raise DamagedCheckpointError(f"checkpoint {path}: {MANIFEST} has no valid {entry!r}; {_SET_ASIDE}") from error
    if manifest.step != step_of(path):
        raise DamagedCheckpointError(
            f"checkpoint {path} holds step {manifest.step}, so its folder should be called "
            f"{folder_name(manifest.step)}; rename it, or {_SET_ASIDE}"
        )
    saved = manifest.saved(path)
    if absent := saved.missing_files():
        raise DamagedCheckpointError(
            f"checkpoint {path} is incomplete: {absent[0]} was not written completely; {_SET_ASIDE}"
        )
    with _damaged(path):
        sizes = file_sizes(saved.folder)
    for name, file in manifest.files.items():
        if sizes.get(name) != file.size:
            state = "differs from what was written" if name in sizes else "is missing"
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} {state}")
    return manifest


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
    return digest_of(json.dumps(manifest).encode()).sha256
