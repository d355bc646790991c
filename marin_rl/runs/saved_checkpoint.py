# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A checkpoint in its folder: the manifest, its checks, and the arrays and files that it describes."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import tensorstore as ts

from marin_rl.runs.array_files import STREAMS, SavedArray, load_arrays, make_context
from marin_rl.runs.run_directory import MANIFEST, CheckpointError, folder_name, step_of
from marin_rl.utils import multihost
from marin_rl.utils.devices.arrays import describe, first_difference, named_arrays
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.remote_path import StorageError
from marin_rl.utils.storage import FileDigest, StoragePath, digest_of, file_sizes

T = TypeVar("T")

FORMAT = 4
_SET_ASIDE = "move its folder elsewhere to go on from the checkpoint before it"


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
    """The host's part of the state, serializable as JSON."""
    folder: str
    """Name of the folder of the files in that of the checkpoint; empty if they are not in a further one."""
    arrays: Mapping[str, SavedArray]
    """Every array of the state, or of a part of it, by path."""
    files: Mapping[str, FileDigest]
    """Size and checksum of every file, by name."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model."""
        return int(self.progress["vocab_size"])

    @property
    def folder_of_files(self) -> StoragePath:
        """Folder of all files except the manifest."""
        return self.path / self.folder if self.folder else self.path

    def manifest(self) -> str:
        """Return the content of the file that is written last."""
        arrays = {name: dataclasses.asdict(array) for name, array in self.arrays.items()}
        entries = {"step": self.step, "progress": self.progress, "folder": self.folder, "arrays": arrays}
        return dump_manifest({**entries, "files": self.files, "format": FORMAT})

    def missing_files(self) -> list[str]:
        """Return the names of files of the arrays that are not in `files`."""
        return [file for array in self.arrays.values() for file in array.files() if file not in self.files]

    def restore(self, like: T, trainer: TrainerConfig, subpath: str = "") -> T:
        """Load the training state or a part of it, on a mesh that may differ from that of the save; collective.

        `like` is a tree of the same structure, or its shapes. `subpath` is the path of the part in the state, with
        slashes, such as `model`; empty for the whole state.

        Raises:
            DamagedCheckpointError: in all processes, if a file is missing or altered.
            StorageError: in all processes, if the store fails.
            CheckpointError: if the checkpoint holds another model or optimizer than `like`.
        """
        arrays = self.part(like, subpath).open_arrays()
        return _agree(lambda: load_arrays(arrays, like, trainer.parameter_axis_mapping, trainer.device_mesh))

    def part(self, like: object, subpath: str) -> "Checkpoint":
        """Return the checkpoint with the arrays of a part only, by path in it; the arguments are those of `restore`.

        Raises:
            CheckpointError: if the checkpoint holds another model or optimizer than `like`.
        """
        prefix = "".join(f".{name}" for name in subpath.split("/") if name)
        saved = {
            name.removeprefix(prefix): found for name, found in self.arrays.items() if name.startswith(f"{prefix}.")
        }
        found = {name: describe(array) for name, array in saved.items()}
        expected = {name: describe(array) for name, array in named_arrays(like).items()}
        if difference := first_difference(found, expected):
            raise CheckpointError(
                f"checkpoint {self.path} does not fit the configured model and optimizer: {difference[0]} is "
                f"{difference[1]} in the checkpoint and {difference[2]} as configured"
            )
        return dataclasses.replace(self, arrays=saved)

    def open_arrays(self) -> dict[str, ts.TensorStore]:
        """Open the arrays, to read any part of them; several files are read at a time, and chunks are cached.

        Returns:
            The arrays by path. Reading raises DamagedCheckpointError if a file is missing or altered, and StorageError
            if the store fails.
        """
        context = make_context()
        return {name: array.open(context, self._read_file) for name, array in self.arrays.items()}

    def verify_arrays(self) -> None:
        """Read all files of the arrays, a few at a time, and compare their checksums; in this process alone.

        Raises:
            DamagedCheckpointError: if a file is missing or altered.
            StorageError: if the store fails.
        """
        files = [file for array in self.arrays.values() for file in array.files()]
        with ThreadPoolExecutor(STREAMS, thread_name_prefix="verify") as threads:
            # A failure cancels the files that were not begun.
            for _ in threads.map(lambda file: len(self._read_file(file)), files):
                pass

    def read(self, name: str) -> bytes:
        """Read and verify a file that holds no arrays: the main process reads it and sends it to all.

        Raises:
            DamagedCheckpointError: in all processes, if the file is missing or altered.
        """
        return _read_on_main(lambda: self._read_file(name))

    def _read_file(self, file: str) -> bytes:
        try:
            content = (self.folder_of_files / file).read_bytes()
        except StorageError:
            raise
        except OSError as error:
            # A bad block or missing permission; the previous checkpoint may still be readable.
            problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
            raise DamagedCheckpointError(f"checkpoint {self.path} is damaged: {file} {problem}") from error
        if digest_of(content) != self.files[file]:
            raise DamagedCheckpointError(f"checkpoint {self.path} is damaged: {file} differs from what was written")
        return content


