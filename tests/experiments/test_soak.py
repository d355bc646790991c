# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the soak looks at in the end; that runs survive is tested in tests/faults/test_dead_workers.py."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.soak import (
    FAULTS,
    SETTINGS,
    LiveRun,
    SoakError,
    check_end,
    kill_in_transfer,
    main,
    pause,
    whole_and_once,
)
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
        assert run.named(Path(sys.executable).name) == [child.pid]
        assert run.named("nothing") == []
        assert child.is_alive
        # Another process of the same number is not taken for it.
        assert not child._replace(started="1").is_alive
        seen: list[int] = []

        class Clock:
            @staticmethod
            def sleep(seconds: float) -> None:
                before = counts.stat().st_size
                time.sleep(seconds)
                seen.append(counts.stat().st_size - before)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("experiments.soak.time", Clock)
            pause([child.pid], 0.3)
        # One write may have been under way.
        assert seen[0] <= 1
        stood = counts.stat().st_size
        run.wait_until(lambda: counts.stat().st_size > stood + 3, "more counts")
    finally:
        for left in run.children():
            os.kill(left.pid, 9)
        run.kill()


@pytest.mark.parametrize(
    ("program", "may"),
    [
        ("import os; os.kill(os.getpid(), 9)", True),
        ("print('going on'); print(\"error: Ray's node 12 on this machine has died\"); exit(1)", True),
        ("print('error: a worker has failed'); exit(1)", False),
        ("", False),
    ],
)
def test_a_run_may_end_only_if_it_or_its_ray_was_killed(tmp_path: Path, program: str, may: bool) -> None:
    run = LiveRun((), tmp_path, tmp_path / "output.txt")
    run.output.write_text("going on\nerror: Ray's node 11 on this machine has died\n")
    ended = LiveRun((), tmp_path, run.output, prefix=[sys.executable, "-u", "-c", program])
    ended.start()
    ended.end()
    with contextlib.nullcontext() if may else pytest.raises(SoakError, match=r"the run ended by itself with status \d"):
        check_end(ended)


def test_a_run_that_does_not_end_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    run = LiveRun((), tmp_path, tmp_path / "output.txt", patience=0.1)
    run.output.write_text("waiting for the others")
    run.process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        with pytest.raises(SoakError, match=r"the run did not end in 0.1 s:\nwaiting for the others"):
            run.end()
    finally:
        run.kill()


SENDER = """
import contextlib, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
other_trainer = socket.create_connection(server.getsockname())
to_other_trainer, _ = server.accept()
to_other_trainer.setblocking(False)
with contextlib.suppress(BlockingIOError):
    while sys.argv[2] == "busy":
        to_other_trainer.send(bytes(2**20))
print(server.getsockname()[1], flush=True)
to_receiver, _ = server.accept()
while True:
    to_receiver.sendall(bytes(int(sys.argv[1])))
    time.sleep(0.001)
"""
RECEIVERS_PARENT = """
import subprocess, sys
receiver = "import socket, sys; from_sender = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\\n"
receiver += "while from_sender.recv(2**20): pass"
subprocess.run(["ray::Worker", "-c", receiver, sys.argv[1]], executable=sys.executable)
"""


@pytest.mark.parametrize(
    ("size", "others", "is_caught"), [(2**24, "idle", True), (100, "idle", False), (100, "busy", False)]
)
def test_a_sender_is_killed_only_while_the_receiver_has_not_all(
    tmp_path: Path, size: int, others: str, is_caught: bool
) -> None:
    sender, main = (LiveRun((), tmp_path, tmp_path / name, patience=60.0) for name in ("sender.txt", "main.txt"))
    main.output.write_text("")
    with sender.output.open("w") as said:
        sender.process = subprocess.Popen([sys.executable, "-c", SENDER, str(size), others], stdout=said)
    try:
        sender.wait_until(lambda: sender.output.read_text() != "", "a port")
        port = sender.output.read_text().strip()
        main.process = subprocess.Popen([sys.executable, "-c", RECEIVERS_PARENT, port])
        main.wait_until(lambda: main.named("ray::Worker") != [], "a receiver")
        if is_caught:
            kill_in_transfer(sender, main)
        else:
            with pytest.raises(SoakError, match="a transfer of weights did not come in 1 s"):
                kill_in_transfer(dataclasses.replace(sender, patience=1.0), main)
        assert sender.is_running != is_caught
        sender.kill()
        # The receiver was not left standing still: it reads to the end of what had come, and ends.
        assert main.end() == 0
    finally:
        for run in (sender, main):
            for left in run.children() if run.process is not None else ():
                os.kill(left.pid, 9)
            run.kill()


def test_every_fault_needs_a_run_and_a_new_folder(tmp_path: Path) -> None:
    assert len(FAULTS) == 8
    assert json.loads(json.dumps(SETTINGS))["workers.silence"] > 0
    with pytest.raises(FileExistsError):
        main(["--faults", "1", "--folder", str(tmp_path)])
