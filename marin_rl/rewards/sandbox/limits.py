# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What one call may use, and the kernel's resource limits that hold it to that."""

import dataclasses
import math
import os
import re
import resource
import signal
import sys


@dataclasses.dataclass(frozen=True)
class CallLimits:
    """What one call may use."""

    wall_seconds: float
    """Seconds from its start to its answer."""
    cpu_seconds: float
    """Seconds of processor time; the kernel counts whole ones, so it is rounded up."""
    memory_bytes: int
    """Address space beyond what the loaded file takes."""
    processes: int
    """Processes and programs beside the call itself."""
    threads: int
    """Threads of the call and of its processes together, each one's first thread included."""
    file_bytes: int
    """Length of any one file that it writes."""
    output_bytes: int
    """Length of each of: what it prints, what it writes to stderr, its answer."""


_TASKS_OF_WORKER = 2
"""In the namespaces of a call: the worker, and the process that the call was forked from."""

FOLDER_FILES = 4
"""How many files of the largest size a call's folder holds."""

OPEN_FILES = 64
"""Files that a call may hold open."""


def limit_import(limits: CallLimits) -> None:
    """Hold this process, which is about to load a user's file, to a call's limits on memory and files.

    The hard limit on memory leaves room for calls, which inherit it and get limits of their own.
    """
    if sys.platform == "linux":
        taken = address_space()
        resource.setrlimit(resource.RLIMIT_AS, (taken + limits.memory_bytes, taken + 2 * limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_call(limits: CallLimits, taken: int, has_namespaces: bool) -> None:
    """Hold this process, which is about to run a call, to its limits.

    Args:
        limits: what the call may use.
        taken: bytes of address space that the loaded file takes.
        has_namespaces: whether nobody else's processes are in its user namespace.
    """
    cpu = math.ceil(limits.cpu_seconds)
    # At the soft limit the kernel sends a signal that a call may ignore, at the hard one it ends the process.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if has_namespaces and counts_threads_by_namespace():
        # The kernel exempts root, which the worker's count alone then holds to it.
        tasks = limits.threads + _TASKS_OF_WORKER
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    if sys.platform == "linux":
        _, highest = resource.getrlimit(resource.RLIMIT_AS)
        space = taken + limits.memory_bytes
        if highest != resource.RLIM_INFINITY:
            space = min(space, highest)
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    # Python ignores it; by default it ends the process, so that the cause of a loss is not mistaken.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def address_space(process: int | None = None) -> int:
    """Bytes of address space that a process takes (Linux); this process by default."""
    with open(f"/proc/{process or 'self'}/statm", encoding="ascii") as statistics:
        return int(statistics.read().split()[0]) * resource.getpagesize()


def counts_threads_by_namespace() -> bool:
    """Whether the kernel counts RLIMIT_NPROC in each user namespace apart: since Linux 5.14.

    Older ones count all threads of the user on the machine, the trainer's included.
    """
    if sys.platform != "linux":
        return False
    numbers = [int(number) for number in re.findall(r"\d+", os.uname().release)]
    return numbers[:2] >= [5, 14]
