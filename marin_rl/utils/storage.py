# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Files of a run on a local file system or in an object store.

A local path is a `pathlib.Path`. An address such as `gs://bucket/run` is a
[`RemotePath`][marin_rl.utils.remote_path.RemotePath], which has the methods of `pathlib.Path` that runs use. Both are a
`StoragePath`.

Local files and folders are replaced by renaming, after they are flushed to disk. Object stores cannot rename, but write
each object completely or not at all: a folder there is complete when the file that names its content is written last.
"""

import contextlib
import errno
import fnmatch
import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import fsspec

from marin_rl.utils.errors import RunDirectoryError, install_command
from marin_rl.utils.remote_path import RemotePath, StorageError

logger = logging.getLogger(__name__)

EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3", "memory": ""}
"""Extras of this package by protocol. All of these stores can create an object only if it does not exist."""
UPLOAD_SECONDS = 30.0
"""Longest time between an append to a file of up to 32 MiB in an object store and its upload."""
_UPLOAD_BYTES = 32 * 2**20
_DELETES = 16


StoragePath = Path | RemotePath
"""A local path or the address of an object."""


@contextlib.contextmanager
def writing(path: StoragePath, setting: str = "run_dir") -> Iterator[None]:
    """Convert an `OSError` on writing to a `RunDirectoryError`.

    `setting` is that of the path, for the remedy.

    Raises:
        RunDirectoryError: if an `OSError` is raised; the message names the path, the reason and the remedy.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space and rerun the same command to resume from the last checkpoint"
        elif isinstance(error, StorageError):
            reason = f"{error.strerror}; {error.remedy}, or choose another {setting}"
        elif isinstance(error, FileNotFoundError) and isinstance(path, RemotePath):
            reason = f"the bucket does not exist; create it, or choose another {setting}"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            reason = f"{error.filename or path} is a file, not a folder; choose another {setting}"
        else:
            reason = f"{error.strerror or error}; choose another {setting}, on a writable disk"
        raise RunDirectoryError(f"cannot write {str(path)!r}: {reason}") from error


def storage_path(text: str, key: str = "path") -> StoragePath:
    """Return the path of a run's files.

    `text` is a local path, or an address such as `gs://bucket/run`; `key` is the setting, for the error message.

    Raises:
        ValueError: if no path can be that text, the address holds a password or has no bucket, or its protocol is
            not supported or not installed.

    >>> storage_path("runs/rloo")
    PosixPath('runs/rloo')
    >>> storage_path("gs://bucket/runs/rloo/")
    RemotePath(address='gs://bucket/runs/rloo')
    """
    protocol, separator, rest = text.partition("://")
    if not separator:
        return user_path(text, key)
    refuse_credentials(text, key)
    if protocol in ("file", "local"):
        return user_path(rest, key)
    if protocol not in EXTRAS:
        raise ValueError(
            f"{key} is {text!r}, but the protocol {protocol}:// is unknown; use a path on a mounted file system, gs:// "
            "or s3://"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ValueError(
            f"{key} is {text!r}, but the package for {protocol}:// is not installed; "
            f"{install_command(EXTRAS[protocol])}"
        ) from error
    if not rest.strip("/"):
        raise ValueError(f"{key} is {text!r}, which names no bucket and no folder; use {protocol}://BUCKET/FOLDER")
    return RemotePath(f"{protocol}://{rest.rstrip('/')}")


def refuse_credentials(address: str, key: str) -> None:
    """Refuse an address with a password, which would be written to logs and configs.

    An example is `s3://key:secret@bucket/run`; `key` is the setting, for the error message.

    Raises:
        ValueError: if it has a password; the message does not contain it.
    """
    # A password may contain slashes.
    if re.match(r"\w+://[^/@]*:[^@]*@|.*[?&][-\w]*(key|token|secret|sig|password)[-\w]*=", address, re.I | re.S):
        raise ValueError(
            f"{key} holds a password or a key, which would be written to the run's files; remove it, and give "
            "credentials as the store's client expects them, in environment variables or its own files"
        )


def user_path(text: str, key: str) -> Path:
    """Return the local path of a user's text; `~` is a home folder.

    `key` is the setting, for the error message.

    Raises:
        ValueError: if no path can be that text; the message names the key.

    >>> user_path("~/runs#1/a b", "run_dir").name
    'a b'
    """
    if not text or "\0" in text:
        problem = "has a zero byte, which no path can contain" if text else "is empty"
        raise ValueError(f"{key} {problem}; set it to a path (to . for the working directory)")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{key} is {text!r}, which the file system's encoding ({sys.getfilesystemencoding()}) cannot represent; "
            "choose another name, or set PYTHONUTF8=1"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"{key} is {text!r}, but no home folder of that user is known; write the path without ~"
        ) from error


