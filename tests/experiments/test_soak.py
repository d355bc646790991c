# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the soak looks at in the end; that runs survive is tested in tests/faults/test_dead_workers.py."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.soak import FAULTS, SETTINGS, LiveRun, SoakError, kill_in_transfer, main, pause, whole_and_once
from tests.tiny_run import TinyRun, copy_of


def ended(run: TinyRun) -> LiveRun:
    return LiveRun(run.argv, run.path, run.path.parent / "output.txt")


def test_a_run_of_whole_groups_is_right(finished_run: TinyRun) -> None:
    assert whole_and_once(ended(finished_run), groups=4, members=4, staleness=0) == 6
    assert ended(finished_run).steps == 6
    assert ended(finished_run).saved_steps == 6


@pytest.mark.parametrize(
    ("expected", "wrong"),
    [
        ({"groups": 5, "members": 4, "staleness": 0}, "groups of every step"),
        ({"groups": 4, "members": 3, "staleness": 0}, "each whole"),
        ({"groups": 4, "members": 4, "staleness": -1}, "none too old"),
    ],
)
def test_what_is_wrong_is_named(finished_run: TinyRun, expected: dict[str, int], wrong: str) -> None:
    with pytest.raises(SoakError, match=f"^not so: {wrong}; 6 steps, 24 groups"):
        whole_and_once(ended(finished_run), **expected)


def test_a_lost_step_and_a_group_of_two_steps_are_seen(finished_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "copy")
    lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text("".join([*lines[:3], *lines[4:]]))
    with pytest.raises(SoakError, match="steps in order"):
        whole_and_once(ended(run), groups=4, members=4, staleness=0)
    (run.path / "rollouts" / "step-00000003.parquet").unlink()
    with pytest.raises(SoakError, match="steps in order; 5 steps, 20 groups"):
        whole_and_once(ended(run), groups=4, members=4, staleness=0)


def test_a_line_that_is_being_written_is_not_read(finished_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "copy")
    with (run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 7, "workers/al')
    assert ended(run).records() == finished_run.records()
    assert ended(run).steps == 6


def test_a_run_that_ends_or_hangs_is_an_error_with_its_output(tmp_path: Path) -> None:
    run = LiveRun(["--config", str(tmp_path / "missing.yaml")], tmp_path, tmp_path / "output.txt")
    run.start()
    with pytest.raises(SoakError, match=r"the run ended before the first step:\n[^$]*missing\.yaml"):
        run.wait_until(lambda: run.steps >= 1, "the first step")
    slow = LiveRun((), tmp_path, tmp_path / "output.txt", patience=0.1)
    slow.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert slow.is_running
    with pytest.raises(SoakError, match=r"the first step did not come in 0\.1 s"):
        slow.wait_until(lambda: slow.steps >= 1, "the first step")
    slow.kill()
    assert not slow.is_running


def test_processes_are_found_by_name_and_stand_still(tmp_path: Path) -> None:
    # A process that starts another, which counts.
    counts = tmp_path / "counts"
    inner = f"import time\nwhile True:\n    open({str(counts)!r}, 'a').write('x')\n    time.sleep(0.01)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    run = LiveRun((), tmp_path, tmp_path / "output.txt")
    run.process = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)
    try:
        run.wait_until(lambda: counts.exists() and counts.stat().st_size > 3, "a count")
        (child,) = run.children()
        assert run.named(Path(sys.executable).name) == [child]
        assert run.named("nothing") == []
        seen: list[int] = []

        class Clock:
            @staticmethod
            def sleep(seconds: float) -> None:
                before = counts.stat().st_size
                time.sleep(seconds)
                seen.append(counts.stat().st_size - before)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("experiments.soak.time", Clock)
            pause([child], 0.3)
        # One write may have been under way.
        assert seen[0] <= 1
        stood = counts.stat().st_size
        run.wait_until(lambda: counts.stat().st_size > stood + 3, "more counts")
    finally:
        for pid in run.children():
            os.kill(pid, 9)
        run.kill()


SENDER = """
import socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", 0))
receiver = "import socket, sys; from_sender = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\\n"
receiver += "while from_sender.recv(2**20): pass"
subprocess.Popen(["ray::Worker", "-c", receiver, str(server.getsockname()[1])], executable=sys.executable)
to_receiver, _ = server.accept()
while True:
    to_receiver.sendall(bytes(int(sys.argv[1])))
    time.sleep(0.001)
"""


@pytest.mark.parametrize(("size", "is_caught"), [(2**24, True), (100, False)])
def test_a_sender_is_killed_only_while_the_receiver_has_not_all(tmp_path: Path, size: int, is_caught: bool) -> None:
    run = LiveRun((), tmp_path, tmp_path / "output.txt", patience=60.0 if is_caught else 1.0)
    run.output.write_text("")
    run.process = subprocess.Popen([sys.executable, "-c", SENDER, str(size)], start_new_session=True)
    try:
        run.wait_until(lambda: run.named("ray::Worker") != [], "a receiver")
        (receiver,) = run.named("ray::Worker")
        if is_caught:
            kill_in_transfer(run)
        else:
            with pytest.raises(SoakError, match="a transfer of weights did not come in 1 s"):
                kill_in_transfer(run)
        assert run.is_running != is_caught
    finally:
        run.kill()
    # It was not left standing still: it reads to the end of what had come, and ends.
    deadline = time.monotonic() + 60
    while Path(f"/proc/{receiver}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_fault_needs_a_run_and_a_new_folder(tmp_path: Path) -> None:
    assert len(FAULTS) == 8
    assert json.loads(json.dumps(SETTINGS))["workers.silence"] > 0
    with pytest.raises(FileExistsError):
        main(["--faults", "1", "--folder", str(tmp_path)])
