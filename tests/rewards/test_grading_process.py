# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from marin_rl.rewards import grading_process
from marin_rl.rewards.grading_process import NoAnswerError, ask
from marin_rl.rewards.sandbox.processes import list_descendants
from marin_rl.rewards.sandbox.seccomp import seccomp_is_supported

BEHAVIORS = "tests.rewards.fake_graders:open_behaviors"


def do(behavior: str, cpu_seconds: float = 5.0, **arguments):
    return ask(BEHAVIORS, {"do": behavior, **arguments}, cpu_seconds)


@pytest.mark.parametrize("text", ["", "46", "a\nb\r\0\u2028", "\ud800", "é" * 100_000])
def test_texts_are_exact(text: str):
    assert do("echo", text=text) == text


def test_a_process_inherits_no_secrets(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    environment = ask("tests.rewards.fake_graders:open_environment", {}, 5.0)
    assert "JUDGE_KEY" not in environment
    assert environment["PATH"] == os.environ["PATH"]


def test_printing_does_not_change_the_answer(capfd):
    assert do("print_and_echo", text="46") == "46"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("behavior", "cpu_seconds", "message"),
    [
        ("compute_without_end", 0.1, "more than 0.1 s of CPU time"),
        ("sleep_without_end", 0.1, "no answer within 1 s"),
        ("ignore_signals", 0.1, "no answer within 1 s"),
        ("use_much_memory", 60.0, "MemoryError"),
        ("recurse", 60.0, "RecursionError"),
        ("exit_with_status", 60.0, "SystemExit: 0"),
        ("end_process", 60.0, "the process ended"),
        ("answer_at_length", 60.0, "a long answer"),
        ("read_input", 60.0, "EOFError"),
    ],
)
def test_a_function_without_an_answer_does_not_affect_the_next(
    monkeypatch, behavior: str, cpu_seconds: float, message: str
):
    monkeypatch.setattr(grading_process, "WALL_FACTOR", 10.0)
    with pytest.raises(NoAnswerError, match=message):
        do(behavior, cpu_seconds)
    assert do("echo", text="46") == "46"


def test_the_length_of_a_request_is_limited(monkeypatch):
    monkeypatch.setattr(grading_process, "MAX_BYTES", 1000)
    with pytest.raises(NoAnswerError, match="longer than the limit of 1000"):
        do("echo", text="x" * 1000)


@pytest.mark.skipif(not seccomp_is_supported(), reason="needs seccomp")
@pytest.mark.parametrize(
    "behavior", ["write_file", "remove_file", "start_program", "signal_trainer", "open_connection"]
)
def test_a_process_changes_nothing_outside(tmp_path, behavior: str):
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(NoAnswerError, match=r"Permission|EFBIG|File too large|not permitted"):
        do(behavior, **({"path": str(path)} if "file" in behavior else {}))
    assert path.read_text() == "kept" or behavior == "write_file"


def test_a_grader_that_cannot_start_is_named():
    with pytest.raises(RuntimeError, match="fake_graders:open_broken did not start: ImportError: no such package"):
        ask("tests.rewards.fake_graders:open_broken", {}, 1.0)


@pytest.mark.parametrize("failing", ["subprocess.Popen", "socket.socketpair"])
def test_a_machine_that_starts_no_process_is_an_error_and_not_a_grade(monkeypatch, failing: str):
    def refuse(*arguments, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    grading_process._pool.cache_clear()
    monkeypatch.setattr(failing, refuse)
    with pytest.raises(RuntimeError, match=r"cannot start a process for .* Resource temporarily unavailable; raise"):
        do("echo", text="46")
    monkeypatch.undo()
    assert do("echo", text="46") == "46"


def test_requests_of_many_threads_are_not_mixed_up():
    texts = [str(number) for number in range(50)]
    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        assert list(threads.map(lambda text: do("echo", text=text), texts)) == texts


def test_an_interrupt_does_not_shift_the_answers(monkeypatch):
    exchange = grading_process._exchange

    def interrupted(connection, request: bytes, deadline: float) -> bytes:
        connection.sendall(request)
        raise KeyboardInterrupt

    assert do("echo", text="46") == "46"
    with monkeypatch.context() as patched:
        patched.setattr(grading_process, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            do("echo", text="46")
    assert grading_process._exchange is exchange
    assert do("echo", text="47") == "47"


def test_a_stopped_process_delays_no_other_text():
    process = do("process_id")
    os.kill(process, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(do, "echo", 600.0, text="46") for _ in range(2)]
        # One of them waits for the stopped process.
        done, rest = concurrent.futures.wait(waiting, 600, concurrent.futures.FIRST_COMPLETED)
        assert len(done) == len(rest) == 1
        os.kill(process, signal.SIGCONT)
        assert [one.result() for one in waiting] == ["46", "46"]


def test_a_process_that_ended_between_texts_is_replaced():
    process = do("process_id")
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    assert do("process_id") != process


TRAINER = f"""
import signal, threading
from marin_rl.rewards.grading_process import ask
signal.signal(signal.SIGTERM, signal.default_int_handler)
ask({BEHAVIORS!r}, {{"do": "echo", "text": ""}}, 5.0)
threading.Thread(target=ask, args=({BEHAVIORS!r}, {{"do": "sleep_without_end"}}, 1e6), daemon=True).start()
print("ready", flush=True)
ask({BEHAVIORS!r}, {{"do": "ignore_signals"}}, 1e6)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_trainer(number: signal.Signals):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert trainer.stdout is not None
    with trainer.stdout as printed:
        assert printed.readline() == b"ready\n"
    processes: list[int] = []
    while len(processes) < 2:
        processes = list_descendants(trainer.pid)
        time.sleep(0.01)
    trainer.send_signal(number)
    assert trainer.wait(timeout=60) != 0
    deadline = time.monotonic() + 60
    while any(_is_alive(process) for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


KILLED_BEFORE_ANSWER = f"""
import os, select, signal
from marin_rl.rewards import grading_process

def exchange(connection, request, deadline):
    connection.sendall(request)
    select.select([connection], [], [])
    os.kill(os.getpid(), signal.SIGKILL)

print(grading_process.ask({BEHAVIORS!r}, {{"do": "process_id"}}, 5.0), flush=True)
grading_process._exchange = exchange
grading_process.ask({BEHAVIORS!r}, {{"do": "echo", "text": "46"}}, 5.0)
"""


def test_processes_end_with_a_trainer_that_has_not_read_an_answer():
    trainer = subprocess.run([sys.executable, "-c", KILLED_BEFORE_ANSWER], stdout=subprocess.PIPE, timeout=600)
    assert trainer.returncode == -signal.SIGKILL
    process = int(trainer.stdout)
    deadline = time.monotonic() + 60
    try:
        while _is_alive(process):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