def user_cache(kind: str) -> Path:
    """Return the folder for one kind of files that runs of the user share, such as compiled programs.

    Raises:
        ValueError: if the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marin_rl" / kind
    except RuntimeError as error:
        raise ValueError(f"user {os.getuid()} has no home folder; set HOME to a folder that it can write") from error


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Give an `OSError` of a write the name of the file, which the system gives only on opening."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a local file for writing that replaces `path` when the block ends, and is removed if the block raises.

    After a crash the file is either the old one or complete. Only one writer per file is allowed.

    Yields:
        The temporary file `.<name>.partial` in the same folder.

    Raises:
        OSError: if the file cannot be written; an existing file is not changed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with named_in_errors(path), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync(path.parent)


def write_bytes(path: StoragePath, data: bytes) -> None:
    """Write a file atomically: after a crash, the file is either the old one or complete.

    Raises:
        OSError: if the file cannot be written; an existing file is not changed.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    with open_atomically(path) as file:
        file.write(data)


def replace_folder(folder: Path, partial: Path) -> None:
    """Flush a complete local folder to disk and rename it; after a crash, `folder` is either absent or complete.

    Args:
        folder: the final path; an existing folder, file or link is removed.
        partial: the complete folder, on the same file system.

    Raises:
        OSError: if the folder cannot be flushed or renamed; an existing one is not changed.
    """
    for path in partial.rglob("*"):
        sync(path)
    sync(partial)
    # Removing a folder takes several operations, so it must have lost its name before.
    old = folder.with_name(f".{folder.name}.old.partial")
    remove(old)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    try:
        partial.rename(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            old.rename(folder)
        raise
    sync(folder.parent)
    remove(old)


def upload_folder(folder: RemotePath, source: Path, marker: str) -> None:
    """Replace a folder in an object store by a local folder; the file `marker` is absent until the folder is complete.

    Args:
        folder: the folder to replace.
        source: the complete local folder.
        marker: name of the file that is removed first and written last.

    Raises:
        OSError: if a file cannot be read, written or deleted.
    """
    (folder / marker).unlink(missing_ok=True)
    names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
    for name in names:
        if name != marker:
            (folder / name).upload(source / name)
    _delete([folder / stale for stale in folder.sizes().keys() - set(names)])
    (folder / marker).upload(source / marker)


class AppendedFile:
    """A file in an object store to which one process appends.

    Object stores cannot append. A thread rewrites the whole object every `UPLOAD_SECONDS`, less often if it is larger
    than 32 MiB, so that it uploads about 1 MiB a second on average. A killed process loses what it appended after the
    last upload.
    """

    def __init__(self, path: RemotePath, seconds: float = UPLOAD_SECONDS) -> None:
        """Continue the object, if it exists.

        Args:
            path: the object. Its fence may raise RuntimeError if another process writes the object now.
            seconds: longest time between an append and its upload.

        Raises:
            OSError: if the object cannot be read.
        """
        self.path = path
        """The object."""
        self._content = bytearray(path.read_bytes() if path.is_file() else b"")
        self._uploaded = len(self._content)
        self._seconds = seconds
        self._upload_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._upload_regularly, name=f"upload {path.name}", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Append bytes; they are uploaded later."""
        self._content += data

    def flush(self) -> None:
        """Upload the object if it has grown.

        Raises:
            OSError: if it cannot be written.
            RuntimeError: if another process writes it now.
        """
        with self._upload_lock:
            content = bytes(self._content)
            if len(content) > self._uploaded:
                self.path.write_bytes(content)
                self._uploaded = len(content)

    def close(self) -> None:
        """Upload the object a last time, and end the thread; raises the errors of `flush`."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _upload_regularly(self) -> None:
        while not self._closing.wait(self._seconds * max(1.0, len(self._content) / _UPLOAD_BYTES)):
            try:
                self.flush()
            except OSError as error:
                logger.warning("%s is uploaded again later: %s", self.path.name, error)
            except RuntimeError as error:
                logger.error("%s is no longer uploaded: %s", self.path.name, error)
                return


WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack")
"""Names of files with weights, which may be next to a tokenizer."""


def local_copy(folder: RemotePath, cache: Path, omitted: Sequence[str] = ()) -> Path:
    """Download a folder, unless its current version is in the cache.

    Unused copies in the cache are not deleted; files whose names match a pattern of `omitted` are not copied.

    Returns:
        The local folder.

    Raises:
        FileNotFoundError: if the folder has no files.
        OSError: if a file cannot be read or written.
    """
    names = [name for name in folder.sizes() if not any(fnmatch.fnmatchcase(name, pattern) for pattern in omitted)]
    if not names:
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(folder))
    versions = "\n".join(f"{name} {(folder / name).version()}" for name in names)
    copy = cache / hashlib.sha256(f"{folder}\n{versions}".encode()).hexdigest()[:32]
    if copy.exists():
        return copy
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{copy.name}.", dir=cache))
    try:
        for name in names:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).download(partial / name)
        try:
            os.rename(partial, copy)
        except OSError:
            # Another process of this machine may have been faster.
            if not copy.exists():
                raise
    finally:
        remove(partial)
    return copy


