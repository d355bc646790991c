# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sandbox worker: the process that the trainer starts to run and supervise user code.

The worker never runs user code itself. It forks a forkserver, which loads the user's file once and forks a child for
every call. The worker enforces the limits on time, output and processes by killing calls that exceed them. It uses only
the standard library and forwards the answers of calls as text, which the trainer validates.
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
from typing import Any, NamedTuple

from marin_rl.rewards.sandbox import forkserver, protocol
from marin_rl.rewards.sandbox.folders import deleted_files, exceeds_size, has_inner_folders, remove
from marin_rl.rewards.sandbox.isolation import (
    IS_LINUX,
    PR_SET_CHILD_SUBREAPER,
    address_space,
    prctl,
)
from marin_rl.rewards.sandbox.processes import (
    cpu_seconds_of,
    end_descendants,
    exceeded_count,
    list_descendants,
    pause,
    reap,
    scan_descendants,
    stopped_descendants,
    wait_until_alone,
)
from marin_rl.rewards.sandbox.protocol import WorkerSpec
from marin_rl.rewards.sandbox.seccomp import PR_SET_DUMPABLE, PR_SET_PDEATHSIG

POLL_SECONDS = 0.02
"""Interval in seconds of counting processes and threads while a call runs or a file is loaded."""

END_SECONDS = 5.0
"""Seconds to wait for killed processes to disappear."""

ALONE_SECONDS = 0.5
"""Seconds to wait for the forkserver to have no other processes after a load or a call, before it is replaced."""

READY_BYTES = 1 << 20
"""Maximum size in bytes of the forkserver's first message."""

_REQUESTS, _ANSWERS = 0, 1


@dataclasses.dataclass
class _PipeStream:
    """Data read from one descriptor."""

    limit: int
    data: bytearray = dataclasses.field(default_factory=bytearray)
    ended: bool = False

    @property
    def exceeded(self) -> bool:
        return len(self.data) > self.limit

    def read(self, descriptor: int) -> None:
        """Read available data once."""
        try:
            part = os.read(descriptor, 1 << 16)
        except ConnectionError:
            part = b""
        self.data += part
        self.ended = not part

    def text(self) -> str:
        return bytes(self.data[: self.limit]).decode("utf-8", errors="replace")


class _Forkserver(NamedTuple):
    """The running forkserver; while a file is loaded, the loading process."""

    process: int
    connection: socket.socket


