# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Workers that fail, and the results and failures of calls, which hostile processes may have written."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.sandbox import worker_process
from marin_rl.rewards.sandbox.config import SandboxConfig, worker_spec
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.worker_process import (
    WorkerLostError,
    WorkerProcess,
    answers_of_calls,
    failure_of,
    validated,
)
from marin_rl.types import RewardFailure

CONFIG = SandboxConfig()
SPEC = worker_spec(None, CONFIG, Isolation.NONE, landlock=0)
BEGAN = "sys.stdout.buffer.write(b'\\0\\0\\0\\x0f{\"began\": true}'); sys.stdout.flush()\n"


def ask(program: str, seconds: float, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> WorkerLostError:
    """Return the error of a request to a worker that runs `program` when it receives the request."""
    command = [sys.executable, "-I", "-S", "-c", "import sys\nsys.stdin.buffer.read(4)\n" + program]
    monkeypatch.setattr(worker_process, "worker_command", lambda spec, bubblewrap: command)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    async def run() -> WorkerLostError:
        worker = await WorkerProcess.start(SPEC, b"", None)
        assert len(list(scratch.iterdir())) == 1
        with pytest.raises(WorkerLostError) as raised:
            await worker.ask({"kind": "load"}, seconds)
        assert not worker.is_usable
        assert not worker.is_loaded
        return raised.value

    error = asyncio.run(run())
    assert list(scratch.iterdir()) == []
    return error


@pytest.mark.parametrize(
    ("program", "message", "began"),
    [
        ("sys.exit(3)", "the worker died: it exited with status 3", False),
        ("sys.exit('no room left')", "the worker died: no room left", False),
        (BEGAN + "sys.exit('too late')", "the worker died: too late", True),
        (BEGAN + "sys.stdout.buffer.write(b'\\0\\0\\0\\5half')", "the worker died: it exited with status 0", True),
        ("sys.stderr.write('who am I\\n'); sys.stdout.buffer.write(b'\\0\\0\\0\\3abc')", "died: who am I", False),
        ("sys.stderr.write('x' * 5000 + 'the end'); sys.exit(1)", r"died: x{993}the end$", False),
    ],
    ids=["without a word", "with a word", "after it began", "in mid-answer", "nonsense", "many words"],
)
def test_failed_worker_reports_its_stderr(
    program: str, message: str, began: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    error = ask(program, 60.0, monkeypatch, tmp_path)
    assert error.began is began
    with pytest.raises(WorkerLostError, match=message):
        raise error


def test_silent_worker_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    error = ask("sys.stdin.buffer.read()", 0.2, monkeypatch, tmp_path)
    assert str(error) == "the worker did not answer within 0.2 s"
    assert not error.began


def test_worker_with_a_pending_answer_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    command = [sys.executable, "-I", "-S", "-c", "import sys\n" + ignores + BEGAN + "sys.stdin.buffer.read()"]
    monkeypatch.setattr(worker_process, "worker_command", lambda spec, bubblewrap: command)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def run() -> None:
        worker = await WorkerProcess.start(SPEC, b"", None)
        ending = asyncio.Event()

        async def end_once_it_was_cancelled() -> None:
            ending.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(worker, "end", end_once_it_was_cancelled)
            request = asyncio.create_task(worker.ask({"kind": "load"}, 60.0))
            await asyncio.sleep(0)
            request.cancel()
            await ending.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        assert not worker.is_usable
        await worker.end()

    monkeypatch.setattr(worker_process, "END_SECONDS", 0.1)
    asyncio.run(run())


def ended(program: str) -> int:
    """Return the kernel's exit status of a process that runs a program."""
    code = f"import os, signal\n{program}"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", code], os.environ)
    return os.waitpid(pid, 0)[1]


def killed(number: int) -> str:
    reset = "" if number == signal.SIGKILL else f"signal.signal({number}, signal.SIG_DFL)\n"
    return f"{reset}os.kill(os.getpid(), {number})"


@pytest.mark.parametrize(
    ("program", "changes", "cause", "detail"),
    [
        ("pass", {}, None, ""),
        (killed(signal.SIGXCPU), {"cpu": 10.0}, RewardFailure.CPU, "sandbox.cpu_seconds"),
        (killed(signal.SIGKILL), {"cpu": 11.0}, RewardFailure.CPU, "sandbox.cpu_seconds"),
        (killed(signal.SIGKILL), {}, RewardFailure.SIGNAL, "SIGKILL"),
        (killed(signal.SIGXFSZ), {}, RewardFailure.FILE_SIZE, "sandbox.file_mb"),
        (killed(signal.SIGTERM), {}, RewardFailure.SIGNAL, "SIGTERM"),
        (killed(signal.SIGRTMIN + 1), {}, RewardFailure.SIGNAL, f"signal {signal.SIGRTMIN + 1}"),
        ("os._exit(3)", {}, RewardFailure.EXITED, "status 3: said"),
        ("os._exit(0)", {"confined": False}, RewardFailure.WORKER, "could not be confined and was not run: said"),
        ("os._exit(1)", {"confined": False}, RewardFailure.WORKER, "could not be confined and was not run: said"),
        # A limit that the worker enforces takes precedence over the exit status.
        (killed(signal.SIGKILL), {"violation": "timeout"}, RewardFailure.TIMEOUT, "no answer within 10 s"),
        (killed(signal.SIGKILL), {"violation": "output"}, RewardFailure.OUTPUT, "over 1024 KiB"),
        (killed(signal.SIGKILL), {"violation": "processes"}, RewardFailure.PROCESSES, "over 0 processes"),
        ("pass", {"violation": "file_size"}, RewardFailure.FILE_SIZE, "over 16 MiB"),
        ("pass", {"status": None}, RewardFailure.WORKER, "the forkserver of the loaded file died"),
    ],
)
def test_failure_of_a_call(program: str, changes: dict[str, Any], cause: RewardFailure | None, detail: str):
    report = {"status": ended(program), "violation": None, "cpu": 0.1, "confined": True, "stderr": "said", **changes}
    failure = failure_of(report, CONFIG)
    assert (None if failure is None else failure.cause) is cause
    assert failure is None or detail in failure.detail


GOOD = '{"results": [{"score": 1}]}'


@pytest.mark.parametrize("answers", [[], [GOOD], [GOOD, '{"raised": "ValueError: no"}', "nonsense"]])
def test_answers_of_calls(answers: list[str]):
    assert answers_of_calls(json.dumps(answers), 3) == answers


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", GOOD, "[1]", "[null]", '["a", ["b"]]', '["a"] ["b"]', "[" * 10**5, json.dumps([GOOD] * 4)],
)
def test_invalid_answers_of_calls(text: str):
    with pytest.raises(RewardCallError, match=r"instead of a list of answers|sent 4 answers of 3 calls") as raised:
        answers_of_calls(text, 3)
    assert raised.value.cause is RewardFailure.INVALID_ANSWER


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("", RewardFailure.EXITED),
        ("nonsense", RewardFailure.INVALID_ANSWER),
        ('{"raised": "ValueError: no"}', RewardFailure.RAISED),
        ('{"invalid": "returned nan"}', RewardFailure.INVALID_ANSWER),
        ('{"memory": true}', RewardFailure.MEMORY),
        (f"{GOOD}\n{GOOD}", RewardFailure.INVALID_ANSWER),
    ],
)
def test_answer_of_a_call(answer: str, cause: RewardFailure):
    assert validated(GOOD, 1, CONFIG) == [EvaluateResult(score=1.0)]
    with pytest.raises(RewardCallError) as raised:
        validated(answer, 1, CONFIG)
    assert raised.value.cause is cause