def file_sizes(folder: StoragePath) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, by path relative to it; empty if it does not exist."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


class FileDigest(NamedTuple):
    """Size and checksum of a file, or of its first bytes."""

    size: int
    """Number of bytes."""
    sha256: str
    """SHA-256 checksum in hexadecimal digits."""


def digest_of(source: StoragePath | bytes | memoryview) -> FileDigest:
    """Return size and checksum of a file or of its content; a local file is read in parts."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return FileDigest(file.tell(), digest.hexdigest())
    data = source.read_bytes() if isinstance(source, RemotePath) else source
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def path_digest(path: StoragePath) -> str:
    r"""Return the SHA-256 checksum of a file or a folder.

    That of a folder is the checksum of the lines that `sha256sum` prints for its files, in the order of their names:
    `find -L . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum`.

    Raises:
        FileNotFoundError: if it does not exist, or is a folder without files.
        OSError: if a file cannot be read, or a folder contains a link to a folder, whose files would not be read.
    """
    if path.is_file():
        return digest_of(path).sha256
    if isinstance(path, Path):
        for link in path.rglob("*"):
            if link.is_symlink() and link.is_dir():
                raise OSError(errno.EINVAL, f"{str(link)!r} is a link to a folder; replace it by the folder")
    names = sorted(file_sizes(path), key=_name_bytes)
    if not names:
        raise FileNotFoundError(errno.ENOENT, "there is no such file, and no folder with files", str(path))
    return digest_of(b"".join(_digest_line(digest_of(path / name).sha256, name) for name in names)).sha256


def _digest_line(digest: str, name: str) -> bytes:
    """A line of `sha256sum`, which begins with a backslash if the name is escaped."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return ("\\" if escaped != name else "").encode() + digest.encode() + b"  " + _name_bytes(escaped) + b"\n"


def _name_bytes(name: str) -> bytes:
    """A file's name, which need not be UTF-8."""
    return name.encode("utf-8", "surrogateescape")


MAX_DESCRIPTION_BYTES = 256 * 2**20
"""Maximum size of a file that describes a model or a tokenizer; the largest tokenizers have 40 MB."""


def check_small(path: Path, max_bytes: int = MAX_DESCRIPTION_BYTES) -> None:
    """Check that a file can be read as a whole: a device may have no end, and a pipe no writer.

    Raises:
        OSError: if it does not exist.
        ValueError: if it is neither a regular file nor a folder, or too large.
    """
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ValueError(f"{str(path)!r} is a device, a pipe or a socket; replace it by a file")
    if status.st_size > max_bytes:
        raise ValueError(
            f"{str(path)!r} has {status.st_size / 2**20:,.0f} MiB, more than the {max_bytes // 2**20} MiB that such a "
            "file may have; use the original file"
        )


def read_small(path: StoragePath, max_bytes: int = MAX_DESCRIPTION_BYTES) -> bytes:
    """Read a file that describes something, such as a config, as a whole; errors as of `check_small`."""
    if isinstance(path, Path):
        check_small(path, max_bytes)
    return path.read_bytes()


def check_descriptions(folder: Path) -> None:
    """Check that the files of a model's folder that are read as a whole fit into memory; errors as above."""
    for path in sorted(folder.iterdir()):
        # A dangling link is reported when it is read.
        if path.suffix in (".json", ".jinja", ".model", ".txt") and path.exists():
            check_small(path)


def remove(path: StoragePath) -> None:
    """Remove a folder, file or symbolic link if it exists."""
    if isinstance(path, RemotePath):
        _delete([path / name for name in path.sizes()])
        path.unlink(missing_ok=True)
    elif path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _delete(files: Collection[RemotePath]) -> None:
    """Delete files, several at a time."""
    with ThreadPoolExecutor(_DELETES, thread_name_prefix="delete") as threads:
        list(threads.map(lambda file: file.unlink(missing_ok=True), files))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
