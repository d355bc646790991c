# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Programs of this package, forked from a process that has imported it already, which takes seconds.

`popen` starts `python -m MODULE ARGUMENTS` like `subprocess.Popen`. The programs share the compilation cache: jax
writes programs only in the first process of a run, so the others would compile theirs at each start.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}
"""Python audit events of file operations."""


class ForkedProcess:
    """A forked program, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int, args: Sequence[str], status: Path) -> None:
        """Wrap a process.

        Args:
            pid: process id.
            args: command.
            status: file for the exit status, which is written when the process has ended.
        """
        self.pid, self.args, self.returncode = pid, args, None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status, negative if a signal ended the process; None while it is running."""
        if self.returncode is None and self._status.exists():
            self.returncode = int(self._status.read_text())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: after this number of seconds.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it is running."""
        if self.poll() is None:
            # It may have ended, and its status will be written.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()


def popen(
    args: Sequence[str],
    *,
    stdout: Any,
    stderr: Any = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    kill_at: tuple[str, int] | None = None,
    start_new_session: bool = True,
) -> ForkedProcess:
    """Fork a program; see `subprocess.Popen`.

    Args:
        args: `python -m MODULE` and arguments.
        stdout: open file.
        stderr: open file, or `subprocess.STDOUT`.
        env: environment variables; None for those of this process. Variables that configure jax must be set before the
            first call.
        cwd: working directory.
        kill_at: pattern and count of the file event at which the process is killed, see `die_at`.
        start_new_session: must be true.

    Returns:
        The process.
    """
    assert start_new_session
    server, folder = _server()
    status = folder / f"{time.monotonic_ns()}"
    assert list(args[:2]) == [sys.executable, "-m"], args
    assert server.stdin is not None
    assert server.stdout is not None
    # Ray sets this variable in the process that connects to a node, and reads it when it is imported, as in the server.
    variables = {name: value for name, value in (os.environ if env is None else env).items() if name != "RAY_AUTH_MODE"}
    order = {
        "argv": list(args[2:]),
        "env": variables,
        "cwd": str(cwd or Path.cwd()),
        "outputs": [str(Path((stdout if file is subprocess.STDOUT else file).name)) for file in (stdout, stderr)],
        "kill_at": kill_at,
        "status": str(status),
    }
    server.stdin.write(f"{json.dumps(order)}\n")
    server.stdin.flush()
    return ForkedProcess(int(server.stdout.readline()), args, status)


def run(
    args: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    capture_output: bool = True,
    text: bool = True,
    check: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Fork a program and wait for its end, like `subprocess.run`.

    Args:
        args: `python -m MODULE` and arguments.
        env: environment variables; None for those of this process.
        cwd: working directory.
        capture_output: must be true.
        text: must be true.
        check: must be false.

    Returns:
        Exit status, stdout and stderr.
    """
    assert (capture_output, text, check) == (True, True, False)
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        code = popen(args, stdout=stdout, stderr=stderr, env=env, cwd=cwd).wait()
        return subprocess.CompletedProcess(args, code, stdout.read().decode(), stderr.read().decode())


def first_line(process: ForkedProcess, output: IO[str]) -> str:
    """Wait for the first line that a program writes to an open file; empty if the program ends without one."""
    line = ""
    while not line.endswith("\n"):
        ended = process.poll() is not None
        line += output.readline()
        if ended:
            break
        time.sleep(0.01)
    return line


@functools.cache
def _server() -> "tuple[subprocess.Popen[str], Path]":
    """Start the server of this process, with a folder for exit statuses."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = tempfile.mkdtemp(prefix="marin_rl_statuses_")

    def close() -> None:
        with server:
            pass
        shutil.rmtree(folder)

    atexit.register(close)
    return server, Path(folder)


def die_at(pattern: str, count: int) -> None:
    """End this process with SIGKILL at a file event, so that a kill falls inside a write, however busy the machine is.

    Args:
        pattern: is searched in `<event> <path>` (`open <mode> <path>`).
        count: which event from the first match on; 0 is the match itself.
    """
    matches = re.compile(pattern).search
    left = -1

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in EVENTS:
            return
        if left < 0:
            mode = f"{arguments[1]} " if event == "open" else ""
            if not matches(f"{event} {mode}{arguments[0]}"):
                return
            left = count
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(hook)


def fork() -> int:
    # Jax starts its threads with its first computation; until then a fork is safe.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def watch(order: dict[str, Any]) -> None:
    """Fork the program, and write its exit status when it has ended; returns only in the program's process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = fork()
    if pid == 0:
        return
    os.write(1, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    written = Path(order["status"]).with_suffix(".new")
    # The test session may be over.
    try:
        written.write_text(str(code))
        written.rename(order["status"])
    finally:
        os._exit(0)


def execute(order: dict[str, Any]) -> None:
    """Run the program in this process."""
    import fsspec

    os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    # It reads variables when it is imported.
    fsspec.config.set_conf_env(fsspec.config.conf)
    for path, flags, number in (
        (os.devnull, os.O_RDONLY, 0),
        (order["outputs"][0], os.O_WRONLY | os.O_APPEND, 1),
        (order["outputs"][1], os.O_WRONLY | os.O_APPEND, 2),
    ):
        os.dup2(os.open(path, flags), number)
    if order["kill_at"] is not None:
        die_at(*order["kill_at"])
    module, *arguments = order["argv"]
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def serve() -> None:
    """Fork a program for each line of the input, and print its process id."""
    from jax._src import compiler

    import marin_rl.runs.curves
    import marin_rl.sessions.session  # noqa: F401

    # In this module, jax uses the process id only to decide who writes to the cache.
    compiler.distributed = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0, client=None))
    # Also write the hundreds of programs that compile in milliseconds.
    write = compiler._cache_write
    compiler._cache_write = lambda key, seconds, *more: write(key, max(seconds, 1.0), *more)
    # A program's collections would visit the objects of the imported modules, and so copy their memory, which takes
    # half of the time of a short program.
    gc.collect()
    gc.freeze()
    # The kernel reaps the processes that watch programs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if fork() == 0:
            watch(order := json.loads(line))
            return execute(order)
    return None


if __name__ == "__main__":
    serve()
