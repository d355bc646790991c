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
from typing import IO, Annotated

from annotated_types import Ge

from marin_rl.utils.settings.checks import ConfigSection

DEVICES_FLAG = "--xla_force_host_platform_device_count"
POLL_SECONDS = 0.05
"""Seconds between two polls of the processes."""
OUTPUT_TIMEOUT = 5.0
"""Seconds to wait for the rest of the output after the end of all processes."""


@dataclasses.dataclass(frozen=True)
class LocalConfig(ConfigSection):
    """Several training processes on the CPUs of this machine."""

    num_processes: Annotated[int, Ge(1)] = 2
    """Number of training processes, as many as a slice has hosts."""
    devices_per_process: Annotated[int, Ge(1)] = 1
    """CPU devices of each process, as many as a host has chips."""
    stop_timeout: Annotated[float, Ge(0)] = 120.0
    """Seconds that processes have to end after Ctrl-C, or after another process failed, before they are killed."""


def training_processes(config: LocalConfig, arguments: Sequence[str]) -> tuple[list[list[str]], dict[str, str]]:
    """Build the processes of a run; the first one is the main process.

    `arguments` are those of `python -m marin_rl.train`.

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
    children: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    deadline, status, lock = math.inf, 0, threading.Lock()

    def write_line(text: str) -> None:
        with lock:
            write(f"{text}\n")

    def copy_lines(index: int, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                write_line(f"[{index}] {line.decode('utf-8', 'backslashreplace').rstrip()}")

    def stop(number: int, frame: object = None) -> None:
        nonlocal deadline
        # The first signal lets them save their state; they would end without it after a second one.
        _signal(children, number if deadline == math.inf else signal.SIGKILL)
        deadline = min(deadline, time.monotonic() + stop_timeout)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            signal.signal(number, stop)
        for index, command in enumerate(commands):
            # In a separate session: Ctrl-C at the terminal would otherwise reach it twice.
            child = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            children.append(child)
            readers.append(threading.Thread(target=copy_lines, args=(index, child.stdout), daemon=True))
            readers[-1].start()
        is_killed, running = False, "all"
        while running:
            codes = [child.poll() for child in children]
            running = ", ".join(str(index) for index, code in enumerate(codes) if code is None)
            if status == 0 and (failed := next(((i, code) for i, code in enumerate(codes) if code), None)):
                status = failed[1] if failed[1] > 0 else 128 - failed[1]
                stops = running and deadline == math.inf
                others = f"; stopping {running}" if stops else ""
                write_line(f"[launch] process {failed[0]} ended with status {status}{others}")
                if stops:
                    stop(signal.SIGTERM)
            if running and time.monotonic() > deadline and not is_killed:
                write_line(f"[launch] processes {running} did not end within {stop_timeout:g} s; killing them")
                is_killed = True
                _signal(children, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        # Programs that a process has started may keep its output open after its end.
        for reader in readers:
            reader.join(OUTPUT_TIMEOUT)
        return status
    finally:
        _signal(children, signal.SIGKILL)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _signal(children: "Sequence[subprocess.Popen[bytes]]", number: int) -> None:
    for child in (child for child in children if child.poll() is None):
        # SIGKILL also ends the programs that a process has started, such as Ray.
        if number == signal.SIGKILL:
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
