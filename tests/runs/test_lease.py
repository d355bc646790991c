# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from marin_rl.runs import lease
from marin_rl.runs.lease import LEASE_SECONDS, hold, holder
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.retry import Clock
from marin_rl.utils.storage import remove
from tests.gcs_emulator import Fault, Gcs

LOCK = "run/.lock/"


@pytest.fixture
def folder(gcs: Gcs) -> RemotePath:
    return RemotePath("gs://bucket/run/.lock")


def elsewhere(folder: RemotePath, beats: int = 0) -> None:
    """Write the lock of a process on another machine."""
    content = {"pid": 7, "started": "1", "host": "far", "machine": "other", "name": "n", "beats": beats}
    (folder / "00000003").write_text(json.dumps(content))


def clock(at: Callable[[float], None] = lambda now: None) -> Clock:
    """A clock that sleeps in no time, and calls a function with the new time after every sleep."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        at(now)

    return Clock(lambda: now, sleep)


def test_lock_is_released_at_the_end(gcs: Gcs, folder: RemotePath) -> None:
    for number in (1, 2, 3):
        with hold(folder) as held:
            held.check()
            assert gcs.names(LOCK) == [f"{number:08d}"]
            assert json.loads(gcs.read(f"{LOCK}{number:08d}"))["pid"] == os.getpid()


def test_process_of_this_machine_is_refused_at_once(folder: RemotePath) -> None:
    awake = Clock(sleep=lambda seconds: pytest.fail("sleeps"))
    with hold(folder), pytest.raises(RunDirectoryError) as raised:
        hold(folder, awake).__enter__()
    assert re.fullmatch(
        rf"run directory 'gs://bucket/run' is in use by process {os.getpid()} on {re.escape(socket.gethostname())}; "
        "wait for it to end, stop it, or choose another run_dir",
        str(raised.value),
    )


def test_the_holder_is_found_without_changing_the_lock(gcs: Gcs, folder: RemotePath) -> None:
    awake = Clock(sleep=lambda seconds: pytest.fail("sleeps"))
    assert holder(folder, awake) is None
    with hold(folder):
        assert holder(folder, awake) == f"process {os.getpid()} on {socket.gethostname()}"
        assert gcs.names(LOCK) == ["00000001"]
    assert holder(folder, awake) is None
    elsewhere(folder)
    assert holder(folder, clock(lambda now: elsewhere(folder, beats=now > 14))) == "process 7 on far"
    assert holder(folder, clock()) is None
    assert gcs.names(LOCK) == ["00000001", "00000003"]


def test_lock_of_a_process_that_was_killed_on_this_machine_is_free(gcs: Gcs, folder: RemotePath) -> None:
    lines = [
        "import os",
        "from marin_rl.runs.lease import RemotePath, hold",
        "with hold(RemotePath('gs://bucket/run/.lock')): os._exit(9)",
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 9
    assert json.loads(gcs.read(f"{LOCK}00000001"))["beats"] == 0
    with hold(folder, Clock(sleep=lambda seconds: pytest.fail("sleeps"))):
        assert gcs.names(LOCK) == ["00000002"]


def test_lock_on_another_machine_is_taken_over_when_it_is_not_renewed(gcs: Gcs, folder: RemotePath, caplog) -> None:
    elsewhere(folder)
    times: list[float] = []
    with caplog.at_level(logging.WARNING), hold(folder, clock(times.append)):
        assert gcs.names(LOCK) == ["00000004"]
    assert LEASE_SECONDS <= times[-1] <= LEASE_SECONDS + 2
    assert "process 7 on far has not renewed its lock for 60 s and counts as dead" in caplog.text


def test_lock_on_another_machine_that_is_renewed_is_refused(gcs: Gcs, folder: RemotePath) -> None:
    elsewhere(folder)
    with pytest.raises(RunDirectoryError, match="is in use by process 7 on far; wait for it to end"):
        hold(folder, clock(lambda now: elsewhere(folder, beats=now > 14))).__enter__()
    assert gcs.names(LOCK) == ["00000003"]


def test_lock_on_another_machine_that_is_released_is_taken(gcs: Gcs, folder: RemotePath) -> None:
    elsewhere(folder)
    release = lambda now: (folder / "00000003").write_text('{"released": true}')  # noqa: E731
    with hold(folder, clock(release)):
        assert gcs.names(LOCK) == ["00000004"]


def test_a_former_lock_that_cannot_be_deleted_is_left(gcs: Gcs, folder: RemotePath, monkeypatch) -> None:
    (folder / "00000003").write_text('{"released": true}')
    unlink = RemotePath.unlink

    def fail(path: RemotePath, missing_ok: bool = False) -> None:
        if path.name == "00000003":
            raise OSError("no connection")
        unlink(path, missing_ok)

    monkeypatch.setattr(RemotePath, "unlink", fail)
    with hold(folder, clock()) as lease:
        lease.check()
        assert gcs.names(LOCK) == ["00000003", "00000004"]


def test_one_of_two_processes_takes_over_a_dead_lock(gcs: Gcs, folder: RemotePath) -> None:
    elsewhere(folder)
    # The other process is faster: it creates the next object just before this one does.
    newer = json.dumps({"pid": 8, "started": "1", "host": "near", "machine": "third", "name": "m", "beats": 0})
    beat = json.dumps({"pid": 8, "started": "1", "host": "near", "machine": "third", "name": "m", "beats": 1})
    gcs.watched.append((r"POST run/\.lock/00000004", lambda: gcs.put(f"{LOCK}00000004", newer.encode())))
    seconds: list[float] = []

    def at(now: float) -> None:
        seconds.append(now)
        if "00000004" in gcs.names(LOCK):
            gcs.put(f"{LOCK}00000004", beat.encode())

    with pytest.raises(RunDirectoryError, match="is in use by process 8 on near"):
        hold(folder, clock(at)).__enter__()
    assert json.loads(gcs.read(f"{LOCK}00000004"))["pid"] == 8


@pytest.mark.parametrize("is_released", [False, True])
def test_a_number_that_others_have_used_and_deleted_is_not_the_lock(
    gcs: Gcs, folder: RemotePath, is_released: bool
) -> None:
    elsewhere(folder)

    def others() -> None:
        # One process takes 4, deletes 3 and releases 4; the next one takes 5 and deletes 4.
        del gcs.objects[f"{LOCK}00000003"]
        content = {"pid": 8, "started": "1", "host": "near", "machine": "third", "name": "m", "beats": 0}
        gcs.put(f"{LOCK}00000005", json.dumps({"released": True} if is_released else content).encode())

    def at(now: float) -> None:
        if f"{LOCK}00000005" in gcs.objects:
            gcs.put(f"{LOCK}00000005", json.dumps({"pid": 8, "host": "near", "beats": 1}).encode())

    gcs.watched.append((r"POST run/\.lock/00000004", others))
    if is_released:
        with hold(folder, clock()):
            assert gcs.names(LOCK) == ["00000006"]
    else:
        with pytest.raises(RunDirectoryError, match="is in use by process 8 on near"):
            hold(folder, clock(at)).__enter__()
        assert gcs.names(LOCK) == ["00000005"]


def test_lost_answer_to_the_creation_is_no_other_process(gcs: Gcs, folder: RemotePath, monkeypatch) -> None:
    write = RemotePath.write_bytes

    def write_twice(path: RemotePath, data: bytes, *, only_new: bool = False) -> None:
        write(path, data, only_new=only_new)
        if only_new:
            write(path, data, only_new=True)

    monkeypatch.setattr(RemotePath, "write_bytes", write_twice)
    with hold(folder):
        assert gcs.names(LOCK) == ["00000001"]


def test_holder_notices_that_it_has_lost_the_lock(gcs: Gcs, folder: RemotePath, monkeypatch, caplog) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    renewed, lost = threading.Event(), threading.Event()
    with hold(folder) as held:
        gcs.watched.append((r"POST run/\.lock/00000001$", renewed.set))
        assert renewed.wait(60)
        monkeypatch.setattr(lease.logger, "error", lambda *arguments: lost.set())
        gcs.put(f"{LOCK}00000002", b"{}")
        assert lost.wait(60)
        with pytest.raises(RunDirectoryError, match="'gs://bucket/run' was taken over by another process"):
            held.check()
    assert gcs.read(f"{LOCK}00000002") == b"{}"


def test_renewal_survives_a_failing_store(gcs: Gcs, folder: RemotePath, monkeypatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    renewed = threading.Event()

    def after_the_fault() -> None:
        gcs.watched.append((r"POST run/\.lock/00000001$", renewed.set))

    with hold(folder):
        gcs.faults.append(Fault(r"POST run/\.lock", 403, 1))
        gcs.watched.append((r"POST run/\.lock/00000001$", after_the_fault))
        assert renewed.wait(60)
        assert not [fault for fault in gcs.faults if fault.times]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_damaged_lock_is_free(gcs: Gcs, folder: RemotePath, content: bytes) -> None:
    gcs.put(f"{LOCK}00000001", content)
    with hold(folder, Clock(sleep=lambda seconds: pytest.fail("sleeps"))):
        assert gcs.names(LOCK) == ["00000002"]


def test_store_without_conditional_writes_is_named(caplog, monkeypatch) -> None:
    monkeypatch.setattr(lease, "CONDITIONAL", frozenset())
    folder = RemotePath("memory://bucket/run/.lock")
    with caplog.at_level(logging.WARNING), hold(folder):
        pass
    assert (
        "memory:// is not known to support conditional writes: two runs that start in memory://bucket/run"
        in caplog.text
    )
    remove(folder)