class SandboxWorker:
    """Runs the trainer's requests, one at a time."""

    def __init__(self, spec: WorkerSpec):
        self._spec = spec
        self._source = ""
        self._running: _Forkserver | None = None
        self._functions: dict[str, Any] = {}
        self._loaded_bytes = 0
        self._unremovable: set[str] = set()

    @property
    def _forkserver(self) -> _Forkserver:
        assert self._running is not None
        return self._running

    def serve(self) -> None:
        """Answer requests until the trainer closes the pipe or exits."""
        while (request := protocol.read(_REQUESTS)) is not None:
            # From here on user code may have run. A call can be retried in another worker only before this message.
            protocol.write(_ANSWERS, protocol.encode({"began": True}))
            protocol.write(_ANSWERS, protocol.encode(self._answer(request)))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._source = request.pop("source", self._source)
        if self._running is None:
            failure = self._start_forkserver()
            if failure is not None:
                return {"not_loaded": failure}
        if request["kind"] == "load":
            return {"loaded": self._functions}
        return self._call(request, time.monotonic() + request.get("seconds", self._spec.limits.wall_seconds))

    def _start_forkserver(self) -> str | None:
        """Load the user's file in a forkserver; returns an error message or None."""
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
        self._running = _Forkserver(pid, ours)
        failure = self._load(deadline)
        if failure is not None and self._running is not None:
            self._end_forkserver()
        return failure

    def _load(self, deadline: float) -> str | None:
        """Wait until the file is loaded, and use the forkserver; returns an error message or None."""
        ready = _PipeStream(READY_BYTES)
        violation = self._watch(
            {self._forkserver.connection.fileno(): ready},
            deadline,
            lambda: (
                len(ready.data) >= protocol.HEADER_BYTES
                and len(ready.data) >= protocol.HEADER_BYTES + protocol.length(bytes(ready.data))
            ),
            exceeds_disk=lambda: self._exceeds_disk(None),
            cpu_seconds=self._spec.start_seconds,
        )
        if violation == "timeout":
            return f"its import took longer than {self._spec.start_seconds:g} s; raise sandbox.start_seconds"
        if violation is not None:
            return f"its import exceeded the limit on {violation}; see the limits of `sandbox`"
        if ready.ended:
            return (
                "the process that imported it ended, as after os._exit() or a crash; import it with python to see why"
            )
        parsed = forkserver.parse_ready(bytes(ready.data[protocol.HEADER_BYTES :]))
        if isinstance(parsed, str):
            return parsed
        process, self._functions = parsed
        return self._adopt_forkserver(process)

    def _adopt_forkserver(self, process: int) -> str | None:
        """Kill the process that loaded the file, with its threads and children, and use the forkserver it forked.

        The process id is reported by untrusted code. Returns an error message or None.
        """
        if IS_LINUX:
            if process not in list_descendants(os.getpid()):
                return "the loading process reported a forkserver that is not its child"
            self._running = _Forkserver(process, self._forkserver.connection)
            if not end_descendants(process, END_SECONDS):
                raise SystemExit("processes of a user's file could not be killed")
            if not wait_until_alone(process, ALONE_SECONDS):
                return "its forkserver ended, or started threads or processes"
            self._loaded_bytes = address_space(process)
        with contextlib.suppress(OSError):
            self._forkserver.connection.sendall(forkserver.CONTINUE)
        return None

    def _call(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        folder = tempfile.mkdtemp(dir=self._spec.scratch)
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            report = self._run(request, folder, deadline, stack)
        report["seconds"] = time.monotonic() - started
        report["warnings"] = [*self._pause_forkserver(), *self._clear_scratch()]
        return report

    def _pause_forkserver(self) -> list[str]:
        """Stop the forkserver until the next call, or kill it and return a warning if the call left anything in it.

        Leftover threads and processes would run without limits, or count against later calls. The next call loads the
        file again.
        """
        if self._running is None or not IS_LINUX:
            return []
        process, connection = self._running
        is_alone = pause(process, END_SECONDS) and wait_until_alone(process, ALONE_SECONDS)
        has_written = bool(select.select([connection], [], [], 0)[0])
        if is_alone and not has_written:
            return []
        self._end_forkserver()
        return [
            f"the forkserver of {self._spec.file or 'programs'} had threads, child processes or unread messages "
            "after a call; it was killed, and the next call loads the file again"
        ]

    def _clear_scratch(self) -> list[str]:
        """Remove files that calls wrote; returns one warning for each path that cannot be removed.

        Every call has a separate folder, so leftover files do not affect later calls.
        """
        warnings = []
        # Clear the whole scratch folder: without Landlock a call can also write outside its own folder.
        for name in set(os.listdir(self._spec.scratch)) - self._unremovable:
            path = os.path.join(self._spec.scratch, name)
            error = remove(path)
            if error is not None:
                self._unremovable.add(name)
                warnings.append(f"a call's file could not be removed; remove it yourself: {path}: {error}")
        return warnings

    def _run(
        self, request: dict[str, Any], folder: str, deadline: float, stack: contextlib.ExitStack
    ) -> dict[str, Any]:
        streams: dict[int, _PipeStream] = {}
        theirs = [_input(request.get("stdin", ""), self._spec.scratch, stack)]
        for prefix in (b"", b"", forkserver.CONFINED):
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            streams[reading] = _PipeStream(self._spec.limits.output_bytes + len(prefix))
            theirs.append(writing)
        stdout, stderr, answer = streams.values()
        status = _PipeStream(len(forkserver.ENDED) + struct.calcsize(forkserver.STATUS))
        streams[self._forkserver.connection.fileno()] = status
        if IS_LINUX:
            os.kill(self._forkserver.process, signal.SIGCONT)
        try:
            self._send({**request, "folder": folder, "loaded_bytes": self._loaded_bytes}, theirs)
        except OSError:
            status.ended = True
        finally:
            for descriptor in theirs[1:]:
                os.close(descriptor)
        violation = self._watch(
            streams,
            deadline,
            lambda: len(status.data) >= len(forkserver.ENDED),
            exceeds_disk=lambda: self._exceeds_disk(theirs[0]),
            cpu_seconds=self._spec.limits.cpu_seconds,
        )
        if not status.ended:
            self._end_call(status, violation)
        for descriptor, stream in streams.items():
            # Read the remaining data without waiting.
            while not stream.ended and not stream.exceeded and select.select([descriptor], [], [], 0)[0]:
                stream.read(descriptor)
        if violation is None and any(stream.exceeded for stream in (stdout, stderr, answer)):
            violation = "output"
        confined = answer.data.startswith(forkserver.CONFINED)
        del answer.data[: len(forkserver.CONFINED) if confined else 0]
        exit_status, cpu = self._exit_status(status)
        return {
            "violation": violation,
            "confined": confined,
            "stdout": stdout.text(),
            "stderr": stderr.text(),
            "answer": answer.text(),
            "status": exit_status,
            "cpu": cpu,
        }

    def _send(self, message: dict[str, Any], descriptors: list[int]) -> None:
        connection = self._forkserver.connection
        connection.settimeout(END_SECONDS)
        data = protocol.encode(message)
        socket.send_fds(connection, [data[: protocol.HEADER_BYTES]], descriptors)
        connection.sendall(data[protocol.HEADER_BYTES :])

    def _watch(
        self,
        streams: Mapping[int, _PipeStream],
        deadline: float,
        finished: Callable[[], bool],
        exceeds_disk: Callable[[], bool],
        cpu_seconds: float,
    ) -> str | None:
        """Read until the forkserver, the last stream, has answered; returns the name of the exceeded limit, or None.

        `deadline` is on the monotonic clock. The forkserver may use `cpu_seconds` meanwhile; the kernel limits the
        other processes.
        """
        limits = self._spec.limits
        poll = select.poll()
        # The trainer sends nothing while a call runs, so this descriptor becomes readable only when the trainer exits.
        poll.register(_REQUESTS, select.POLLIN)
        for descriptor in streams:
            poll.register(descriptor, select.POLLIN)
        *_, last = streams.values()
        cpu_end = self._cpu_seconds() + math.ceil(cpu_seconds) + 1
        next_count = time.monotonic() + POLL_SECONDS if IS_LINUX else math.inf
        while not (finished() or last.ended):
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            for descriptor, _ in poll.poll(1000 * max(min(deadline, next_count) - now, 0.0)):
                if descriptor == _REQUESTS:
                    _clean_up(self._spec)
                    os._exit(1)
                streams[descriptor].read(descriptor)
                if streams[descriptor].ended:
                    poll.unregister(descriptor)
                if streams[descriptor].exceeded:
                    return "output"
            if time.monotonic() >= next_count:
                next_count = time.monotonic() + POLL_SECONDS
                # The call, or the loading process, and the forkserver do not count.
                exceeded = exceeded_count(2 + limits.processes, limits.threads)
                if exceeded is not None:
                    return exceeded
                if exceeds_disk():
                    return "file_size"
                if self._cpu_seconds() > cpu_end:
                    return "cpu"
                reap(self._forkserver.process)
        return None

    def _exceeds_disk(self, stdin: int | None) -> bool:
        """Return whether the scratch folder, and files that have been deleted from it, use too much space.

        The standard input of the call does not count; it is None while a file is loaded.
        """
        limit = self._spec.limits.folder_bytes
        if self._spec.has_namespaces:
            # The size of the file system limits the bytes, so that only the number of files can exceed this.
            return exceeds_size(self._spec.scratch, 2 * limit, self._unremovable)
        with contextlib.ExitStack() as stack:
            if has_inner_folders(self._spec.scratch):
                # Running processes could hide files by renaming folders.
                spare = None if stdin is None else self._forkserver.process
                stack.enter_context(stopped_descendants(spare, ALONE_SECONDS))
            deleted = self._deleted_files(stdin)
            if deleted is None:
                # Nothing can be listed before the loading process is confined.
                return stdin is not None
            return exceeds_size(self._spec.scratch, limit - sum(deleted.values()), self._unremovable)

    def _deleted_files(self, stdin: int | None) -> dict[tuple[int, int], int] | None:
        """Return the bytes of deleted files except `stdin` by device and inode; None if they cannot be counted."""
        found: dict[tuple[int, int], int] = {}
        if not self._spec.counts_open_files:
            return found
        for process in scan_descendants(os.getpid()):
            try:
                found |= deleted_files(process, self._spec.scratch, self._spec.limits.file_bytes)
            except PermissionError:
                # Files are also hidden while a process exits, and then it has no memory. Otherwise it runs a program
                # that it may not read.
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    if address_space(process):
                        return None
        if stdin is not None:
            state = os.fstat(stdin)
            found.pop((state.st_dev, state.st_ino), None)
        return found

    def _cpu_seconds(self) -> float:
        return cpu_seconds_of(self._forkserver.process) if IS_LINUX else 0.0

    def _end_call(self, status: _PipeStream, violation: str | None) -> None:
        """Kill the call's process and its children, then read the exit status from the forkserver."""
        may_run = IS_LINUX and (violation is not None or self._spec.can_start_processes)
        if may_run and not end_descendants(self._forkserver.process, END_SECONDS):
            # When the worker exits, the kernel kills every process in its namespaces.
            raise SystemExit("processes of a call could not be killed")
        connection = self._forkserver.connection
        connection.settimeout(END_SECONDS)
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(forkserver.CONTINUE)
            while len(status.data) < status.limit:
                part = connection.recv(status.limit - len(status.data))
                if not part:
                    break
                status.data += part

    def _exit_status(self, status: _PipeStream) -> tuple[int | None, float]:
        """Return a call's exit status and CPU seconds; without a valid status the forkserver is ended."""
        exit_status, cpu = None, 0.0
        if len(status.data) == status.limit:
            exit_status, cpu = struct.unpack(forkserver.STATUS, status.data[len(forkserver.ENDED) :])
        if exit_status is None or not (os.WIFEXITED(exit_status) or os.WIFSIGNALED(exit_status)):
            self._end_forkserver()
            return None, cpu
        return exit_status, cpu

    def _end_forkserver(self) -> None:
        process, connection = self._forkserver
        self._running = None
        connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            # Calls are in its process group. Without /proc this is the only way to kill them.
            os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
        if IS_LINUX and not end_descendants(None, END_SECONDS):
            raise SystemExit("processes of a user's file could not be killed")


def _input(text: str, scratch: str, stack: contextlib.ExitStack) -> int:
    if text:
        with tempfile.TemporaryFile(dir=scratch) as file:
            file.write(text.encode("utf-8", errors="replace"))
            file.seek(0)
            # Reopened read-only: with a writable descriptor a call could grow the file.
            descriptor = os.open(f"/dev/fd/{file.fileno()}", os.O_RDONLY)
    else:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    return descriptor


def _clean_up(spec: WorkerSpec) -> None:
    """Kill all descendants and remove the scratch folder, which a killed trainer cannot do."""
    if IS_LINUX:
        end_descendants(None, END_SECONDS)
    if not spec.has_namespaces:
        remove(spec.scratch)


def main(text: str) -> None:
    """Serve as a worker, with the spec as JSON, until the trainer exits."""
    spec = WorkerSpec.from_json(text)

    def terminate(*_: object) -> None:
        _clean_up(spec)
        os._exit(1)

    signal.signal(signal.SIGTERM, terminate)
    if IS_LINUX:
        # In namespaces all other processes end with this one, so no handler is needed.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL if spec.has_namespaces else signal.SIGTERM)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_DUMPABLE, 0)
    sys.path.extend(spec.python_path)
    SandboxWorker(spec).serve()
    _clean_up(spec)
