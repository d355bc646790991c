# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Memory, open files, processes, shared memory and temporary files of a soak, over its steps."""

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
MIB = 2**20
WARM_UP = 0.2
"""Share of the steps that does not count for trends: programs compile, and caches fill."""


def usage(trainer: int, children: Mapping[int, str], temporary: Path) -> dict[str, float]:
    """Measure a run now.

    Args:
        trainer: process id of the trainer.
        children: command lines of its descendants, by process id.
        temporary: the run's folder of temporary files, with those of Ray.

    Returns:
        Resident memory in MiB by kind of process (pages that processes share count in each), open files, threads and
        processes, shared memory in MiB (of all programs on this machine), and temporary files, in number and MiB.
    """
    kinds = {pid: _kind(name) for pid, name in children.items()} | {trainer: "trainer"}
    measured = dict.fromkeys(["trainer_mib", "workers_mib", "coordinator_mib", "ray_mib", "files", "threads"], 0.0)
    for pid, kind in kinds.items():
        # A process may end at any time.
        with contextlib.suppress(OSError, KeyError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            measured[f"{kind}_mib"] += int(status["VmRSS"].split()[0]) / 1024
            measured["threads"] += int(status["Threads"])
            measured["files"] += len(os.listdir(f"/proc/{pid}/fd"))
    sizes = list(_sizes(temporary))
    return {
        **measured,
        "processes": len(kinds),
        "shared_memory_mib": shared_memory(),
        "temporary_files": len(sizes),
        "temporary_mib": sum(sizes) / MIB,
    }


def shared_memory() -> float:
    """Return the used shared memory of this machine, in MiB."""
    shared = os.statvfs(SHARED_MEMORY)
    return (shared.f_blocks - shared.f_bfree) * shared.f_frsize / MIB


def _kind(name: str) -> str:
    return "workers" if name.startswith("ray::RayWorker") else "coordinator" if "::Coordinator" in name else "ray"


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            yield path.lstat().st_size


@contextlib.contextmanager
def sampled(measure: Callable[[], dict[str, float]], seconds: float) -> Iterator[list[dict[str, float]]]:
    """Measure regularly in a thread during the block.

    Args:
        measure: returns the measurements, which include `step`.
        seconds: time between two measurements.

    Yields:
        The measurements so far, each with `seconds` since the first.
    """
    samples: list[dict[str, float]] = []
    began, ended = time.monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            samples.append({"seconds": time.monotonic() - began, **measure()})

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def trends(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Summarize measurements by name: medians of the first, middle and last fifth of the steps, and the slope.

    Args:
        samples: see `sampled`; at least one in each fifth.

    Returns:
        `start`, `middle`, `end`, `most`, and `per_100_steps`: the least-squares slope after the warm-up.

    >>> trends([{"step": step, "files": 7 + step / 10} for step in range(101)])["files"]
    {'start': 8.0, 'middle': 12.0, 'end': 16.0, 'most': 17.0, 'per_100_steps': 10.0}
    """
    steps = [sample["step"] for sample in samples]
    last = max(steps)

    def median(name: str, low: float, high: float) -> float:
        return round(statistics.median(s[name] for s in samples if low * last <= s["step"] <= high * last), 1)

    def slope(name: str) -> float:
        pairs = [(s["step"], s[name]) for s in samples if s["step"] >= WARM_UP * last]
        return round(100 * statistics.linear_regression(*zip(*pairs, strict=True)).slope, 2)

    return {
        name: {
            "start": median(name, 0, 0.2),
            "middle": median(name, 0.4, 0.6),
            "end": median(name, 0.8, 1),
            "most": round(max(sample[name] for sample in samples), 1),
            "per_100_steps": slope(name),
        }
        for name in samples[0]
        if name not in ("step", "seconds")
    }
