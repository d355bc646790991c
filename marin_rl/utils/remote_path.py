# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Paths in object stores, with the methods of `pathlib.Path` that runs use, through fsspec."""

import contextlib
import dataclasses
import errno
import fnmatch
import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec


class StorageError(OSError):
    """An object store refused or failed a request; the message names the address, the reason and the remedy."""

    def __init__(self, reason: str, address: str, remedy: str) -> None:
        super().__init__(errno.EIO, reason, address)
        self.remedy = remedy
        """Advice to the user."""

    def __reduce__(self) -> tuple[Any, ...]:
        # TensorStore copies the exceptions of its callbacks, as multiprocessing does.
        return type(self), (self.strerror, self.filename, self.remedy)

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
    fence: Callable[[], None] | None = dataclasses.field(default=None, compare=False, repr=False)
    """Called before an object here or below is written or deleted; raises if this process may not do that any more."""

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.address}/{name}", self.fence)

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
        return RemotePath(self.address.rpartition("/")[0], self.fence)

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
        with self._client_errors() as (files, path):
            return bytes(files.cat_file(path))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Read the object as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes | memoryview, *, only_new: bool = False) -> None:
        """Write the object, atomically.

        `only_new` fails if the object exists; of several processes that write it, one succeeds.

        Raises:
            FileExistsError: if `only_new` and the object exists.
        """
        self._check_fence()
        with self._client_errors() as (files, path):
            files.pipe_file(path, bytes(data), **({"mode": "create"} if only_new else {}))

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write the object as text, atomically."""
        self.write_bytes(text.encode(encoding))

    def upload(self, file: Path) -> None:
        """Copy a local file to this address."""
        self._check_fence()
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
        self._check_fence()
        try:
            with self._client_errors() as (files, path):
                files.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Do nothing: object stores have no folders."""

    def _check_fence(self) -> None:
        if self.fence is not None:
            self.fence()

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
            number = errno.EEXIST if isinstance(error, FileExistsError) else errno.ENOENT
            raise type(error)(error.errno or number, str(error), self.address) from error
        except StorageError:
            raise
        except Exception as error:
            # The clients raise errors of their libraries, such as those of google.auth, aiohttp and botocore.
            raise _storage_error(error, self.address) from error


_DENIED = re.compile(r"forbidden|access ?denied|permission|unauthorized|\b40[13]\b")
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
    if isinstance(error, PermissionError) or _DENIED.search(text):
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
