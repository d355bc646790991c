# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Resource limits of a sandbox call, and their enforcement with setrlimit."""

import dataclasses
import math
import os
import re
import resource
import signal
import sys


@dataclasses.dataclass(frozen=True)
class CallLimits:
    """Resource limits of one call."""

    wall_seconds: float
    """Seconds from the start of the call to its answer."""
    cpu_seconds: float
    """Seconds of CPU time, rounded up because the kernel counts whole seconds."""
    memory_bytes: int
    """Bytes of address space in addition to that of the loaded file."""
    processes: int
    """Processes and programs in addition to the call's own process."""
    threads: int
    """Threads of the call and its processes together, including the main thread of each."""
    file_bytes: int
    """Size in bytes of a single file that the call writes."""
    output_bytes: int
    """Size in bytes of stdout, of stderr and of the answer, each."""


_TASKS_OF_WORKER = 2
"""Tasks in the namespaces of a call besides its own: the worker and the forkserver."""

FOLDER_FILES = 4
"""Size limit of a call's folder, in files of the largest allowed size."""

OPEN_FILES = 64
"""Open files of a call."""


def limit_import(limits: CallLimits) -> None:
    """Set the limits on memory and files for a process that is about to load a user's file.

    The hard limit on memory leaves room for the calls, which inherit it and set their own limits.
    """
    if sys.platform == "linux":
        used = address_space()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory_bytes, used + 2 * limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_call(limits: CallLimits, loaded_bytes: int, has_namespaces: bool) -> None:
    """Set the limits for a process that is about to run a call.

    Args:
        limits: limits of the call.
        loaded_bytes: bytes of address space that the loaded file uses.
        has_namespaces: whether the user namespace contains only processes of this worker.
    """
    cpu = math.ceil(limits.cpu_seconds)
    # At the soft limit the kernel sends a signal that a call can ignore, at the hard limit it kills the process.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if has_namespaces and counts_threads_by_namespace():
        # The kernel exempts root; the worker then enforces the limit by counting.
        tasks = limits.threads + _TASKS_OF_WORKER
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    if sys.platform == "linux":
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        space = loaded_bytes + limits.memory_bytes
        if hard_limit != resource.RLIM_INFINITY:
            space = min(space, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    # Python ignores SIGXFSZ. By default it kills the process, which identifies the cause of the failure.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def address_space(process: int | None = None) -> int:
    """Return the bytes of address space of a process (Linux); of this process by default."""
    with open(f"/proc/{process or 'self'}/statm", encoding="ascii") as statistics:
        return int(statistics.read().split()[0]) * resource.getpagesize()


def counts_threads_by_namespace() -> bool:
    """Return whether the kernel counts RLIMIT_NPROC separately in each user namespace (since Linux 5.14).

    Older kernels count all threads of the user on the machine, including the trainer's.
    """
    if sys.platform != "linux":
        return False
    numbers = [int(number) for number in re.findall(r"\d+", os.uname().release)]
    return numbers[:2] >= [5, 14]
