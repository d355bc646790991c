# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What runs below a process: found in /proc, and ended (Linux)."""

import contextlib
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


def below(root: int) -> dict[int, Process]:
    """The processes below `root`, children of children included, and those that wait to be reaped."""
    children: dict[int, list[int]] = {}
    known: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as statistics:
                # The second field, the name, is in parentheses and may hold anything.
                state, parent, group, *_ = statistics.read().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(entry))
            known[int(entry)] = Process(int(parent), int(group), state in _GONE)
    found: dict[int, Process] = {}
    waiting = [root]
    while waiting:
        of_one = children.get(waiting.pop(), [])
        found |= {process: known[process] for process in of_one}
        waiting.extend(of_one)
    return found


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


def is_alone(process: int) -> bool:
    """Whether a child of this process is its only one, alive, with a single thread and no child of its own."""
    return (
        _children(os.getpid()) == [process] and not _children(process) and len(_entries(f"/proc/{process}/task")) == 1
    )


def _children(process: int) -> list[int]:
    """The children of a process with one thread, also those that wait to be reaped."""
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as children:
            return [int(child) for child in children.read().split()]
    except FileNotFoundError:
        # The kernel was built without this file, or the process is gone.
        return [number for number, found in below(process).items() if found.parent == process]


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return []


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
