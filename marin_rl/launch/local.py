# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training processes of one run on this machine, connected by `jax.distributed` on the loopback interface."""

import contextlib
import dataclasses
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from marin_rl.chips import machine_memory
from marin_rl.config_fields import check_at_least
from marin_rl.launch.supervise import exit_status

DEVICES_FLAG = "--xla_force_host_platform_device_count"
PROCESS_BYTES = 500_000_000
"""Memory that every training process needs, also with a tiny model."""
OUTPUT_TIMEOUT = 5.0
"""Seconds to wait for the rest of the output after the end of all processes."""


@dataclasses.dataclass(frozen=True)
class LocalConfig:
    """Several training processes on the CPUs of this machine."""

    num_processes: int = 2
    """Number of training processes, as many as a slice has hosts."""
    devices_per_process: int = 1
    """CPU devices of each process, as many as a host has chips."""
    stop_timeout: float = 120.0
    """Seconds that processes have to end after Ctrl-C, or after another process failed, before they are killed."""

    def __post_init__(self) -> None:
        check_at_least(self, "local", num_processes=1, devices_per_process=1, stop_timeout=0)
        memory = machine_memory()
        if self.num_processes * PROCESS_BYTES > memory:
            raise ValueError(
                f"num_processes is {self.num_processes}, but this machine or container has memory for at most "
                f"{memory // PROCESS_BYTES} training processes; lower it"
            )


@dataclasses.dataclass(frozen=True)
class Process:
    """A process to run."""

    command: Sequence[str]
    """Program and arguments."""
    environment: Mapping[str, str]
    """Variables to set, in addition to those of this process."""

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def training_processes(config: LocalConfig, arguments: Sequence[str]) -> list[Process]:
    """Build the processes of a run; the first one is the main process.

    Args:
        config: number of processes and devices.
        arguments: arguments of `python -m marin_rl.train`.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(DEVICES_FLAG)]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join([*flags, f"{DEVICES_FLAG}={config.devices_per_process}"]),
        "PYTHONUNBUFFERED": "1",
    }
    settings = {
        "initialize_jax_distributed": "true",
        "coordinator_address": f"127.0.0.1:{_free_port()}",
        "num_processes": str(config.num_processes),
    }
    processes = []
    for index in range(config.num_processes):
        own = settings | {"process_id": str(index)} if config.num_processes > 1 else {}
        options = [text for name, value in own.items() for text in (f"--trainer.distributed.{name}", value)]
        processes.append(Process([sys.executable, "-m", "marin_rl.train", *arguments, *options], environment))
    return processes


@dataclasses.dataclass(frozen=True)
class _Exit:
    index: int
    status: int


class _Output:
    """Writes whole lines from several threads."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._lock = threading.Lock()

    def copy(self, stream: IO[bytes], prefix: str) -> None:
        """Write the lines of a stream until its end."""
        with stream:
            for line in stream:
                self.line(f"{prefix}{line.decode('utf-8', 'backslashreplace').rstrip()}")

    def line(self, text: str) -> None:
        """Write a line."""
        with self._lock:
            self._write(f"{text}\n")


def run_together(processes: Sequence[Process], stop_timeout: float, write: Callable[[str], object]) -> int:
    """Run processes until all have ended; if one fails, stop the others.

    SIGINT and SIGTERM to this process are passed on to all of them, once; a second one kills them. Call it in the main
    thread.

    Args:
        processes: the processes.
        stop_timeout: seconds that processes have to end after a signal or a failure, before they are killed.
        write: writes a line of output, prefixed by the index of its process; called by one thread at a time.

    Returns:
        0 if all processes ended with status 0; otherwise the exit status of the first that did not (128 + N for
        signal N).
    """
    events: queue.SimpleQueue[_Exit | int] = queue.SimpleQueue()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    output = _Output(write)
    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: events.put(number))
        for index, process in enumerate(processes):
            child = _start(process)
            children.append(child)
            assert child.stdout is not None
            # Two threads: programs that a process has started may keep its output open after its end.
            readers.append(threading.Thread(target=output.copy, args=(child.stdout, f"[{index}] "), daemon=True))
            readers[-1].start()
            threading.Thread(target=_wait_for, args=(index, child, events), daemon=True).start()
        status = _wait(children, stop_timeout, events, output)
        for reader in readers:
            reader.join(OUTPUT_TIMEOUT)
        return status
    finally:
        for child in children:
            _signal(child, signal.SIGKILL)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(
    children: "Sequence[subprocess.Popen[bytes]]",
    stop_timeout: float,
    events: "queue.SimpleQueue[_Exit | int]",
    output: _Output,
) -> int:
    result, running = 0, set(range(len(children)))
    deadline: float | None = None
    stopping = False
    while running:
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            output.line(f"[launch] processes {_names(running)} did not end within {stop_timeout:g} s; killing them")
            deadline = None
            _signal_all(children, running, signal.SIGKILL)
            continue
        if isinstance(event, int):
            # The first signal lets them save their state; they would end without it after a second one.
            _signal_all(children, running, signal.SIGKILL if stopping else event)
            deadline = deadline or time.monotonic() + stop_timeout
            stopping = True
            continue
        running.discard(event.index)
        if event.status == 0 or result != 0:
            continue
        result = event.status
        others = f"; stopping {_names(running)}" if running and not stopping else ""
        output.line(f"[launch] process {event.index} ended with status {event.status}{others}")
        if not stopping:
            _signal_all(children, running, signal.SIGTERM)
            deadline = time.monotonic() + stop_timeout
            stopping = True
    return result


def _start(process: Process) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        process.command,
        env={**os.environ, **process.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C at the terminal would otherwise reach it twice.
        start_new_session=True,
    )


def _wait_for(index: int, child: "subprocess.Popen[bytes]", events: "queue.SimpleQueue[_Exit | int]") -> None:
    events.put(_Exit(index, exit_status(child.wait())))


def _signal_all(children: "Sequence[subprocess.Popen[bytes]]", running: set[int], number: int) -> None:
    for index in running:
        _signal(children[index], number)


def _signal(child: "subprocess.Popen[bytes]", number: int) -> None:
    # SIGKILL also ends the programs that a process has started, such as Ray.
    if child.poll() is not None:
        return
    if number != signal.SIGKILL:
        child.send_signal(number)
        return
    # Another thread may have waited for it already, without having set its status.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _names(indices: set[int]) -> str:
    return ", ".join(map(str, sorted(indices)))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
