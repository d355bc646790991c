# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Asynchronous runs in processes of their own, with two workers under Ray."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.soak import LiveRun
from tests.tiny_run import TinyRun

SILENCE = 3.0
"""Seconds that a worker may be silent."""
PATIENCE = 600.0
"""Seconds that anything may take on a busy machine."""


def async_settings(**changes: Any) -> dict[str, Any]:
    """What makes a tiny run an asynchronous one that begins to train at once."""
    return {
        "mode": "async",
        "workers": {"num_workers": 2, "silence": SILENCE, "patience": PATIENCE},
        "warm_start__max_steps": 0,
        **changes,
    }


def live(run: TinyRun) -> LiveRun:
    """The run's command, in a process of its own."""
    return LiveRun(run.argv, run.path, run.path.parent / "output.txt", PATIENCE)


@contextlib.contextmanager
def started(run: LiveRun) -> Iterator[None]:
    """The run, while it runs; ended at the end of the block."""
    run.start()
    try:
        yield
    finally:
        run.kill()


def until(happened: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait for something that happens though the trainer has ended."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def all_end(children: Mapping[int, str]) -> None:
    """Wait until none of these processes is left."""

    def left() -> list[str]:
        return [name for pid, name in children.items() if Path(f"/proc/{pid}").exists()]

    until(lambda: not left(), lambda: f"still running: {left()}")
