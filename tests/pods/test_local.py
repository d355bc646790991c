# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Local processes run together: output by process, one failure stops all, and signals are passed on once."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_rl.pods.local import LocalConfig, run_together, training_processes
from tests.tiny_run import TinyRun, set_num_steps

TIMEOUT = 400.0
"""Timeout in seconds, for a busy machine."""
ENDLESS = """
import pathlib, signal, sys, time
def stop(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
pathlib.Path(sys.argv[1]).write_text("")
time.sleep(600)
"""
IGNORING = ENDLESS.replace("sys.exit(0)", "pass").replace("time.sleep(600)", "[time.sleep(1) for _ in range(600)]")


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def run(commands: list[list[str]], stop_timeout: float = TIMEOUT) -> tuple[int, list[str]]:
    lines: list[str] = []
    return run_together(commands, {"X": "x"}, stop_timeout, lines.append), lines


def signal_when(*conditions: Callable[[], bool], send: int = signal.SIGINT) -> None:
    """Send a signal to this process when the first condition holds, another when the second holds, and so on."""

    def wait() -> None:
        deadline = time.monotonic() + TIMEOUT
        for holds in conditions:
            while not holds() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), send)

    threading.Thread(target=wait, daemon=True).start()


def test_lines_are_prefixed_by_process() -> None:
    code = "import os, sys; print('a', os.environ['X'], sys.argv[1]); print('b', file=sys.stderr)"
    status, lines = run([python(code, index) for index in range(3)])
    assert status == 0
    assert sorted(lines) == [text for i in range(3) for text in (f"[{i}] a x {i}\n", f"[{i}] b\n")]


def test_one_failure_stops_all(tmp_path: Path) -> None:
    wait = f"import pathlib, sys, time\nwhile not pathlib.Path({str(tmp_path / 'a')!r}).exists(): time.sleep(.01)\n"
    status, lines = run([python(ENDLESS, tmp_path / "a"), python(f"{wait}sys.exit(3)")])
    assert status == 3
    assert "[launch] process 1 ended with status 3; stopping 0\n" in lines
    assert "[0] got SIGTERM\n" in lines


def test_a_process_that_ignores_the_stop_is_killed(tmp_path: Path) -> None:
    wait = f"import pathlib, os, time\nwhile not pathlib.Path({str(tmp_path / 'a')!r}).exists(): time.sleep(.01)\n"
    status, lines = run([python(IGNORING, tmp_path / "a"), python(f"{wait}os.kill(os.getpid(), 9)")], 0.2)
    assert status == 128 + 9
    assert "[launch] processes 0 did not end within 0.2 s; killing them\n" in lines


def test_a_program_that_keeps_the_output_open_does_not_hide_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "program = subprocess.Popen(['sleep', '3600'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(program.pid))\n"
        "sys.exit(4)"
    )
    monkeypatch.setattr("marin_rl.pods.local.OUTPUT_TIMEOUT", 0.1)
    status, _ = run([python(code, pid), python(ENDLESS, tmp_path / "a")])
    assert status == 4
    os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    signal_when(lambda: all(path.exists() for path in paths), send=number)
    status, lines = run([python(ENDLESS, path) for path in paths])
    assert status == 0
    assert sorted(lines) == [f"[0] got {number.name}\n", f"[1] got {number.name}\n"]


def test_a_second_signal_kills(tmp_path: Path) -> None:
    lines: list[str] = []
    signal_when((tmp_path / "a").exists, lambda: "[0] got SIGINT\n" in lines)
    assert run_together([python(IGNORING, tmp_path / "a")], {}, TIMEOUT, lines.append) == 128 + 9
    # Not because of the timeout.
    assert [line for line in lines if line.startswith("[launch]")] == ["[launch] process 0 ended with status 137\n"]


def test_training_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_force_host_platform_device_count=8")
    (first, second), environment = training_processes(LocalConfig(2, 4), ["--config", "a.yaml"])
    assert environment["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=4"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert first[1:5] == ["-m", "marin_rl.train", "--config", "a.yaml"]
    options = dict(zip(second[5::2], second[6::2], strict=True))
    assert options["--trainer.distributed.process_id"] == "1"
    assert options["--trainer.distributed.num_processes"] == "2"
    assert options["--trainer.distributed.coordinator_address"].startswith("127.0.0.1:")
    assert first[:-1] == second[:-1]
    (alone,), _ = training_processes(LocalConfig(1), [])
    assert alone[1:] == ["-m", "marin_rl.train"]


def process_with(words: list[str]) -> int | None:
    """Process id of a program with some arguments."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if set(words) <= set(file.read_text().split("\0")):
                return int(file.parent.name)
    return None


@pytest.mark.slow
def test_a_run_ends_with_one_of_its_processes_and_resumes_with_another_number(
    new_run: Callable[..., TinyRun],
) -> None:
    run = new_run(num_steps=100_000, warm_start__max_steps=0, evaluation__tasks=0, checkpoint__every=1)
    command = [sys.executable, "-m", "marin_rl.launch", "local", "--num_processes"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [*command, "2", "--", *run.argv], env=environment, stdout=subprocess.PIPE, text=True
    ) as launched:
        deadline = time.monotonic() + 400
        while not (run.path / "metrics.jsonl").exists() or len(run.records()) < 3:
            assert launched.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        other = process_with([*run.argv, "--trainer.distributed.process_id", "1"])
        assert other is not None
        os.kill(other, signal.SIGKILL)
        output, _ = launched.communicate(timeout=400)
    assert launched.returncode == 128 + 9
    assert "[launch] process 1 ended with status 137; stopping 0\n" in output
    last = run.steps()[-1] + 2
    set_num_steps(run, last)

    assert run.train() == 0
    assert [record["step"] for record in run.records()] == list(range(last + 1))
