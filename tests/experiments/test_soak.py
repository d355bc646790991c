# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the soak looks at in the end; that runs survive is tested in tests/faults/test_dead_workers.py."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import marin_rl
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
from experiments.soak_train import hold_transfers, reached
from experiments.soak_usage import usage
from marin_rl.distributed.weights.arrow_flight import FlightSource
from marin_rl.distributed.weights.manifest import ServerLostError
from tests.distributed.weights.endpoints import SECRET
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
    with pytest.raises(SoakError, match=f"^failed checks: {wrong}; 6 steps, 24 groups"):
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


def test_transfer_is_held_between_two_chunks_and_its_server_killed(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    run = LiveRun((), tmp_path, tmp_path / "output.txt", patience=600.0, hold=hold)
    run.output.touch()
    hold_transfers(hold, 2)
    command = [sys.executable, str(Path(__file__).with_name("held_server.py")), str(hold), SECRET]
    environment = {**os.environ, "PYTHONPATH": str(Path(marin_rl.__file__).parents[1])}
    run.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert run.process.stdout is not None
    try:
        with run.process.stdout as printed:
            address = printed.readline().decode().strip()
        source = FlightSource(address, SECRET, streams=1)
        one, two = (source.manifest(version) for version in (1, 2))
        assert len(list(source.fetch(one, one.chunks(0)))) == 4
        assert not reached(hold).exists()
        # There is nothing between a first chunk and a second.
        assert len(list(source.fetch(two, two.chunks(0)[:1]))) == 1
        assert not reached(hold).exists()
        stream = source.fetch(two, two.chunks(0))
        assert (next(stream) == 2).all()
        kill_in_transfer(run)
        with pytest.raises(ServerLostError):
            next(stream)
        assert not hold.exists()
    finally:
        run.kill()


def test_memory_files_and_temporary_files_are_measured(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "log").write_bytes(b"x" * 2**20)
    program = "import time; held = [open('/dev/null') for _ in range(50)]; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        children = {worker.pid: "ray::Worker.run", 2**22 + 1: "ended"}
        measured = usage(os.getpid(), children, tmp_path)
        worker.kill()
    assert measured["workers_mib"] > 1
    assert measured["trainer_mib"] > measured["workers_mib"]
    assert measured["files"] > 50
    assert measured["coordinator_mib"] == measured["ray_mib"] == 0
    assert measured["temporary_files"] == 2
    assert measured["temporary_mib"] >= 1


def test_every_fault_needs_a_run_and_a_new_folder(tmp_path: Path) -> None:
    assert len(FAULTS) == 8
    assert json.loads(json.dumps(SETTINGS))["workers.heartbeat_timeout"] > 0
    with pytest.raises(FileExistsError):
        main(["--faults", "1", "--folder", str(tmp_path)])
