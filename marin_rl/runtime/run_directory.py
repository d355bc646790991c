# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The folder that holds everything about a run, and what protects it.

```
config.yaml     the resolved config, every default written out
metrics.jsonl   one JSON object per update
rollouts/       what was sampled
checkpoints/    what a resume needs
hf/             the trained model in Hugging Face format
log.txt         what was said
curves.png      reward, accuracy and the like over updates
```
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from marin_rl.escaping import escape
from marin_rl.runtime.config_parsing import parse_yaml


class RunDirectoryError(RuntimeError):
    """A run directory cannot be used; the message names it and the remedy."""


def local_path(value: str, key: str) -> Path:
    """A path of a mounted file system.

    Args:
        value: as the user gave it.
        key: of the setting, for the error.

    Raises:
        ValueError: if it is an address, such as `gs://bucket/run`, which `pathlib` would take for a folder `gs:`.

    >>> local_path("runs/rloo", "run_dir")
    PosixPath('runs/rloo')
    """
    scheme, separator, _ = value.partition("://")
    if separator:
        raise ValueError(
            f"{key} is {value!r}, but it must be a path of a mounted file system: {scheme}:// is not supported there. "
            "Mount the bucket or share (gcsfuse, rclone, NFS) and give the folder's path, or copy the files here"
        )
    return Path(value)


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The paths of a run, relative to one folder."""

    path: Path
    """The folder itself."""

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per update."""
        return self.path / "metrics.jsonl"

    @property
    def has_begun(self) -> bool:
        """Whether there is anything that another config could not go on with: a record or a checkpoint."""
        return self.metrics.exists() or any(self.checkpoints.glob("step-*"))

    @property
    def rollouts(self) -> Path:
        """What was sampled."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """What a resume needs."""
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        """The trained model in Hugging Face format."""
        return self.path / "hf"

    @property
    def log(self) -> Path:
        """What was said."""
        return self.path / "log.txt"

    @property
    def curves(self) -> Path:
        """Reward, accuracy and the like over updates."""
        return self.path / "curves.png"


def create_or_open(path: Path, config_yaml: str, may_differ: Sequence[str] = ()) -> RunDirectory:
    """Make a run directory, or open the one of an earlier start of the same run.

    A start that came to nothing, as with a config that did not fit the devices, leaves no mark: the corrected
    config takes its place.

    Args:
        path: the folder.
        config_yaml: the resolved config.
        may_differ: dotted keys, or sections, that do not change what the run computes; where they differ, the
            new values are written.

    Raises:
        RunDirectoryError: if the folder belongs to another config, holds something else, or cannot be written.
    """
    directory = RunDirectory(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        if directory.config.exists():
            if directory.has_begun:
                _require_same_config(directory, config_yaml, may_differ)
        elif directory.metrics.exists() or directory.checkpoints.exists():
            raise RunDirectoryError(
                f"run directory {str(path)!r} holds a run but no config.yaml, so it cannot be told whose it is; "
                "choose another run_dir, or delete it"
            )
        for folder in (directory.rollouts, directory.checkpoints):
            folder.mkdir(exist_ok=True)
    if not directory.config.exists() or directory.config.read_text(encoding="utf-8") != config_yaml:
        write_atomically(directory.config, config_yaml)
    return directory


def open_existing(path: Path) -> RunDirectory:
    """The run directory of an earlier run.

    Raises:
        RunDirectoryError: if it is none.
    """
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise RunDirectoryError(f"{str(path)!r} is not a run directory: it has no config.yaml")
    return directory


def _require_same_config(directory: RunDirectory, config_yaml: str, may_differ: Sequence[str]) -> None:
    there = directory.config.read_text(encoding="utf-8")
    if differences := config_differences(there, config_yaml, may_differ, str(directory.config)):
        raise RunDirectoryError(
            f"run directory {str(directory.path)!r} belongs to a run with another config:\n"
            + "\n".join(differences)
            + "\nchoose another run_dir, make these keys equal to go on with that run, or delete the directory"
        )


def config_differences(
    there_yaml: str, here_yaml: str, may_differ: Sequence[str], name: str = "the config of the main process"
) -> list[str]:
    """A line for each key in which two resolved configs differ.

    Args:
        there_yaml: one config.
        here_yaml: the other.
        may_differ: dotted keys, or sections, that are left out.
        name: of the first, for the error if it is no YAML.
    """
    there, here = _flatten(parse_yaml(there_yaml, name)), _flatten(parse_yaml(here_yaml, "the new config"))
    return [
        f"  {key}: {_shown(there, key)} there, {_shown(here, key)} now"
        for key in dict.fromkeys([*there, *here])
        if (key not in there or key not in here or there[key] != here[key])
        and not any(key == free or key.startswith(f"{free}.") for free in may_differ)
    ]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat |= _flatten(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False, default=str) if key in values else "not set"


@contextlib.contextmanager
def lock(directory: RunDirectory) -> Iterator[None]:
    """Keep a second process out of the run directory; released when the process ends, however it ends.

    The folder is made where there is none.

    Raises:
        RunDirectoryError: if a process holds it already; the message names its id.
    """
    path = directory.path / ".lock"
    with contextlib.ExitStack() as stack:
        with writing(path):
            directory.path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a+", encoding="utf-8"))
            _take(file, directory)
        yield


def _take(file: TextIO, directory: RunDirectory) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise RunDirectoryError(
            f"run directory {str(directory.path)!r} is in use by process {file.read().strip()}; "
            "wait for it to end, stop it, or choose another run_dir"
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()} on {socket.gethostname()}")
    file.flush()


@contextlib.contextmanager
def log_to(file: Path, level: int = logging.INFO, modules: Mapping[str, int] | None = None) -> Iterator[None]:
    """Append the messages of this package's loggers to a file, whose folder is made.

    Args:
        file: the file.
        level: the least severe messages to keep.
        modules: levels of single modules or packages, by name; None for none.
    """
    logger, modules = logging.getLogger("marin_rl"), modules or {}
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file)
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(min(level, *modules.values(), level))
    former = {name: logging.getLogger(name).level for name in ("marin_rl", *modules)}
    logger.setLevel(min(level, logger.level or level))
    for name, own in modules.items():
        logging.getLogger(name).setLevel(own)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for name, before in former.items():
            logging.getLogger(name).setLevel(before)
        handler.close()


class LogFormatter(logging.Formatter):
    """Escapes control characters, and indents every further line of a message: no name or text forges a log line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text without control characters other than newlines."""
        return escape(super().format(record)).replace("\n", "\n    ")


class _LogFile(logging.FileHandler):
    """A log whose own trouble, such as a full disk, is told once and ends nothing: the run has its own words for it."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, encoding="utf-8")
        self._told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            self._tell(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            print(f"warning: {self.baseFilename} cannot be written ({error}); lines are missing in it", file=sys.stderr)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write a file so that at every moment it is absent, the old one or the new one, and never a part.

    Args:
        path: the file.
        data: its complete content; text is written as UTF-8.

    Raises:
        RunDirectoryError: if it cannot be written; an old file is untouched.
    """
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            with partial.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write into an error that says what to do.

    Raises:
        RunDirectoryError: naming the path, the reason and the remedy.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = (
                "the disk is full; free some space and rerun the same command, which goes on from the last checkpoint"
            )
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            reason = f"{error.filename or path} is a file and not a folder; choose another run_dir"
        else:
            reason = f"{error.strerror or error}; choose a run_dir on a disk that you may write to"
        raise RunDirectoryError(f"cannot write {str(path)!r}: {reason}") from error
