# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_rl.runs import lock as lock_module
from marin_rl.runs.lock import LEASE_SECONDS, hold, holder, lock
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.retry import Clock
from marin_rl.utils.storage import StoragePath
from tests.gcs_emulator import Fault, Gcs

LOCK = "run/.lock/"
AWAKE = Clock(sleep=lambda seconds: pytest.fail("sleeps"))
OWN = f"process {os.getpid()} on {socket.gethostname()}"


@pytest.fixture
def folder(gcs: Gcs) -> RemotePath:
    return RemotePath("gs://bucket/run/.lock")


@pytest.fixture(params=["local", "store"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    if request.param == "local":
        return RunDirectory(tmp_path / "runs" / "a")
    request.getfixturevalue("gcs")
    return RunDirectory(RemotePath("gs://bucket/runs/a"))


def content_of(pid: int, beats: int = 0) -> str:
    """The lock of a process on another machine."""
    return json.dumps({"pid": pid, "started": "1", "host": "far", "machine": "other", "name": "n", "beats": beats})


def clock(at: Callable[[float], object] = lambda now: None) -> Clock:
    """A clock that sleeps in no time, and calls a function with the new time after every sleep."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        at(now)

    return Clock(lambda: now, sleep)


def test_a_second_process_is_refused_until_the_end_of_the_block(directory: RunDirectory) -> None:
    assert holder(directory, AWAKE) is None
    for _ in range(2):
        with lock(directory) as locked:
            assert locked == directory
            assert holder(directory, AWAKE) == OWN
            # A failed attempt does not release the lock.
            for _ in range(2):
                with pytest.raises(RunDirectoryError) as raised, lock(directory):
                    pass
            assert str(raised.value) == (
                f"run directory {str(directory.path)!r} is in use by {OWN}; wait for it to end, stop it, or choose "
                "another run_dir"
            )
        assert holder(directory, AWAKE) is None
    with pytest.raises(FileNotFoundError), lock(directory):
        directory.metrics.read_bytes()


KILLED = """
import os, sys
from marin_rl.runs.lock import lock
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.utils.storage import storage_path
with lock(RunDirectory(storage_path(sys.argv[1]))):
    print("locked", flush=True)
    if sys.stdin.read() == "exit":
        os._exit(9)
"""


def test_lock_of_a_process_that_was_killed_on_this_machine_is_free_at_once(directory: RunDirectory) -> None:
    command = [sys.executable, "-c", KILLED, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid} on "), lock(directory):
            pass
        process.communicate("exit")
    assert process.returncode == 9
    assert holder(directory, AWAKE) is None
    with lock(directory):
        pass


@pytest.mark.parametrize("way", ["relative", "link", "dots", "mount"])
def test_another_way_to_a_locked_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "mount").mkdir()
    monkeypatch.chdir(tmp_path)
    path = {"relative": "run", "dots": "link/../run"}.get(way, way)
    command = [sys.executable, "-c", KILLED, path]
    if way == "mount":
        if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
            pytest.skip("no namespaces for mounts here")
        command = ["unshare", "-rm", "sh", "-c", 'mount --bind run mount && exec "$@"', "sh", *command]
    with lock(RunDirectory(tmp_path / "run")):
        said = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert said.stdout == ""
    assert f"run directory {path!r} is in use by {OWN}" in said.stderr


# In an object store.


@pytest.mark.parametrize(
    ("change", "is_alive", "seconds"),
    [
        (lambda now: content_of(7), False, LEASE_SECONDS),
        (lambda now: content_of(7, beats=int(now > 14)), True, 15),
        (lambda now: '{"released": true}', False, 1),
    ],
    ids=["silent", "renewed", "released"],
)
def test_lock_on_another_machine_is_taken_when_it_is_released_or_not_renewed(
    gcs: Gcs, folder: RemotePath, change: Callable[[float], str], is_alive: bool, seconds: float
) -> None:
    times: list[float] = []

    def at(now: float) -> None:
        times.append(now)
        (folder / "00000003").write_text(change(now))

    (folder / "00000003").write_text(content_of(7))
    assert holder(RunDirectory(folder.parent), clock(at)) == ("process 7 on far" if is_alive else None)
    assert seconds <= times[-1] <= seconds + 2
    assert gcs.names(LOCK) == ["00000003"]
    (folder / "00000003").write_text(content_of(7))
    if is_alive:
        with pytest.raises(RunDirectoryError, match="is in use by process 7 on far; wait for it to end"):
            hold(folder, clock(at)).__enter__()
        assert gcs.names(LOCK) == ["00000003"]
    else:
        with hold(folder, clock(at)):
            assert gcs.names(LOCK) == ["00000004"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_damaged_lock_is_free(gcs: Gcs, folder: RemotePath, content: bytes) -> None:
    gcs.put(f"{LOCK}00000001", content)
    with hold(folder, AWAKE):
        assert gcs.names(LOCK) == ["00000002"]


def test_a_former_lock_that_cannot_be_deleted_is_left(gcs: Gcs, folder: RemotePath) -> None:
    (folder / "00000003").write_text('{"released": true}')
    gcs.faults.append(Fault(r"DELETE run/\.lock/00000003", 403))
    with hold(folder, AWAKE) as lease:
        lease.check()
        assert gcs.names(LOCK) == ["00000003", "00000004"]


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("is_released", [False, True])
def test_one_of_two_processes_takes_over_a_dead_lock(
    gcs: Gcs, folder: RemotePath, number: int, is_released: bool
) -> None:
    """The other one is faster: it creates number 4, or takes and deletes 4 for a third one that creates 5."""
    (folder / "00000003").write_text(content_of(7))
    newest = f"{LOCK}{number:08d}"

    def others() -> None:
        del gcs.objects[f"{LOCK}00000003"]
        gcs.put(newest, b'{"released": true}' if is_released else content_of(8).encode())

    def at(now: float) -> None:
        if newest in gcs.objects:
            gcs.put(newest, content_of(8, beats=1).encode())

    gcs.watched.append((r"POST run/\.lock/00000004", others))
    if is_released:
        with hold(folder, clock()):
            assert gcs.names(LOCK) == [f"{number + 1:08d}"]
    else:
        with pytest.raises(RunDirectoryError, match="is in use by process 8 on far"):
            hold(folder, clock(at)).__enter__()
        assert gcs.names(LOCK) == [f"{number:08d}"]


def test_lost_answer_to_the_creation_is_no_other_process(gcs: Gcs, folder: RemotePath, monkeypatch) -> None:
    write = RemotePath.write_bytes

    def write_twice(path: RemotePath, data: bytes, *, only_new: bool = False) -> None:
        write(path, data, only_new=only_new)
        if only_new:
            write(path, data, only_new=True)

    monkeypatch.setattr(RemotePath, "write_bytes", write_twice)
    with hold(folder):
        assert gcs.names(LOCK) == ["00000001"]


def test_a_process_that_has_lost_its_lock_changes_nothing(
    gcs: Gcs, folder: RemotePath, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lock_module, "CHECK_SECONDS", 0.0)
    (tmp_path / "file").write_text("new")
    changes: list[Callable[[StoragePath], object]] = [
        lambda path: path.write_bytes(b"new"),
        lambda path: path.write_text("new"),
        lambda path: path.unlink(),
        lambda path: path.upload(tmp_path / "file"),  # pyrefly: ignore
    ]
    with lock(RunDirectory(folder.parent)) as locked:
        (locked.rollouts / "file").write_text("old")
        (listed,) = locked.rollouts.iterdir()
        path = listed.parent / "file"
        gcs.put(f"{LOCK}00000002", b"{}")
        for change in changes:
            with pytest.raises(RunDirectoryError, match="'gs://bucket/run' was taken over by another process"):
                change(path)
        assert path.read_text() == "old"
    assert gcs.read(f"{LOCK}00000002") == b"{}"
    assert "released" not in gcs.read(f"{LOCK}00000001").decode()


def test_a_check_counts_for_a_second(gcs: Gcs, folder: RemotePath, monkeypatch) -> None:
    now = [5.0]
    with hold(folder) as lease:
        monkeypatch.setattr(lock_module.time, "clock_gettime", lambda clock: now[0])
        lease.check()
        gcs.put(f"{LOCK}00000002", b"{}")
        now[0] += 0.9
        lease.check()
        now[0] += 0.1
        for _ in range(2):
            with pytest.raises(RunDirectoryError, match="taken over"):
                lease.check()


def test_renewal_survives_a_failing_store_and_ends_with_the_lock(
    gcs: Gcs, folder: RemotePath, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lock_module, "CHECK_SECONDS", 0.0)
    renewed, lost = threading.Event(), threading.Event()
    with hold(folder):
        gcs.watched.append((r"POST run/\.lock/00000001$", renewed.set))
        gcs.faults.append(Fault(r"POST run/\.lock", 403, 1))
        assert renewed.wait(60)
        renewed.clear()
        gcs.watched.append((r"POST run/\.lock/00000001$", renewed.set))
        assert renewed.wait(60)
        monkeypatch.setattr(lock_module.logger, "error", lambda *arguments: lost.set())
        gcs.put(f"{LOCK}00000002", b"{}")
        assert lost.wait(60)
