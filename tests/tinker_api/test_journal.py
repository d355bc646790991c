# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.tinker_api.journal import Journal, Record
from marin_rl.utils.errors import UserError


def records(path: Path) -> list[Record]:
    journal = Journal(path)
    found = list(journal.recover())
    journal.close()
    return found


def write(path: Path, sizes: list[int]) -> list[Record]:
    written = [Record({"number": number}, bytes([number]) * size) for number, size in enumerate(sizes)]
    journal = Journal(path)
    list(journal.recover())
    for record in written:
        journal.sync(journal.append(*record))
    journal.close()
    return written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal")


@given(st.data())
def test_a_torn_or_damaged_end_is_dropped(folder: Path, data: st.DataObject) -> None:
    path = folder / "journal"
    path.unlink(missing_ok=True)
    written = write(path, [0, 3, 40])
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:place])
    else:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :])
    found = records(path)
    assert found == written[: len(found)]
    assert len(found) < 3
    # A record that is appended now is not behind the damage.
    journal = Journal(path)
    list(journal.recover())
    journal.append({"later": True})
    journal.close()
    assert records(path) == [*found, Record({"later": True})]


def test_a_rewrite_keeps_what_is_appended_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, [10, 20, 30])
    journal = Journal(path)
    list(journal.recover())
    size = journal.size
    is_done = threading.Event()

    def append() -> None:
        number = 100
        while not is_done.is_set():
            journal.sync(journal.append({"number": number}, b"x" * number))
            number += 1

    thread = threading.Thread(target=append)
    thread.start()
    for _ in range(20):
        journal.rewrite(Record({"number": -1}), size, lambda header: header["number"] == 1)
        size = journal.size
    is_done.set()
    thread.join()
    journal.close()
    numbers = [record.header["number"] for record in records(path)]
    later = [number for number in numbers if number >= 100]
    # The last rewrite filtered those that the one before had kept.
    assert numbers[0] == -1
    assert later == list(range(later[0], later[-1] + 1)) if later else True


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(UserError):
        Journal(tmp_path / "journal")
    journal.close()


def test_a_full_disk_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    list(journal.recover())
    journal.append({"number": 0}, b"abc")
    real = journal._file

    class Full:
        """A file that takes half of a write."""

        writes = 0

        def write(self, data: memoryview) -> int:
            self.writes += 1
            if self.writes == 2:
                raise OSError(28, "No space left on device")
            return real.write(data[: len(data) // 2])

        truncate = staticmethod(real.truncate)

    monkeypatch.setattr(journal, "_file", Full())
    with pytest.raises(OSError, match="No space") as full:
        journal.append({"number": 1}, b"defghi")
    assert full.value.filename == str(path)
    monkeypatch.setattr(journal, "_file", real)
    journal.append({"number": 2})
    journal.close()
    assert [record.header["number"] for record in records(path)] == [0, 2]
