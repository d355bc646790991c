# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What runs below a process: found in /proc, and ended (Linux)."""

import contextlib
import functools
import os
import signal
import time
from typing import NamedTuple

_GONE = ("Z", "X")
"""States of a process that has ended and waits to be reaped."""


class Process(NamedTuple):
    """A process below another."""

    parent: int
    """The process that waits for it, or should."""
    group: int
    """Its process group."""
    has_ended: bool
    """Whether it has ended, and nobody has waited for it yet."""
    threads: int
    """Its threads, the first one included."""
    cpu_seconds: float
    """Processor time that it has used, its children's not included."""


def below(root: int) -> dict[int, Process]:
    """The processes below `root`, children of children included, and those that wait to be reaped."""
    children: dict[int, list[int]] = {}
    known: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            process = _read(int(entry))
            children.setdefault(process.parent, []).append(int(entry))
            known[int(entry)] = process
    found: dict[int, Process] = {}
    waiting = [root]
    while waiting:
        of_one = children.get(waiting.pop(), [])
        found |= {process: known[process] for process in of_one}
        waiting.extend(of_one)
    return found


def look_below(root: int) -> dict[int, Process]:
    """The processes below `root`, as `below` finds them, in time that other processes of the machine do not add to.

    It walks from parents to children, so it can miss processes that are forked or end meanwhile.
    """
    if not _kernel_lists_children():
        return below(root)
    found: dict[int, Process] = {}
    waiting = [root]
    while waiting:
        for child in _children(waiting.pop()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[child] = _read(child)
                waiting.append(child)
    return found


@functools.cache
def _kernel_lists_children() -> bool:
    return os.path.exists("/proc/thread-self/children")


def _children(process: int) -> list[int]:
    """The children of a process, also those that wait to be reaped."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as children:
                found += map(int, children.read().split())
    return found


def _read(process: int) -> Process:
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as statistics:
        # The second field, the name, is in parentheses and may hold anything.
        fields = statistics.read().rpartition(")")[2].split()
    return Process(
        parent=int(fields[1]),
        group=int(fields[2]),
        has_ended=fields[0] in _GONE,
        threads=int(fields[17]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def cpu_seconds_of(process: int) -> float:
    """Processor time that a process has used; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _read(process).cpu_seconds
    return 0.0


def descendants(root: int) -> dict[int, int]:
    """The processes below `root` that are still alive, children of children included, and the group of each."""
    return {number: process.group for number, process in below(root).items() if not process.has_ended}


def reap(spare: int | None) -> None:
    """Wait for the children of this process that have ended, so that their numbers are free again.

    Args:
        spare: a child that is waited for elsewhere, if any.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == spare:
                return
            os.waitpid(ended.si_pid, 0)


def is_soon_alone(process: int, seconds: float) -> bool:
    """Wait until a child of this process is its only descendant, and has one thread.

    A killed process can be reaped only after its last thread has ended, which can be later than its own state says.

    Args:
        process: the child, which must be alive.
        seconds: how long to wait.

    Returns:
        Whether `process` is the only descendant.
    """
    deadline = time.monotonic() + seconds
    while not _is_alone(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
        reap(process)
    return True


def _is_alone(process: int) -> bool:
    found = look_below(os.getpid())
    return list(found) == [process] and not found[process].has_ended and found[process].threads == 1


def pause(process: int, seconds: float) -> bool:
    """Stop a child of this process, and wait until it is stopped.

    Args:
        process: the child; SIGCONT lets it go on.
        seconds: how long to wait. A process that waits for a device or a child may not stop.

    Returns:
        Whether it is stopped.
    """
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(0.0001)
    return False


def end_descendants(spare: int | None, seconds: float) -> bool:
    """End every process below this one, also those that start meanwhile, and reap them.

    Orphans come to this process because it is a subreaper, so none is missed. Whole groups are ended at once, which
    a process that keeps forking cannot outrun; the group of one that has ended may live on.

    Args:
        spare: a process to leave, if any; it leads a group of its own, which is left too.
        seconds: when to give up.

    Returns:
        Whether none is left.
    """
    deadline = time.monotonic() + seconds
    ended: set[int] = set()
    while True:
        found = {number: process for number, process in below(os.getpid()).items() if number != spare}
        groups = {process.group for process in found.values()} - {os.getpgrp(), spare}
        alive = [number for number, process in found.items() if not process.has_ended]
        # A look around misses what forks and ends meanwhile, so it counts only after the groups were ended.
        if not alive and groups <= ended:
            reap(spare)
            return True
        if time.monotonic() > deadline:
            return False
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        ended |= groups
        for number in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        reap(spare)
        time.sleep(0.001)
