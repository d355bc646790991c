# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Wall-clock time, CPU time and memory of a program's steps, measured from another process.

The program appends one line per step to a file. So programs in other environments are measured in the same way.
"""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.lab.benchmarks.measurement import BenchmarkedRunError

POLL_SECONDS = 0.01
TAIL_CHARACTERS = 4000


@dataclasses.dataclass(frozen=True)
class WatchedStep:
    """One step."""

    at: float
    """Time at which its line was seen, in seconds since the epoch."""
    seconds: float
    """Wall-clock seconds since the previous step, or since the start of the process."""
    cpu_seconds: float
    """CPU seconds of the process and its children in that time."""
    line: Mapping[str, Any]
    """JSON object that the program wrote."""


@dataclasses.dataclass(frozen=True)
class WatchedRun:
    """All steps of one process."""

    steps: tuple[WatchedStep, ...]
    """Steps in order; the first includes the start of the process."""
    peak_bytes: int
    """Sum of the peak resident memory of the process and its children."""
    load: tuple[float, float]
    """Load average (1 minute) before and after the run."""


def watch(
    command: Sequence[str],
    lines: Path,
    log: Path,
    *,
    cores: Sequence[int],
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
) -> WatchedRun:
    """Run a program and measure its steps.

    Args:
        command: the program.
        lines: new file to which the program appends a JSON object with a `step` for each step; steps below 1 are
            skipped.
        log: new file for the program's output.
        cores: cores that the program may use.
        cwd: working directory.
        env: environment variables.
        timeout: seconds after which the program is ended, with the processes that it started.

    Raises:
        BenchmarkedRunError: if the program fails or takes too long; the message has the end of its output.
        FileExistsError: if `lines` exists, whose steps would count as those of this run.
    """
    if lines.exists():
        raise FileExistsError(f"{str(lines)!r} has the steps of an earlier run; remove it, or choose another folder")
    load = os.getloadavg()[0]
    steps: list[WatchedStep] = []
    peak, cpu, cpu_of_others = 0, 0.0, _cpu_of_ended_children()
    before = started = time.time()
    with log.open("wb") as output, pinned(cores):
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=env, start_new_session=True
        )
    try:
        ended = False
        while not ended:
            # Lines are read once more after the end.
            ended = process.poll() is not None
            for line in _new_lines(lines, len(steps)):
                now = time.time()
                used = _cpu_of_ended_children() - cpu_of_others if ended else cpu_seconds(process.pid)
                peak = max(peak, peak_bytes(process.pid))
                steps.append(WatchedStep(now, now - before, max(used - cpu, 0.0), line))
                before, cpu = now, used
            if time.time() - started > timeout:
                raise BenchmarkedRunError(f"{list(command)} did not end within {timeout:.0f} s:\n{_tail(log)}")
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            # With the processes that it started.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode or not steps:
        status = f"ended with status {process.returncode} after {len(steps)} steps"
        raise BenchmarkedRunError(f"{list(command)} {status}:\n{_tail(log)}")
    return WatchedRun(tuple(steps), peak, (load, os.getloadavg()[0]))


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts, to some cores; does nothing if the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_seconds(pid: int) -> float:
    """Return user and system seconds of a process and its descendants, ended children included; 0 without /proc."""
    ticks = sum(sum(int(field) for field in fields[11:15]) for fields in _tree(pid).values())
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_of_ended_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peak_bytes(pid: int) -> int:
    """Return the sum of the peak resident memory of a process and its descendants; 0 without /proc.

    Memory that forked processes share counts in each of them.
    """
    total = 0
    for member in _tree(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{member}/status").read_text()
            total += sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total


def _tree(pid: int) -> dict[int, list[str]]:
    """Return the fields after the name in /proc/PID/stat for a process and its descendants."""
    found: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may contain any character.
            found[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    members = {pid} & found.keys()
    while more := {child for child, fields in found.items() if int(fields[1]) in members} - members:
        members |= more
    return {member: found[member] for member in members}


def _new_lines(path: Path, seen: int) -> list[dict[str, Any]]:
    """Return complete lines of steps from 1 after the first `seen` ones."""
    if not path.exists():
        return []
    complete = path.read_text().rpartition("\n")[0]
    parsed = [json.loads(line) for line in complete.splitlines()]
    return [line for line in parsed if line["step"] >= 1][seen:]


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-TAIL_CHARACTERS:]
