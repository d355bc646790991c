# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Grading of reply text in separate processes, which are killed at a limit on time or memory.

```
trainer, any thread ── one socket per process, lines of JSON ── grading process: function(request) → answer
```

A parser or regular expression may need unbounded time or memory for a reply, inside one C call that holds the
interpreter's lock and that no signal handler interrupts. Only killing the process helps. The processes are reused. They
can neither write files nor start programs nor open connections (on Linux); what they print is discarded.
"""

import contextlib
import functools
import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from marin_rl.utils.user_code import inherited_environment

PROCESSES = max(2, min(8, os.cpu_count() or 1))
"""Maximum number of processes of one grader, and so of texts that it grades at the same time."""
MEMORY_LIMIT = 4 * 2**30
"""Bytes of address space of a process: `9**9**9` needs more memory than any machine has."""
MAX_BYTES = 2**24
"""Maximum length of a request and of an answer, as JSON."""
WALL_FACTOR = 20.0
"""Seconds from request to answer after which a process is killed, per second of CPU time that it may use. Large, as a
busy machine must not change a grade; this limit is for functions that sleep or wait."""
START_SECONDS = 300.0
"""Time limit for the imports of a process."""


class NoAnswerError(Exception):
    """A text has no grade: its grading exceeded a limit, ended the process, or raised; the message names the cause."""


class GroundTruthError(ValueError):
    """An answer is not usable as ground truth; the message names the answer."""


def ask(grader: str, request: Mapping[str, Any], cpu_seconds: float) -> Any:
    """Call a function in a separate process and return its result. Blocks; may be called in any thread.

    Args:
        grader: `module:name` of a function without arguments, which is called when a process starts. It imports what is
            needed, and returns the function that takes a request and returns a JSON value.
        request: JSON values; strings may contain lone surrogates.
        cpu_seconds: CPU time after which the process is killed; above 0.

    Raises:
        NoAnswerError: if the process was killed or ended, the function raised, or request or answer are too long.
        RuntimeError: if no process can be started.
    """
    return _pool(grader).ask(request, cpu_seconds)


@functools.cache
def _pool(grader: str) -> "_Pool":
    return _Pool(grader)


class _Pool:
    """The processes of one grader; each starts with the first request that finds all others busy."""

    def __init__(self, grader: str) -> None:
        # Last in, first out, so that few processes serve few requests.
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        for _ in range(PROCESSES):
            self._idle.put(_Process(grader))

    def ask(self, request: Mapping[str, Any], cpu_seconds: float) -> Any:
        line = json.dumps({"request": request, "cpu_seconds": cpu_seconds}).encode() + b"\n"
        if len(line) > MAX_BYTES:
            raise NoAnswerError(f"a text of {len(line)} bytes is longer than the limit of {MAX_BYTES}")
        process = self._idle.get()
        try:
            answer = json.loads(process.exchange(line, WALL_FACTOR * cpu_seconds))
        except TimeoutError:
            raise NoAnswerError(f"no answer within {WALL_FACTOR * cpu_seconds:g} s") from None
        except (EOFError, OSError):
            raise NoAnswerError(
                f"the process ended: more than {cpu_seconds:g} s of CPU time, too much memory, or a long answer"
            ) from None
        finally:
            self._idle.put(process)
        if "error" in answer:
            raise NoAnswerError(answer["error"])
        return answer["result"]


class _Process:
    """A process that grades, which starts with its first request. Used by one thread at a time."""

    def __init__(self, grader: str) -> None:
        self._grader = grader
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize | None = None

    def exchange(self, request: bytes, seconds: float) -> bytes:
        """Send a request and return the answer. The process is killed if there is none, for whatever reason."""
        if self._process is not None and self._process.poll() is not None:
            # The process ended between two requests, so neither request is the cause.
            self._close()
        connection = self._socket if self._socket is not None else self._start()
        try:
            return _exchange(connection, request, time.monotonic() + seconds)
        except BaseException:
            # The next request would receive the answer of this one.
            self._close()
            raise

    def _start(self) -> socket.socket:
        try:
            ours, process = start_process("marin_rl.rewards.grading_process:run_process", self._grader)
        except OSError as error:
            # Not a property of the text: it must not be graded as wrong.
            raise RuntimeError(
                f"cannot start a process for {self._grader}: {error}; raise the limits on processes and open files "
                "(ulimit -u, ulimit -n), or free memory"
            ) from error
        self._socket, self._process = ours, process
        self._stop = weakref.finalize(self, _end, ours, process)
        try:
            problem = json.loads(_exchange(ours, b"", time.monotonic() + START_SECONDS))["error"]
        except (EOFError, OSError) as error:
            problem = f"{type(error).__name__} (exit status {process.poll()}); see the messages above"
        except BaseException:
            self._close()
            raise
        if problem is not None:
            self._close()
            raise RuntimeError(
                f"the process for {self._grader} did not start: {problem}. Check that its packages are installed for "
                + sys.executable
            )
        return ours

    def _close(self) -> None:
        """Kill the process; the next request starts another."""
        if self._stop is not None:
            self._stop()
        self._socket = self._process = self._stop = None


def _exchange(connection: socket.socket, request: bytes, deadline: float) -> bytes:
    """Send a request and return the line that answers it.

    Raises:
        TimeoutError: at the deadline.
        OSError: if the process ended before it had read the request, or the answer is too long.
        EOFError: if the process ended later.
    """
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.sendall(request)
    answer = bytearray()
    while not answer.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(2**16)
        if not part:
            raise EOFError("the process ended")
        answer += part
        if len(answer) > MAX_BYTES:
            raise OSError(f"the answer is longer than {MAX_BYTES} bytes")
    return bytes(answer)


def _end(connection: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            # With the programs that it started, where nothing prevents that.
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> Mapping[str, str]:
    """Return the environment variables of a process that runs code of this package and of libraries repeatably."""
    return {
        **inherited_environment(),
        "PYTHONPATH": os.pathsep.join(sys.path),
        # The iteration order of sets must not change grades, problems or games between processes.
        "PYTHONHASHSEED": "0",
        # Threads of numerical libraries would use up the address space, and a process with threads cannot be forked.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


_MAIN = """
import importlib, sys
module, _, name = sys.argv[1].partition(":")
getattr(importlib.import_module(module), name)(int(sys.argv[2]), *sys.argv[3:])
"""


def start_process(
    function: str, *arguments: str, stderr: int | None = None
) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Start a Python process with a socket, the other end of which is returned.

    It calls `function`, `module:name`, with its descriptor of the socket and `arguments`. `stderr` is inherited by
    default.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                # -P keeps the working directory off the Python path, where it could shadow other modules.
                [sys.executable, "-P", "-c", _MAIN, function, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=_environment(),
                # Ctrl-C in the terminal must not reach the process: the trainer needs it to finish its step.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def run_process(descriptor: int, grader: str) -> None:
    """Answer requests until the trainer closes the connection or ends.

    `descriptor` is that of the connection; `grader` is as for `ask`.
    """
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    module, _, name = grader.partition(":")
    try:
        from marin_rl.rewards.sandbox.isolation import confine_grader

        call = getattr(importlib.import_module(module), name)()
        confine_grader(MEMORY_LIMIT)
    except BaseException as error:
        connection.sendall(_line({"error": f"{type(error).__name__}: {error}"}))
        return
    connection.sendall(_line({"error": None}))
    # Libraries print warnings about the texts that they parse.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, lines), daemon=True).start()
    while True:
        connection.sendall(_answer(call, json.loads(lines.get())))


def _receive(connection: socket.socket, lines: "queue.SimpleQueue[bytes]") -> None:
    """Read requests; end the process at the end of the connection, even if a function sleeps or waits."""
    try:
        with connection.makefile("rb") as requests:
            for line in requests:
                lines.put(line)
    finally:
        # Also after an error: if the trainer is killed before it has read an answer, the connection is reset.
        os._exit(0)


def _answer(call: Any, message: Mapping[str, Any]) -> bytes:
    # SIGPROF has no handler, so the kernel kills the process, even inside C code. The timer counts CPU time of this
    # process, so a busy machine does not change a grade.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, message["cpu_seconds"])
    try:
        answer = _line({"result": call(message["request"])})
    except BaseException as error:
        answer = _line({"error": f"{type(error).__name__}: {error!s:.500}"})
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return answer


def _line(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"
