# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A durable file of records, to which a server appends before it answers."""

import contextlib
import errno
import json
import os
import sqlite3
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marin_rl.utils.errors import UserError
from marin_rl.utils.storage import named_in_errors

_FORMAT = int.from_bytes(b"mrj1")
"""SQLite's `application_id` of files of this version."""
_COLUMNS = "kind TEXT NOT NULL, id TEXT NOT NULL, header BLOB NOT NULL, body BLOB NOT NULL, checksum INTEGER NOT NULL"


class RecordedError(Exception):
    """The journal has a record of this kind and id."""


class Journal:
    """An SQLite database of records with a write-ahead log; many threads may append and wait.

    A record is a JSON object and bytes; its kind, `record`, and its `id` are together unique. Each is a transaction:
    `append` returns when it is in the log, which outlives the process, and `sync` when the log is on the disk. In
    SQLite's mode `synchronous = FULL`, commits wait for the disk one after the other, and keep others from appending.
    Here they do not wait (`NORMAL`), and `sync` calls the missing `fsync`, one for all threads that wait.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and lock it.

        Raises:
            UserError: if another process has it open, or if it is damaged or no journal of this version.
            OSError: if it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._log_path = path, path.with_name(f"{path.name}-wal")
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._appended = self._synced = 0
        """Number of transactions since the start."""
        self._failure: OSError | None = None
        with contextlib.ExitStack() as stack, self._explained():
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            stack.callback(self._db.close)
            self._open()
            self._log = self._log_path.open("rb")
            stack.pop_all()

    def _open(self) -> None:
        # Against other servers. SQLite then needs no shared memory, which network file systems lack.
        self._pragma("locking_mode = exclusive")
        is_new = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        if not is_new and self._pragma("application_id") != _FORMAT:
            raise sqlite3.DatabaseError("another application_id")
        self._pragma("auto_vacuum = full")
        if (mode := self._pragma("journal_mode = wal")) != "wal":
            raise sqlite3.DatabaseError(f"the file system only allows journal_mode = {mode}")
        self._pragma("synchronous = normal")
        self._pragma(f"journal_size_limit = {2**24}")
        if is_new:
            with self._db:
                self._db.execute("BEGIN")
                self._db.execute(f"CREATE TABLE records (number INTEGER PRIMARY KEY, {_COLUMNS}, UNIQUE (kind, id))")
                self._pragma(f"application_id = {_FORMAT}")
        if self._pragma("integrity_check(1)") != "ok":
            raise sqlite3.DatabaseError("integrity_check failed")

    def _pragma(self, text: str) -> Any:
        row = self._db.execute(f"PRAGMA {text}").fetchone()
        return row and row[0]

    @property
    def size(self) -> int:
        """Bytes of the file and its log."""
        return self._path.stat().st_size + self._log_path.stat().st_size

    def records(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield all records in their order. Raise `UserError` if they are damaged."""
        with self._explained():
            for header, body, checksum in self._db.execute(
                "SELECT header, body, checksum FROM records ORDER BY number"
            ):
                if _checksum(header, body) != checksum:
                    raise sqlite3.DatabaseError("wrong checksum")
                yield json.loads(header), body

    def append(self, header: Mapping[str, Any], body: bytes = b"", *, replace: bool = False) -> int:
        """Write a record, which may `replace` one of the same kind and id; return its position, for `sync`.

        Raises:
            RecordedError: if the journal has one of the same kind and id.
            OSError: if it cannot be written; the journal is as before.
        """
        text = json.dumps(header).encode()
        values = header["record"], header["id"], text, body, _checksum(text, body)
        verb = "REPLACE" if replace else "INSERT"
        with self._lock, self._explained():
            if self._failure is not None:
                raise self._failure
            self._db.execute(f"{verb} INTO records (kind, id, header, body, checksum) VALUES (?, ?, ?, ?, ?)", values)
            self._appended += 1
            return self._appended

    def prune(self, keep: Callable[[str, str], bool]) -> None:
        """Delete the records whose kind and id are not kept.

        Raises:
            OSError: if they cannot be deleted; the journal is as before.
        """
        with self._lock, self._explained(), self._db:
            found = self._db.execute("SELECT number, kind, id FROM records").fetchall()
            if pruned := [(number,) for number, kind, id in found if not keep(kind, id)]:
                self._db.execute("BEGIN")
                self._db.executemany("DELETE FROM records WHERE number = ?", pruned)
                self._appended += 1

    def sync(self, position: int | None = None) -> None:
        """Wait until the record at a position, by default the newest, and all before it are on the disk.

        Raises:
            OSError: if that failed, now or earlier: the disk may have lost records that are in the file.
        """
        with self._syncing:
            end = self._appended
            if self._synced >= (end if position is None else position):
                return
            if self._failure is not None:
                raise self._failure
            try:
                with named_in_errors(self._path):
                    os.fsync(self._log.fileno())
            except OSError as error:
                self._failure = error
                raise
            self._synced = end

    def close(self) -> None:
        """Write everything to the disk, and let another process open the file."""
        with self._syncing, self._lock:
            self._log.close()
            self._db.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of SQLite to those of this class."""
        try:
            yield
        # SQLite may quote damaged text.
        except (sqlite3.Error, UnicodeDecodeError) as error:
            path, code = str(self._path), getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code == sqlite3.SQLITE_CONSTRAINT:
                raise RecordedError(str(error)) from error
            if code == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path) from error
            if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                # The system's error, such as that of a quota or a read-only folder, which SQLite does not give.
                with named_in_errors(self._path), tempfile.TemporaryFile(dir=self._path.parent) as probe:
                    probe.write(bytes(2**16))
            if code == sqlite3.SQLITE_BUSY:
                raise UserError(f"{path!r} is in use by another server; stop it, or choose another folder") from error
            raise UserError(
                f"{path!r} cannot be used as a journal: {error}; if it is damaged or of another version, delete "
                f"{str(self._path.parent)!r} (training since the last checkpoint is lost), or choose another folder"
            ) from error


def _checksum(header: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(header))
