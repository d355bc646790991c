# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A durable file of records, to which a server appends before it answers."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from marin_rl.utils.errors import UserError
from marin_rl.utils.storage import named_in_errors, open_atomically

logger = logging.getLogger(__name__)

_FRAME = struct.Struct("<III")
"""Length of the header, length of the body, and checksum of both with their lengths."""


class Record(NamedTuple):
    """One record."""

    header: Mapping[str, Any]
    """A JSON object."""
    body: bytes = b""


class Journal:
    """Appends records to a file; many threads may append and wait, one may rewrite.

    `append` returns when the record is in the file, and `sync` when it is on the disk. All waiting threads share one
    `fsync`. A process that is killed, or a machine that loses power, may leave an incomplete record at the end. The
    next `Journal` drops it, and all later bytes: nobody was told that these were accepted.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and lock it.

        Raises:
            UserError: if another process has it open.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock_file = path.with_name(f"{path.name}.lock").open("wb")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise UserError(f"{str(path)!r} is in use by another server; stop it, or choose another folder") from error
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._file = path.open("ab", buffering=0)
        self._appended = self._synced = 0
        """Number of records since the start."""
        self._failure: OSError | None = None
        self.size = 0
        """Bytes of the file."""
        self.torn_bytes = 0
        """Bytes that `recover` dropped at the end."""

    def recover(self) -> Iterator[Record]:
        """Yield the records of earlier processes, and drop an incomplete end. Call it once, before `append`."""
        file_size = os.fstat(self._file.fileno()).st_size
        with self._path.open("rb") as file:
            for raw, record in _records(file, file_size):
                self.size += len(raw)
                yield record
        if torn := file_size - self.size:
            logger.warning("%s: dropped %d bytes of an incomplete record at the end", self._path, torn)
        self.torn_bytes = torn
        self._file.truncate(self.size)
        os.fsync(self._file.fileno())

    def append(self, header: Mapping[str, Any], body: bytes = b"") -> int:
        """Write a record; return its position, for `sync`.

        Raises:
            OSError: if it cannot be written; the file is as before.
        """
        raw = memoryview(_frame(header, body))
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                written = 0
                with named_in_errors(self._path):
                    while written < len(raw):
                        written += self._file.write(raw[written:])
            except OSError:
                self._file.truncate(self.size)
                raise
            self.size += len(raw)
            self._appended += 1
            return self._appended

    @property
    def position(self) -> int:
        """Position of the newest record."""
        return self._appended

    def sync(self, position: int) -> None:
        """Wait until the record at a position, and all before it, are on the disk.

        Raises:
            OSError: if that failed, now or earlier: the disk may have lost records that are in the file.
        """
        with self._syncing:
            if self._synced >= position:
                return
            if self._failure is not None:
                raise self._failure
            end = self._appended
            try:
                with named_in_errors(self._path):
                    os.fsync(self._file.fileno())
            except OSError as error:
                self._failure = error
                raise
            self._synced = end

    def rewrite(self, head: Record, size: int, keep: Callable[[Mapping[str, Any]], bool]) -> None:
        """Replace the file atomically by `head`, those of its records that are kept, and all that are appended later.

        Args:
            head: new first record.
            size: former `size`, up to which records are filtered; later records are kept.
            keep: whether to keep a record with this header.

        Raises:
            OSError: if the new file cannot be written; the old one is not changed.
        """
        with self._path.open("rb") as old, contextlib.ExitStack() as locks:
            with open_atomically(self._path) as new:
                new.write(_frame(*head))
                for raw, record in _records(old, size):
                    if keep(record.header):
                        new.write(raw)
                new.flush()
                os.fsync(new.fileno())
                # Only the rest, which is short, is copied while others wait.
                locks.enter_context(self._syncing)
                locks.enter_context(self._lock)
                old.seek(size)
                shutil.copyfileobj(old, new)
            replaced, self._file = self._file, self._path.open("ab", buffering=0)
            replaced.close()
            self.size = os.fstat(self._file.fileno()).st_size
            self._synced = self._appended

    def close(self) -> None:
        """Write everything to the disk, and let another process open the file."""
        with self._syncing, self._lock:
            os.fsync(self._file.fileno())
            self._file.close()
            self._lock_file.close()


def _frame(header: Mapping[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return _FRAME.pack(len(text), len(body), _checksum(text, body)) + text + body


def _checksum(text: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(text, zlib.crc32(b"%d %d" % (len(text), len(body)))))


def _records(file: BinaryIO, size: int) -> Iterator[tuple[bytes, Record]]:
    """Yield the bytes and the content of records in the first `size` bytes, up to the first invalid one."""
    while size >= _FRAME.size:
        frame = file.read(_FRAME.size)
        text_size, body_size, checksum = _FRAME.unpack(frame)
        size -= _FRAME.size + text_size + body_size
        if size < 0:
            return
        text, body = file.read(text_size), file.read(body_size)
        if checksum != _checksum(text, body):
            return
        yield frame + text + body, Record(json.loads(text), body)
