# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from marin_rl.rewards.sandbox import worker_process
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.protocol import WorkerSpec
from marin_rl.rewards.sandbox.worker_process import WorkerLostError, WorkerProcess

SPEC = WorkerSpec(
    file=None,
    scratch="",
    read=(),
    python_path=(),
    hidden_path=(),
    has_namespaces=False,
    landlock=0,
    seccomp=False,
    start_seconds=60.0,
    limits=SandboxConfig().limits(),
)
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