def _agree(read: Callable[[], T]) -> T:
    """Call a function in every process; if it fails in one, raise an error of the same type in all."""
    result, own, answer = None, None, ""
    try:
        result = read()
    except (StorageError, DamagedCheckpointError) as error:
        own, answer = error, f"{type(error).__name__} {error}"
    answers = [text.partition(" ") for text in multihost.gather_texts(answer)]
    # A failing store is not damage, even if other processes have found some: all must do the same.
    for kind in (StorageError, DamagedCheckpointError):
        texts = [f"training process {n}: {text}" for n, (name, _, text) in enumerate(answers) if name == kind.__name__]
        if texts and isinstance(own, kind):
            raise own
        if texts and kind is StorageError:
            raise StorageError(texts[0], "checkpoint", "run the same command again when the store is reachable")
        if texts:
            raise DamagedCheckpointError(texts[0])
    return cast(T, result)


def open_checkpoint(path: StoragePath) -> Checkpoint:
    """Open a checkpoint as the main process sees it, in every process; collective.

    Raises:
        DamagedCheckpointError: in all processes, if it is incomplete or altered.
        CheckpointError: if it has another format.
    """
    manifest = _read_on_main(lambda: read_manifest(path).manifest().encode())
    return _parse(path, load_manifest(manifest.decode()))


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


def read_manifest(path: StoragePath) -> Checkpoint:
    """Read and check the manifest, and check the presence and the sizes of all files; in one process.

    Raises:
        DamagedCheckpointError: if it is incomplete or altered.
        CheckpointError: if it has another format.
    """
    try:
        entries = load_manifest((path / MANIFEST).read_text(encoding="utf-8"))
        if entries.get("format") != FORMAT:
            # Not damaged: an older checkpoint must not replace it.
            raise CheckpointError(
                f"checkpoint {path} has format {entries.get('format')}, this version reads {FORMAT}: another version "
                "of marin_rl wrote it. Resume with that version, or start a new run from exported weights "
                "(initialize_from)"
            )
        checkpoint = _parse(path, entries)
    except StorageError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedCheckpointError(f"checkpoint {path} has no readable {MANIFEST}: {error}") from error
    if checkpoint.step != step_of(path):
        raise DamagedCheckpointError(
            f"checkpoint {path} holds step {checkpoint.step}, so its folder should be called "
            f"{folder_name(checkpoint.step)}; rename it, or {_SET_ASIDE}"
        )
    if absent := checkpoint.missing_files():
        raise DamagedCheckpointError(
            f"checkpoint {path} is incomplete: {absent[0]} was not written completely; {_SET_ASIDE}"
        )
    try:
        sizes = file_sizes(checkpoint.folder_of_files)
    except StorageError:
        raise
    except OSError as error:
        raise DamagedCheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    for name, file in checkpoint.files.items():
        if sizes.get(name) != file.size:
            state = "differs from what was written" if name in sizes else "is missing"
            raise DamagedCheckpointError(f"checkpoint {path} is damaged: {name} {state}")
    return checkpoint


def _parse(path: StoragePath, entries: Mapping[str, Any]) -> Checkpoint:
    arrays = {
        name: SavedArray(saved["dtype"], tuple(saved["shape"]), tuple(saved["chunk"]), saved["prefix"])
        for name, saved in entries["arrays"].items()
    }
    files = {name: FileDigest(*digest) for name, digest in entries["files"].items()}
    return Checkpoint(path, entries["step"], entries["progress"], entries["folder"], arrays, files)


def dump_manifest(entries: dict[str, Any]) -> str:
    """Serialize the entries of a manifest together with their checksum."""
    return json.dumps({**entries, "sha256": digest_of(json.dumps(entries).encode()).sha256}, indent=1)


def load_manifest(text: str) -> dict[str, Any]:
    """Parse a manifest and verify its checksum.

    Raises:
        ValueError: if it is not a JSON object, or the checksum does not match.
    """
    entries = json.loads(text)
    if not isinstance(entries, dict) or entries.pop("sha256", None) != digest_of(json.dumps(entries).encode()).sha256:
        raise ValueError("its checksum does not match")
    return entries
