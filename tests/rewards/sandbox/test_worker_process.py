# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.functions import RewardFailure
from marin_rl.rewards.sandbox import worker_process
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.protocol import WorkerSpec
from marin_rl.rewards.sandbox.worker_process import (
    PACKAGE_ROOT,
    WorkerLostError,
    WorkerProcess,
    code_path,
    failure_of,
    worker_command,
    worker_environment,
    worker_spec,
)


def spec_of(file: str | None, level: Isolation = Isolation.FULL, **settings: Any) -> WorkerSpec:
    return worker_spec(file, SandboxConfig(**settings), level, landlock=0)


def test_folder_of_file_is_readable_except_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert code_path(str(home / "project" / "rewards.py")) == str(home / "project")
    assert code_path(str(home / "rewards.py")) == str(home / "rewards.py")
    assert code_path(str(tmp_path / "rewards.py")) == str(tmp_path / "rewards.py")
    assert code_path("/rewards.py") == "/rewards.py"


def test_python_and_file_are_readable_and_home_is_not(tmp_path: Path):
    file = tmp_path / "rewards.py"
    file.touch()
    readable = [Path(path) for path in spec_of(str(file)).read]
    for needed in (Path(sys.executable).resolve(), Path(os.__file__).resolve(), file):
        assert any(needed.is_relative_to(path.resolve()) for path in readable), needed
    for private in (Path.home(), Path("/etc/passwd"), Path("/"), Path(PACKAGE_ROOT) / "tests"):
        assert not any(private.is_relative_to(path) for path in readable), private
    assert all(path.exists() for path in readable)


def test_programs_cannot_read_this_package_and_read_paths(tmp_path: Path):
    paths = (str(tmp_path), __file__)
    programs, functions = spec_of(None, read_paths=paths), spec_of("/x/rewards.py", read_paths=paths)
    assert not any(path.startswith((PACKAGE_ROOT + "/marin_rl", *paths)) for path in programs.read)
    assert programs.python_path == ()
    assert {PACKAGE_ROOT + "/marin_rl", *paths} < set(functions.read)
    assert functions.python_path == (PACKAGE_ROOT, str(tmp_path))


def test_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "1")
    assert "SECRET_KEY" not in worker_environment("/tmp")
    spec = spec_of("/x/rewards.py", file_mb=1)
    command = worker_command(spec, "/usr/bin/bwrap")
    for argument in ("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"):
        assert argument in command
    # Only file systems in memory with a size limit are writable.
    assert "--bind" not in command
    for index, argument in enumerate(command):
        if argument == "--tmpfs":
            assert command[index - 2 : index] == ["--size", str(4 * 2**20)]
    assert worker_command(spec, None)[0] == sys.executable


SPEC = spec_of(None, Isolation.NONE)
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


def report(status: int | None = 0, violation: str | None = None, cpu: float = 0.0) -> dict[str, Any]:
    streams = {"stderr": "said", "stdout": "", "answer": ""}
    return {"status": status, "violation": violation, "cpu": cpu, "confined": True, **streams}


def test_successful_call_has_no_failure():
    assert failure_of(report(ended("pass")), 10.0) is None


@pytest.mark.parametrize(
    ("program", "cpu", "cause", "detail"),
    [
        (killed(signal.SIGXCPU), 10.0, RewardFailure.CPU, "cpu_seconds"),
        (killed(signal.SIGKILL), 11.0, RewardFailure.CPU, "cpu_seconds"),
        (killed(signal.SIGKILL), 0.1, RewardFailure.SIGNAL, "SIGKILL"),
        (killed(signal.SIGXFSZ), 0.1, RewardFailure.FILE_SIZE, "file_mb"),
        (killed(signal.SIGTERM), 0.1, RewardFailure.SIGNAL, "SIGTERM"),
        (killed(signal.SIGRTMIN + 1), 0.1, RewardFailure.SIGNAL, f"signal {signal.SIGRTMIN + 1}"),
        ("os._exit(3)", 0.1, RewardFailure.EXITED, "status 3: said"),
    ],
)
def test_failure_of_exit_status(program: str, cpu: float, cause: RewardFailure, detail: str):
    failure = failure_of(report(ended(program), cpu=cpu), 10.0)
    assert failure is not None
    assert failure.cause is cause
    assert detail in failure.detail


@pytest.mark.parametrize("status", [0, 1])
def test_unconfined_call_is_a_worker_failure(status: int):
    failure = failure_of(report(ended(f"os._exit({status})")) | {"confined": False}, 10.0)
    assert failure is not None
    assert failure.cause is RewardFailure.WORKER
    assert "could not be confined and was not run: said" in failure.detail


@pytest.mark.parametrize("violation", ["timeout", "output", "processes"])
def test_violation_takes_precedence_over_exit_status(violation: str):
    failure = failure_of(report(ended(killed(signal.SIGKILL)), violation), 10.0)
    assert failure is not None
    assert failure.cause == violation


def test_dead_forkserver_is_a_worker_failure():
    failure = failure_of(report(None), 10.0)
    assert failure is not None
    assert failure.cause is RewardFailure.WORKER
