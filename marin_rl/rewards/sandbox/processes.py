# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What runs below a process: found in /proc, and ended (Linux)."""

import contextlib
import os
import signal
import time

_GONE = ("Z", "X")
"""States of a process that has ended and waits to be reaped."""


def descendants(root: int) -> dict[int, int]:
    """The processes below `root` that are still alive, children of children included, and the group of each."""
    children: dict[int, list[int]] = {}
    groups: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as statistics:
                # The second field, the name, is in parentheses and may hold anything.
                state, parent, group, *_ = statistics.read().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(entry))
            if state not in _GONE:
                groups[int(entry)] = int(group)
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found |= {process: groups[process] for process in below if process in groups}
        waiting.extend(below)
    return found


def end_descendants(spare: int | None, seconds: float) -> bool:
    """End every process below this one, also those that start meanwhile.

    Orphans come to this process because it is a subreaper, so none is missed. Whole groups are ended at once, which
    a process that keeps forking cannot outrun.

    Args:
        spare: a process to leave, if any.
        seconds: when to give up.

    Returns:
        Whether none is left.
    """
    deadline = time.monotonic() + seconds
    own = os.getpgrp()
    while found := {process: group for process, group in descendants(os.getpid()).items() if process != spare}:
        for group in set(found.values()) - {own, spare}:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
