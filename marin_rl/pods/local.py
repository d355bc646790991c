# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training processes of one run on this machine, connected by `jax.distributed` on the loopback interface."""

import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from marin_rl.utils.settings.fields import check_at_least

DEVICES_FLAG = "--xla_force_host_platform_device_count"
POLL_SECONDS = 0.05
"""Seconds between two polls of the processes."""
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


def training_processes(config: LocalConfig, arguments: Sequence[str]) -> tuple[list[list[str]], dict[str, str]]:
    """Build the processes of a run; the first one is the main process.

    Args:
        config: number of processes and devices.
        arguments: arguments of `python -m marin_rl.train`.

    Returns:
        The command of each process, and the variables to set for all, in addition to those of this process.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICES_FLAG)]
    flags.append(f"{DEVICES_FLAG}={config.devices_per_process}")
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONUNBUFFERED": "1"}
    train = [sys.executable, "-m", "marin_rl.train", *arguments]
    if config.num_processes == 1:
        return [train], environment
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    prefix = "--trainer.distributed."
    train += [f"{prefix}initialize_jax_distributed", "true", f"{prefix}coordinator_address", f"127.0.0.1:{port}"]
    train += [f"{prefix}num_processes", str(config.num_processes), f"{prefix}process_id"]
    return [[*train, str(index)] for index in range(config.num_processes)], environment


def run_together(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    stop_timeout: float,
    write: Callable[[str], object],
) -> int:
    """Run commands until all have ended; if one fails, stop the others.

    SIGINT and SIGTERM to this process are passed on to all of them, once; a second one kills them. Call it in the main
    thread.

    Args:
        commands: program and arguments of each process.
        environment: variables to set, in addition to those of this process.
        stop_timeout: seconds that processes have to end after a signal or a failure, before they are killed.
        write: writes a line of output, prefixed by the index of its process; called by one thread at a time.

    Returns:
        0 if all processes ended with status 0; otherwise the exit status of the first that did not (128 + N for
        signal N).
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    lock = threading.Lock()

    def write_line(text: str) -> None:
        with lock:
            write(f"{text}\n")

    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: received.append(number))
        for index, command in enumerate(commands):
            child = _start(command, environment)
            children.append(child)
            readers.append(threading.Thread(target=_copy_lines, args=(child, index, write_line), daemon=True))
            readers[-1].start()
        status = _wait(children, stop_timeout, received, write_line)
        # Programs that a process has started may keep its output open after its end.
        for reader in readers:
            reader.join(OUTPUT_TIMEOUT)
        return status
    finally:
        _signal(children, signal.SIGKILL)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(
    children: "Sequence[subprocess.Popen[bytes]]",
    stop_timeout: float,
    received: list[int],
    write_line: Callable[[str], None],
) -> int:
    result, stopping, deadline = 0, False, math.inf
    while True:
        codes = [child.poll() for child in children]
        running = ", ".join(str(index) for index, code in enumerate(codes) if code is None)
        send = 0
        if result == 0 and (failed := [index for index, code in enumerate(codes) if code]):
            result = exit_status(codes[failed[0]] or 0)
            others = f"; stopping {running}" if running and not stopping else ""
            write_line(f"[launch] process {failed[0]} ended with status {result}{others}")
            send = 0 if stopping else signal.SIGTERM
        if not running:
            return result
        if received:
            # The first signal lets them save their state; they would end without it after a second one.
            send = signal.SIGKILL if stopping else received[0]
            del received[0]
        if time.monotonic() > deadline:
            write_line(f"[launch] processes {running} did not end within {stop_timeout:g} s; killing them")
            send, deadline = signal.SIGKILL, math.inf
        if send:
            _signal(children, send)
            deadline = deadline if stopping else time.monotonic() + stop_timeout
            stopping = True
        time.sleep(POLL_SECONDS)


def exit_status(returncode: int) -> int:
    """Convert a return code of `subprocess` to an exit status: 128 + N for signal N.

    >>> exit_status(1), exit_status(-9)
    (1, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A session of its own: Ctrl-C at the terminal would otherwise reach it twice.
        start_new_session=True,
    )


def _copy_lines(child: "subprocess.Popen[bytes]", index: int, write_line: Callable[[str], None]) -> None:
    assert child.stdout is not None
    with child.stdout as stream:
        for line in stream:
            write_line(f"[{index}] {line.decode('utf-8', 'backslashreplace').rstrip()}")


def _signal(children: "Sequence[subprocess.Popen[bytes]]", number: int) -> None:
    for child in children:
        if child.poll() is not None:
            continue
        # SIGKILL also ends the programs that a process has started, such as Ray.
        if number == signal.SIGKILL:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
