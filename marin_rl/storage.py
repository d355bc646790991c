# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Files of a run on a local file system or in an object store.

A local path is a `pathlib.Path`. An address such as `gs://bucket/run` is a [`RemotePath`][marin_rl.storage.RemotePath],
which has the methods of `pathlib.Path` that runs use, through fsspec. Both are a `StoragePath`.

Local files and folders are replaced by renaming, after they are flushed to disk. Object stores cannot rename, but write
each object completely or not at all: a folder there is complete when the file that names its content is written last.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import functools
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

logger = logging.getLogger(__name__)

FLAT = frozenset({"gs", "gcs", "s3", "s3a", "az", "abfs", "memory"})
"""Protocols of stores without folders."""
CONDITIONAL = frozenset({"gs", "gcs", "s3", "s3a", "memory"})
"""Protocols with a client that can create an object only if it does not exist."""
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}
"""Extras of this package by protocol."""
UPLOAD_SECONDS = 30.0
"""Longest time between an append to a file of up to 32 MiB in an object store and its upload."""
_UPLOAD_BYTES = 32 * 2**20
_DELETES = 16
_BLOCK_BYTES = 32 * 2**20


class StorageError(OSError):
    """An object store refused or failed a request; the message names the address, the reason and the remedy."""

    def __init__(self, reason: str, address: str, remedy: str) -> None:
        super().__init__(errno.EIO, reason, address)
        self.remedy = remedy
        """How to continue."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}; {self.remedy}"


@dataclasses.dataclass(frozen=True, order=True)
class RemotePath:
    """Path in an object store, with the methods of `pathlib.Path` that runs use.

    Listings are never cached, because other processes write to the same folder. Errors of the store's client are raised
    as `OSError`: `FileNotFoundError`, `FileExistsError` or `StorageError`.

    >>> (RemotePath("gs://bucket/run") / "rollouts" / "step-1.parquet").suffix
    '.parquet'
    """

    address: str
    """Address with protocol, without a trailing slash."""

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.address}/{name}")

    def __str__(self) -> str:
        return self.address

    @property
    def protocol(self) -> str:
        """Protocol, such as `gs`."""
        return self.address.partition("://")[0]

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.address.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Last ending of the name with its dot; empty if there is none."""
        return Path(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        """The folder."""
        return RemotePath(self.address.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is an object of this name, or one in the folder of this name."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there is an object in the folder of this name."""
        return self._kind() == "directory"

    def iterdir(self) -> Iterator["RemotePath"]:
        """Yield the entries of the folder, sorted; none if it does not exist."""
        yield from (self / name for name in self._listing(recursive=False))

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the entries of the folder whose names match the pattern."""
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of all files below this folder, by relative path."""
        return self._listing(recursive=True)

    def read_bytes(self) -> bytes:
        """Read the object."""
        return self.read_range(None, None)

    def read_range(self, start: int | None, stop: int | None) -> bytes:
        """Read the bytes from `start` to `stop`; None for the beginning and the end."""
        with self._client_errors() as (files, path):
            return bytes(files.cat_file(path, start=start, end=stop))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the object as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes, *, only_new: bool = False) -> None:
        """Write the object, atomically.

        Args:
            data: content.
            only_new: fail if the object exists; atomic if the protocol is in `CONDITIONAL`.

        Raises:
            FileExistsError: if `only_new` and the object exists.
        """
        with self._client_errors() as (files, path):
            if self.protocol not in FLAT:
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
            files.pipe_file(path, data, **({"mode": "create"} if only_new else {}))

    def write_parts(self, parts: Iterable[memoryview]) -> None:
        """Write the object from consecutive parts with little memory; after an error it may be incomplete."""
        with self._client_errors() as (files, path), files.open(path, "wb", block_size=_BLOCK_BYTES) as stream:
            for part in parts:
                stream.write(part)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write the object as text, atomically."""
        self.write_bytes(text.encode(encoding))

    def upload(self, file: Path) -> None:
        """Copy a local file to this address."""
        with self._client_errors() as (files, path):
            files.put_file(str(file), path)

    def download(self, file: Path) -> None:
        """Copy the object to a local file."""
        with self._client_errors() as (files, path):
            files.get_file(path, str(file))

    def version(self) -> str:
        """Return a text that changes when the object is replaced."""
        with self._client_errors() as (files, path):
            return str(files.ukey(path))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            with self._client_errors() as (files, path):
                files.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Create the folder, if the store has folders."""
        if self.protocol not in FLAT:
            with self._client_errors() as (files, path):
                files.makedirs(path, exist_ok=exist_ok)

    def _kind(self) -> str | None:
        """`file` or `directory`; None if there is no object. Clients' own `exists` is false if the store fails."""
        try:
            with self._client_errors() as (files, path):
                files.invalidate_cache(path)
                return files.info(path)["type"]
        except FileNotFoundError:
            return None

    def _listing(self, *, recursive: bool) -> dict[str, int]:
        """Return sizes by path relative to this folder."""
        try:
            with self._client_errors() as (files, path):
                root = path.rstrip("/")
                files.invalidate_cache(root)
                found = files.find(root, detail=True) if recursive else files.ls(root, detail=True)
        except FileNotFoundError:
            return {}
        entries = found.values() if isinstance(found, dict) else found
        sizes = {str(entry["name"]).rstrip("/")[len(root) + 1 :]: int(entry.get("size") or 0) for entry in entries}
        # Some tools create an empty object with the name of the folder.
        return {name: sizes[name] for name in sorted(sizes) if name}

    @contextlib.contextmanager
    def _client_errors(self) -> Iterator[tuple[Any, str]]:
        """Yield the client and its path; raise its errors as `OSError`."""
        try:
            yield _client(self.address)
        except (FileNotFoundError, FileExistsError) as error:
            raise type(error)(error.errno or errno.ENOENT, str(error), self.address) from error
        except StorageError:
            raise
        except Exception as error:
            # The clients raise errors of their libraries, such as those of google.auth, aiohttp and botocore.
            raise _storage_error(error, self.address) from error


StoragePath = Path | RemotePath
"""A local path or the address of an object."""

_DENIED = ("forbidden", "access denied", "accessdenied", "permission", "unauthorized", "401", "403")
_NO_CREDENTIALS = ("credential", "anonymous caller")


def _storage_error(error: Exception, address: str) -> StorageError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    detail = " ".join(lines[-1:]) or type(error).__name__
    text = f"{type(error).__name__} {error}".lower()
    protocol = address.partition("://")[0]
    if any(mark in text for mark in _NO_CREDENTIALS):
        return StorageError(
            f"this machine has no valid credentials for {protocol}:// ({detail})",
            address,
            "log in (gcloud auth application-default login, aws configure) or attach a service account",
        )
    if isinstance(error, PermissionError) or any(mark in text for mark in _DENIED):
        return StorageError(
            f"permission denied ({detail})", address, "give the account of this machine read and write access"
        )
    return StorageError(
        f"the store failed ({type(error).__name__}: {detail})",
        address,
        "run the same command again when the store is reachable",
    )


@functools.cache
def _filesystem(protocol: str) -> Any:
    # It prints a traceback of every error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    return fsspec.filesystem(protocol, use_listings_cache=False)


def _client(address: str) -> tuple[Any, str]:
    protocol, _, _ = address.partition("://")
    files = _filesystem(protocol)
    return files, files._strip_protocol(address)


def storage_path(text: str, key: str = "path") -> StoragePath:
    """Return the path of a run's files.

    Args:
        text: a local path, or an address such as `gs://bucket/run`.
        key: key of the setting, for the error message.

    Raises:
        ValueError: if the protocol is unknown, its package is not installed, or the address has no bucket.

    >>> storage_path("runs/rloo")
    PosixPath('runs/rloo')
    >>> storage_path("gs://bucket/runs/rloo/")
    RemotePath(address='gs://bucket/runs/rloo')
    """
    protocol, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if protocol in ("file", "local"):
        return Path(rest)
    if protocol not in fsspec.available_protocols():
        raise ValueError(
            f"{key} is {text!r}, but the protocol {protocol}:// is unknown; use a path on a mounted file system, gs:// "
            "or s3://"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = f"marin_rl[{EXTRAS[protocol]}]" if protocol in EXTRAS else str(error)
        raise ValueError(
            f"{key} is {text!r}, but the package for {protocol}:// is not installed; pip install '{package}'"
        ) from error
    if not rest.strip("/"):
        raise ValueError(f"{key} is {text!r}, which names no bucket and no folder; use {protocol}://BUCKET/FOLDER")
    return RemotePath(f"{protocol}://{rest.rstrip('/')}")


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a local file for writing that replaces `path` when the block ends, and is removed if the block raises.

    After a crash the file is either the old one or complete. Only one writer per file is allowed.

    Args:
        path: the file.

    Yields:
        The temporary file `.<name>.partial` in the same folder.

    Raises:
        OSError: if the file cannot be written; an existing file is not changed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync(path.parent)


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


def write_parts(path: StoragePath, parts: Iterable[memoryview]) -> None:
    """Write a file from consecutive parts; after an error it may be incomplete."""
    if isinstance(path, RemotePath):
        path.write_parts(parts)
        return
    with path.open("wb") as file:
        for part in parts:
            file.write(part)


def replace_folder(folder: Path, partial: Path) -> None:
    """Flush a complete local folder to disk and rename it; after a crash, `folder` is either absent or complete.

    Args:
        folder: the final path; an existing folder, file or link is removed.
        partial: the complete folder, on the same file system.

    Raises:
        OSError: if the folder cannot be flushed, removed or renamed.
    """
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    remove(folder)
    partial.rename(folder)
    _sync(folder.parent)


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
            path: the object.
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

    def append(self, data: bytes) -> None:
        """Append bytes; they are uploaded later."""
        self._content += data

    def flush(self) -> None:
        """Upload the object if it has grown.

        Raises:
            OSError: if it cannot be written.
        """
        with self._upload_lock:
            content = bytes(self._content)
            if len(content) > self._uploaded:
                self.path.write_bytes(content)
                self._uploaded = len(content)

    def close(self) -> None:
        """Upload the object a last time, and end the thread; raises OSError like `flush`."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _upload_regularly(self) -> None:
        while not self._closing.wait(self._seconds * max(1.0, len(self._content) / _UPLOAD_BYTES)):
            try:
                self.flush()
            except OSError as error:
                logger.warning("%s is uploaded again later: %s", self.path.name, error)


def local_copy(folder: RemotePath, cache: Path) -> Path:
    """Download a folder, unless its current version is in the cache.

    Args:
        folder: the folder.
        cache: local folder of copies; unused copies are not deleted.

    Returns:
        The local folder.

    Raises:
        FileNotFoundError: if the folder has no files.
        OSError: if a file cannot be read or written.
    """
    names = list(folder.sizes())
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
        # Another process of this machine may have been faster.
        with contextlib.suppress(FileExistsError):
            os.rename(partial, copy)
    finally:
        remove(partial)
    return copy


def file_sizes(folder: StoragePath) -> dict[str, int]:
    """Return the sizes in bytes of all files below a folder, by path relative to it; empty if it does not exist."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def read_range(path: StoragePath, start: int, stop: int) -> bytes:
    """Read the bytes of a file from `start` to `stop`; fewer if the file ends before."""
    if isinstance(path, RemotePath):
        return path.read_range(start, stop)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
