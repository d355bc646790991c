# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.serving.tinker import journal as journal_module
from marin_rl.serving.tinker.journal import Journal, RecordedError
from marin_rl.utils.errors import UserError


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Journal]:
    journal = Journal(path)
    try:
        yield journal
    finally:
        journal.close()


def numbered(number: int) -> dict[str, Any]:
    return {"record": "operation", "id": f"{number}"}


def numbers(journal: Journal) -> list[int]:
    return [int(header["id"]) for header, _ in journal.records()]


WRITTEN = [(numbered(number), bytes([number]) * size) for number, size in enumerate([0, 3, 40, 9000])]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Return the files of `WRITTEN` after a kill and after `close`."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    with opened(path) as journal:
        for record in WRITTEN:
            journal.append(*record)
        killed = {file.name: file.read_bytes() for file in (path.with_name("journal-wal"), path)}
    return {"killed": killed, "closed": {path.name: path.read_bytes()}}


@given(st.data())
def test_damage_loses_the_end_or_is_refused(
    files: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "journal"
    contents = data.draw(st.sampled_from(list(files.values())))
    damaged = data.draw(st.sampled_from(list(contents)))
    for name, content in contents.items():
        if name == damaged:
            place = data.draw(st.integers(0, len(content) - 1))
            flipped = bytes([content[place] ^ 1 << data.draw(st.integers(0, 7))])
            content = content[:place] + (data.draw(st.sampled_from([b"", flipped + content[place + 1 :]])))
        path.with_name(name).write_bytes(content)
    with contextlib.suppress(UserError):
        with opened(path) as journal:
            found = list(journal.records())
            journal.append(numbered(9))
        assert found == WRITTEN[: len(found)]
        # A later record is not behind the damage.
        with opened(path) as journal:
            assert list(journal.records()) == [*found, (numbered(9), b"")]


def other_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE records (number INTEGER)")


@pytest.mark.parametrize(
    "write",
    [
        other_database,
        lambda path: path.write_text("My diary.\n"),
        # A former format.
        lambda path: path.write_bytes(b'\r\0\0\0\3\0\0\0b\xbc\x9a9{"states": 0}abc'),
    ],
)
def test_files_of_others_are_refused_and_left_as_they_are(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "journal"
    write(path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"^'{path}' .*; if .* another version, delete"):
        Journal(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_is_there_once(tmp_path: Path) -> None:
    with opened(tmp_path / "journal") as journal:
        journal.append(numbered(0), b"a")
        with pytest.raises(RecordedError):
            journal.append(numbered(0), b"b")
        journal.append({"record": "result", "id": "0"}, b"c")
        journal.append({"record": "result", "id": "0"}, b"d", replace=True)
        assert [body for _, body in journal.records()] == [b"a", b"d"]


def test_pruned_records_free_their_space(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path) as journal:
        for number in range(100):
            journal.append(numbered(number), bytes(10_000))
        journal.prune(lambda kind, id: kind == "operation" and int(id) >= 98)
        journal.append(numbered(100))
        assert numbers(journal) == [98, 99, 100]
    assert path.stat().st_size < 50_000


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    program = f"from marin_rl.serving.tinker.journal import Journal; Journal(Path({str(tmp_path / 'journal')!r}))"
    command = [sys.executable, "-c", f"from pathlib import Path; {program}"]
    with opened(tmp_path / "journal") as journal:
        journal.append(numbered(0))
        refused = subprocess.run(command, check=False, capture_output=True, text=True)
        assert "UserError" in refused.stderr
        assert "in use by another server" in refused.stderr
        with pytest.raises(UserError, match="in use by another server"):
            Journal(tmp_path / "journal")
    assert subprocess.run(command, check=False).returncode == 0


def test_a_full_disk_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "journal", sqlite3.connect
    databases: list[sqlite3.Connection] = []

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        databases.append(real(*args, **kwargs))
        return databases[-1]

    monkeypatch.setattr(journal_module.sqlite3, "connect", connect)
    with opened(path) as journal:
        journal.append(numbered(0), b"abc")
        (most,) = databases[0].execute("PRAGMA max_page_count = 1").fetchone()
        with pytest.raises(OSError, match="No space") as full:
            journal.append(numbered(1), bytes(20_000))
        assert full.value.filename == str(path)
        databases[0].execute(f"PRAGMA max_page_count = {most + 100}")
        journal.append(numbered(1), b"again")
        journal.append(numbered(2), bytes(20_000))
    with opened(path) as journal:
        assert [(header["id"], len(body)) for header, body in journal.records()] == [("0", 3), ("1", 5), ("2", 20_000)]


def test_threads_that_wait_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_entered, may_leave, calls, real = threading.Event(), threading.Event(), [], os.fsync

    def fsync(file: int) -> None:
        calls.append(file)
        is_entered.set()
        assert may_leave.wait(30)
        real(file)

    with opened(tmp_path / "journal") as journal:
        monkeypatch.setattr(journal_module.os, "fsync", fsync)
        first = threading.Thread(target=journal.sync, args=(journal.append(numbered(0)),))
        first.start()
        assert is_entered.wait(30)
        # Nobody has to wait for the disk to append.
        others = [threading.Thread(target=journal.sync, args=(journal.append(numbered(n)),)) for n in range(1, 9)]
        for thread in others:
            thread.start()
        may_leave.set()
        for thread in (first, *others):
            thread.join(30)
        journal.sync()
        assert len(calls) == 2


def test_a_failed_sync_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "journal"
    with opened(path) as journal:
        position = journal.append(numbered(0))
        with monkeypatch.context() as patched:
            patched.setattr(journal_module.os, "fsync", fail)
            with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
                journal.sync(position)
        # The system may report it once, and drop the data.
        for call in (lambda: journal.sync(position), lambda: journal.append(numbered(1))):
            with pytest.raises(OSError, match="Input/output error"):
                call()
