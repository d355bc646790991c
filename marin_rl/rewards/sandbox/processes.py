# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What runs below a process: found in /proc, and ended (Linux)."""

import contextlib
import os
import signal
import time
from collections.abc import Set as AbstractSet

_GONE = ("Z", "X")
"""States of a process that has ended and waits to be reaped."""


def descendants(root: int) -> set[int]:
    """The processes below `root` that are still alive, children of children included."""
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as statistics:
                # The second field, the name, is in parentheses and may hold anything.
                state, parent, *_ = statistics.read().rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(entry))
            if state not in _GONE:
                alive.add(int(entry))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found & alive


def end_descendants(spare: AbstractSet[int], seconds: float) -> bool:
    """End every process below this one, also those that start meanwhile.

    Orphans come to this process because it is a subreaper, so none is missed.

    Args:
        spare: processes to leave.
        seconds: when to give up.

    Returns:
        Whether none is left.
    """
    deadline = time.monotonic() + seconds
    while found := descendants(os.getpid()) - spare:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
