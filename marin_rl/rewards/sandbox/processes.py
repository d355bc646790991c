# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Descendants of a process: listed from /proc, and killed (Linux)."""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_GONE = ("Z", "X")
"""States of a process that has ended but was not reaped."""


class Process(NamedTuple):
    """A descendant of a process."""

    parent: int
    """Process id of its parent."""
    group: int
    """Id of its process group."""
    has_ended: bool
    """Whether it has ended but was not reaped."""
    is_stopped: bool
    """Whether a signal has stopped it."""
    threads: int
    """Number of its threads, including the main thread."""
    cpu_seconds: float
    """CPU time that it has used, without its children's."""


def list_descendants(root: int) -> dict[int, Process]:
    """List all descendants of `root` by process id, including those that were not reaped."""
    children: dict[int, list[int]] = {}
    by_id: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            process = _read(int(entry))
            children.setdefault(process.parent, []).append(int(entry))
            by_id[int(entry)] = process
    result: dict[int, Process] = {}
    pending = [root]
    while pending:
        found = children.get(pending.pop(), [])
        result |= {process: by_id[process] for process in found}
        pending.extend(found)
    return result


def scan_descendants(root: int) -> dict[int, Process]:
    """List the descendants of `root` like `list_descendants`, in time independent of the machine's other processes.

    It walks from parents to children, so it can miss processes that start or end meanwhile.
    """
    if not _kernel_lists_children():
        return list_descendants(root)
    result: dict[int, Process] = {}
    pending = [root]
    while pending:
        for child in _children(pending.pop()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                result[child] = _read(child)
                pending.append(child)
    return result


@functools.cache
def _kernel_lists_children() -> bool:
    return os.path.exists("/proc/thread-self/children")


def _children(process: int) -> list[int]:
    """List the children of a process, including those that were not reaped."""
    result: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children", encoding="ascii") as children:
                result += map(int, children.read().split())
    return result


def _read(process: int) -> Process:
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as statistics:
        # The second field, the name, is in parentheses and may contain any text.
        fields = statistics.read().rpartition(")")[2].split()
    return Process(
        parent=int(fields[1]),
        group=int(fields[2]),
        has_ended=fields[0] in _GONE,
        is_stopped=fields[0] == "T",
        threads=int(fields[17]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def cpu_seconds_of(process: int) -> float:
    """Return the CPU time in seconds that a process has used; 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _read(process).cpu_seconds
    return 0.0


def exceeded_count(processes: int, threads: int) -> str | None:
    """Return the limit that the descendants of this process exceed: `processes`, `threads`, or None.

    Processes that have ended count until their parent has reaped them, because they occupy process ids. The thread of
    the forkserver does not count.
    """
    own = os.getpid()
    found = scan_descendants(own).values()
    if sum(not (process.has_ended and process.parent == own) for process in found) > processes:
        return "processes"
    return "threads" if sum(process.threads for process in found) - 1 > threads else None


def reap(spare: int | None) -> None:
    """Reap the children of this process that have ended, except `spare`, which is reaped elsewhere."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid == spare:
                return
            os.waitpid(ended.si_pid, 0)


def wait_until_alone(process: int, seconds: float) -> bool:
    """Wait until a child of this process is the only descendant and has a single thread.

    A killed process can be reaped only after its last thread has ended, which can be after its state has changed. The
    child must be alive. Returns whether this happened within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not _is_alone(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
        reap(process)
    return True


def _is_alone(process: int) -> bool:
    found = scan_descendants(os.getpid())
    return list(found) == [process] and not found[process].has_ended and found[process].threads == 1


def pause(process: int, seconds: float) -> bool:
    """Stop a child of this process with SIGSTOP and wait until it is stopped; SIGCONT resumes it.

    Returns whether it stopped within `seconds`. A process that waits for a device or a child may not.
    """
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, process, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
            return True
        time.sleep(0.0001)
    return False


@contextlib.contextmanager
def stopped_descendants(spare: int | None, seconds: float) -> Iterator[None]:
    """Stop the descendants of this process while a `with` block runs, so that they change nothing meanwhile.

    Whole process groups are stopped at once, which a process that forks cannot outrun.

    Args:
        spare: a process to leave running, if any; the process group that it leads is left running too.
        seconds: time limit in seconds for stopping them. A process that waits for a device may not stop.
    """
    deadline = time.monotonic() + seconds
    # Negative numbers are process groups.
    stopped: set[int] = set()
    last: set[int] = set()
    try:
        while time.monotonic() < deadline:
            found = {number: one for number, one in scan_descendants(os.getpid()).items() if number != spare}
            groups = {-process.group for process in found.values() if process.group not in (os.getpgrp(), spare)}
            running = {number for number, one in found.items() if not (one.has_ended or one.is_stopped)}
            # A scan misses the children of a process that ends meanwhile; the next scan finds them.
            if not running and groups <= stopped and found.keys() == last:
                break
            last = set(found)
            _signal(groups | running, signal.SIGSTOP)
            stopped |= groups | running
            time.sleep(0.0001)
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_descendants(spare: int | None, seconds: float) -> bool:
    """Kill and reap all descendants of this process, including those that start meanwhile.

    This process is a subreaper and adopts orphans, so none is missed. Whole process groups are killed at once, which a
    fork bomb cannot outrun; a group can outlive its leader.

    Args:
        spare: a process to keep, if any; the process group that it leads is kept too.
        seconds: time limit in seconds.
    """
    deadline = time.monotonic() + seconds
    ended: set[int] = set()
    while True:
        found = {number: process for number, process in list_descendants(os.getpid()).items() if number != spare}
        groups = {process.group for process in found.values()} - {os.getpgrp(), spare}
        alive = [number for number, process in found.items() if not process.has_ended]
        # A scan misses processes that start or end meanwhile, so it is reliable only after the groups were killed.
        if not alive and groups <= ended:
            reap(spare)
            return True
        if time.monotonic() > deadline:
            return False
        _signal([*(-group for group in groups), *alive], signal.SIGKILL)
        ended |= groups
        reap(spare)
        time.sleep(0.001)
