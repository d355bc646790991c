# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A worker of the sandbox: the process that the trainer starts, and that watches over user code.

It never runs user code itself. It forks a forkserver, which loads the user's file once and forks a child for every
call; a call's limits on time, output and processes are enforced here, by ending what exceeds them. Nothing but the
standard library is used, and what it reads from below is passed on as text, for the trainer to validate.
"""

import contextlib
import dataclasses
import math
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from marin_rl.rewards.sandbox import forkserver, frames, kernel
from marin_rl.rewards.sandbox.folders import remove, takes_more
from marin_rl.rewards.sandbox.limits import FOLDER_FILES, address_space
from marin_rl.rewards.sandbox.processes import (
    below,
    cpu_seconds_of,
    end_descendants,
    is_soon_alone,
    look_below,
    pause,
    reap,
)
from marin_rl.rewards.sandbox.spec import WorkerSpec

POLL_SECONDS = 0.02
"""How often processes and threads are counted while a call runs or a file is loaded."""

END_SECONDS = 5.0
"""How long to wait for what was ended to be gone."""

LEAVE_SECONDS = 0.5
"""How long to wait for the forkserver to be alone after a load or a call, before it is replaced."""

READY_BYTES = 1 << 20
"""Most bytes that a forkserver may say about the file that it loaded."""

_STATUS = struct.Struct("=id")
_REQUESTS, _ANSWERS = 0, 1


@dataclasses.dataclass
class _Stream:
    """What was read from one descriptor."""

    limit: int
    data: bytearray = dataclasses.field(default_factory=bytearray)
    ended: bool = False

    @property
    def exceeded(self) -> bool:
        return len(self.data) > self.limit

    def text(self) -> str:
        return bytes(self.data[: self.limit]).decode("utf-8", errors="replace")


class Worker:
    """Answers the trainer's requests, one at a time."""

    def __init__(self, spec: WorkerSpec):
        self._spec = spec
        self._source = ""
        self._forkserver: int | None = None
        self._connection: socket.socket | None = None
        self._functions: dict[str, Any] = {}
        self._taken = 0
        self._stuck: set[str] = set()
        # In namespaces the file system in memory that calls write to has this size.
        self._most_bytes = FOLDER_FILES * spec.limits.file_bytes

    def serve(self) -> None:
        """Answer requests until the trainer closes the pipe or is gone."""
        while (request := frames.read(_REQUESTS)) is not None:
            # From here on user code may have run: a call that was not announced can be tried again elsewhere.
            frames.write(_ANSWERS, {"began": True})
            frames.write(_ANSWERS, self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._source = request.pop("source", self._source)
        if self._forkserver is None:
            failure = self._start_forkserver()
            if failure is not None:
                return {"not_loaded": failure}
        if request["kind"] == "load":
            return {"loaded": self._functions}
        return self._call(request, time.monotonic() + self._spec.limits.wall_seconds)

    def _start_forkserver(self) -> str | None:
        """Have the user's file loaded; says what went wrong, or None."""
        deadline = time.monotonic() + self._spec.start_seconds
        ours, theirs = socket.socketpair()
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                forkserver.run(self._spec, self._source, theirs, own)
            finally:
                os._exit(1)
        theirs.close()
        self._forkserver, self._connection = pid, ours
        ready = _Stream(READY_BYTES)
        violation = self._watch(
            {ours.fileno(): ready},
            deadline,
            lambda: (
                len(ready.data) >= frames.HEADER_BYTES
                and len(ready.data) >= frames.HEADER_BYTES + frames.length(bytes(ready.data))
            ),
            processes=2 + self._spec.limits.processes,
            cpu_seconds=self._spec.start_seconds,
        )
        failure = self._why_not_loaded(ready, violation) or self._describe(deadline)
        if failure is not None and self._forkserver is not None:
            self._end_forkserver()
        return failure

    def _why_not_loaded(self, ready: _Stream, violation: str | None) -> str | None:
        if violation == "timeout":
            return f"it was not loaded after {self._spec.start_seconds:g} s"
        if violation is not None:
            return f"loading it exceeded the limit on {violation}"
        if ready.ended:
            return "the process that loaded it ended"
        process, failed = forkserver.parse_ready(bytes(ready.data[frames.HEADER_BYTES :]))
        return failed if process is None else self._take_over(process)

    def _take_over(self, process: int) -> str | None:
        """End the process that loaded the file, with its threads and children, and go on with its fork.

        Args:
            process: the fork, as user code may have named it.

        Returns:
            Why that is not possible, or None.
        """
        assert self._connection is not None
        if kernel.IS_LINUX:
            if process not in below(os.getpid()):
                return "the process that loaded it named a forkserver that is not its own"
            self._forkserver = process
            if not end_descendants(process, END_SECONDS):
                raise SystemExit("processes of a user's file could not be ended")
            if not is_soon_alone(process, LEAVE_SECONDS):
                return "the process that holds it ended, or started threads or processes"
            self._taken = address_space(process)
        with contextlib.suppress(OSError):
            self._connection.sendall(forkserver.GO_ON)
        return None

    def _describe(self, deadline: float) -> str | None:
        """Have a call list the reward functions of the loaded file; says what went wrong, or None."""
        self._functions = {}
        if self._spec.file is None:
            return None
        report = self._call({"kind": "describe"}, deadline)
        if report["violation"] is not None:
            return f"listing its reward functions exceeded the limit on {report['violation']}"
        if self._forkserver is None:
            return report["warnings"][0] if report["warnings"] else "the process that holds it died"
        self._functions, failed = forkserver.parse_functions(report["answer"].encode())
        return failed

    def _call(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        folder = tempfile.mkdtemp(dir=self._spec.scratch)
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            report = self._run(request, folder, deadline, stack)
        report["seconds"] = time.monotonic() - started
        report["warnings"] = [*self._rest_forkserver(), *self._clear_scratch()]
        return report

    def _rest_forkserver(self) -> list[str]:
        """Stop the forkserver until the next call, or end it if the call left anything there; says so in a warning.

        What a call left would run without limits, or count against later calls. The next call loads the file again.
        """
        if self._forkserver is None or not kernel.IS_LINUX:
            return []
        assert self._connection is not None
        is_alone = pause(self._forkserver, END_SECONDS) and is_soon_alone(self._forkserver, LEAVE_SECONDS)
        has_written = bool(select.select([self._connection], [], [], 0)[0])
        if is_alone and not has_written:
            return []
        self._end_forkserver()
        return [
            f"the process that holds {self._spec.file or 'no file'} had threads, child processes or unread messages "
            "after a call; it was ended, and the next call loads the file again"
        ]

    def _clear_scratch(self) -> list[str]:
        """Remove what calls wrote; says what could not be removed, and why, once for each.

        Every call has a folder of its own, so what stays is in no later call's way.
        """
        left = []
        # Not the call's folder alone: without Landlock it can write beside it.
        for name in set(os.listdir(self._spec.scratch)) - self._stuck:
            path = os.path.join(self._spec.scratch, name)
            why_not = remove(path)
            if why_not is not None:
                self._stuck.add(name)
                left.append(f"a call's file could not be removed; remove it yourself: {path}: {why_not}")
        return left

    def _run(
        self, request: dict[str, Any], folder: str, deadline: float, stack: contextlib.ExitStack
    ) -> dict[str, Any]:
        assert self._forkserver is not None
        assert self._connection is not None
        streams: dict[int, _Stream] = {}
        theirs = [_input(request.get("stdin", ""), self._spec.scratch, stack)]
        for first_words in (b"", b"", forkserver.CONFINED):
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            streams[reading] = _Stream(self._spec.limits.output_bytes + len(first_words))
            theirs.append(writing)
        status = _Stream(len(forkserver.ENDED) + _STATUS.size)
        streams[self._connection.fileno()] = status
        if kernel.IS_LINUX:
            os.kill(self._forkserver, signal.SIGCONT)
        try:
            self._send({**request, "folder": folder, "taken": self._taken}, theirs)
        except OSError:
            status.ended = True
        finally:
            for descriptor in theirs[1:]:
                os.close(descriptor)
        violation = self._watch(
            streams,
            deadline,
            lambda: len(status.data) >= len(forkserver.ENDED),
            processes=2 + self._spec.limits.processes,
            cpu_seconds=self._spec.limits.cpu_seconds,
        )
        if not status.ended:
            self._end_call(status, violation)
        _drain(streams)
        stdout, stderr, answer = (stream for stream in streams.values() if stream is not status)
        if violation is None and any(stream.exceeded for stream in (stdout, stderr, answer)):
            violation = "output"
        confined = answer.data.startswith(forkserver.CONFINED)
        del answer.data[: len(forkserver.CONFINED) if confined else 0]
        report = {
            "violation": violation,
            "confined": confined,
            "stdout": stdout.text(),
            "stderr": stderr.text(),
            "answer": answer.text(),
        }
        exit_status, cpu = None, 0.0
        if len(status.data) == status.limit:
            exit_status, cpu = _STATUS.unpack(bytes(status.data[len(forkserver.ENDED) :]))
        if exit_status is None or not (os.WIFEXITED(exit_status) or os.WIFSIGNALED(exit_status)):
            exit_status = None
            self._end_forkserver()
        return report | {"status": exit_status, "cpu": cpu}

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        assert self._connection is not None
        self._connection.settimeout(END_SECONDS)
        data = frames.encode(message)
        socket.send_fds(self._connection, [data[: frames.HEADER_BYTES]], descriptors)
        self._connection.sendall(data[frames.HEADER_BYTES :])

    def _watch(
        self,
        streams: Mapping[int, _Stream],
        deadline: float,
        finished: Callable[[], bool],
        processes: int,
        cpu_seconds: float,
    ) -> str | None:
        """Read until the forkserver has answered; says which limit was exceeded, or None.

        Args:
            streams: what to read from; the last is the forkserver's.
            deadline: when to give up, on the monotonic clock.
            finished: whether the forkserver has answered.
            processes: how many may run below this one.
            cpu_seconds: processor time that the process that holds the file may use meanwhile; the kernel holds the
                others to theirs.
        """
        poll = select.poll()
        # While a call runs the trainer says nothing; it can only go away.
        poll.register(_REQUESTS, select.POLLIN)
        for descriptor in streams:
            poll.register(descriptor, select.POLLIN)
        *_, last = streams.values()
        cpu_end = self._cpu_seconds() + math.ceil(cpu_seconds) + 1
        while not (finished() or last.ended):
            left = deadline - time.monotonic()
            if left <= 0:
                return "timeout"
            for descriptor, _ in poll.poll(1000 * (min(left, POLL_SECONDS) if kernel.IS_LINUX else left)):
                if descriptor == _REQUESTS:
                    _end_all()
                if _read_some(descriptor, streams[descriptor]):
                    poll.unregister(descriptor)
                if streams[descriptor].exceeded:
                    return "output"
            if kernel.IS_LINUX:
                excess = _count(processes, self._spec.limits.threads)
                if excess is not None:
                    return excess
                if not self._spec.has_namespaces and takes_more(self._spec.scratch, self._most_bytes, self._stuck):
                    return "files"
                if self._cpu_seconds() > cpu_end:
                    return "cpu"
                reap(self._forkserver)
        return None

    def _cpu_seconds(self) -> float:
        assert self._forkserver is not None
        return cpu_seconds_of(self._forkserver) if kernel.IS_LINUX else 0.0

    def _end_call(self, status: _Stream, violation: str | None) -> None:
        """End what the call runs in, and what it left running; the forkserver then says how it ended."""
        assert self._forkserver is not None
        assert self._connection is not None
        may_run = kernel.IS_LINUX and (violation is not None or self._spec.can_start_processes)
        if may_run and not end_descendants(self._forkserver, END_SECONDS):
            # Its end is that of every process in its namespaces.
            raise SystemExit("processes of a call could not be ended")
        self._connection.settimeout(END_SECONDS)
        with contextlib.suppress(TimeoutError, ConnectionError):
            self._connection.sendall(forkserver.GO_ON)
            while len(status.data) < status.limit:
                part = self._connection.recv(status.limit - len(status.data))
                if not part:
                    break
                status.data += part

    def _end_forkserver(self) -> None:
        assert self._forkserver is not None
        assert self._connection is not None
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._forkserver, signal.SIGKILL)
            # Calls are in its process group; this is all that ends them where there is no /proc.
            os.killpg(self._forkserver, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._forkserver, 0)
        self._forkserver = self._connection = None
        if kernel.IS_LINUX and not end_descendants(None, END_SECONDS):
            raise SystemExit("processes of a user's file could not be ended")


def _count(processes: int, threads: int) -> str | None:
    """Which of two limits the processes below this one exceed: `processes`, `threads`, or None.

    Processes that have ended count until their parent has reaped them: they take up numbers, of which a machine has so
    many. The one thread of the process that forks the calls does not count.
    """
    own = os.getpid()
    found = look_below(own).values()
    if sum(not (process.has_ended and process.parent == own) for process in found) > processes:
        return "processes"
    return "threads" if sum(process.threads for process in found) - 1 > threads else None


def _end_all(*_: object) -> None:
    """The trainer is gone: so is everything that it started."""
    if kernel.IS_LINUX:
        end_descendants(None, END_SECONDS)
    os._exit(1)


def _input(text: str, scratch: str, stack: contextlib.ExitStack) -> int:
    if not text:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        return descriptor
    with tempfile.TemporaryFile(dir=scratch) as file:
        file.write(text.encode("utf-8", errors="replace"))
        file.seek(0)
        # Opened again: with a descriptor that can be written, a call could grow the file.
        descriptor = os.open(f"/dev/fd/{file.fileno()}", os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _read_some(descriptor: int, stream: _Stream) -> bool:
    """Read what there is, once; True at the end."""
    try:
        part = os.read(descriptor, 1 << 16)
    except ConnectionError:
        part = b""
    stream.data += part
    stream.ended = not part
    return stream.ended


def _drain(streams: Mapping[int, _Stream]) -> None:
    """Read what is left in the pipes of a call that has ended, without waiting."""
    for descriptor, stream in streams.items():
        while not stream.ended and not stream.exceeded and select.select([descriptor], [], [], 0)[0]:
            _read_some(descriptor, stream)


def main(text: str) -> None:
    """Serve as a worker until the trainer is gone.

    Args:
        text: the spec, as JSON.
    """
    spec = WorkerSpec.from_json(text)
    signal.signal(signal.SIGTERM, _end_all)
    if kernel.IS_LINUX:
        # In namespaces all others end with this process, so nothing has to be left to a handler.
        kernel.signal_at_parents_end(signal.SIGKILL if spec.has_namespaces else signal.SIGTERM)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    sys.path.extend(spec.python_path)
    Worker(spec).serve()
