# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Asynchronous runs in separate processes, with two workers under Ray."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.lab.soak import Child, LiveRun
from tests.fork_server import popen
from tests.tiny_run import TinyRun

HEARTBEAT_TIMEOUT = 3.0
"""Heartbeat timeout of workers, in seconds."""
NO_PROGRESS_TIMEOUT = 600.0
"""Timeout of every wait, in seconds."""


def async_settings(**changes: Any) -> dict[str, Any]:
    """Return settings that make a tiny run asynchronous, without a warm start."""
    return {
        "mode": "async",
        "workers": {
            "num_workers": 2,
            "heartbeat_timeout": HEARTBEAT_TIMEOUT,
            "no_progress_timeout": NO_PROGRESS_TIMEOUT,
        },
        "warm_start__max_steps": 0,
        **changes,
    }


def verifiable_versions(problems: Path) -> dict[str, Any]:
    """Return settings with which `each_of_one_version` can check the weights behind each token.

    Args:
        problems: a file of them.
    """
    return {
        # An untrained policy is never correct; random rewards give it a signal.
        "environment": {
            "type": "random_control",
            "environment": {"type": "jsonl", "name": "ones", "path": str(problems)},
        },
        "checkpoint": {"every": 1, "keep_every": 1},
        "replay": {"max_staleness": 1},
        "off_policy_correction": {"type": "tis"},
        "policy_loss": {"type": "ppo_clip"},
        "evaluation": {"tasks": 0},
    }


def live(run: TinyRun) -> LiveRun:
    """Make the run's command in a separate process."""
    return LiveRun(run.argv, run.path, run.path.parent / "output.txt", NO_PROGRESS_TIMEOUT, popen=popen)


@contextlib.contextmanager
def started(run: LiveRun) -> Iterator[None]:
    """Start the run, and end it at the end of the block."""
    run.start()
    try:
        yield
    finally:
        run.kill()


def until(happened: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait for an event, also after the trainer has ended."""
    deadline = time.monotonic() + NO_PROGRESS_TIMEOUT
    while not happened():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def all_end(children: Iterable[Child]) -> None:
    """Wait until all of these processes have ended."""

    def left() -> list[str]:
        return [child for child in children if child.is_alive]

    until(lambda: not left(), lambda: f"still running: {left()}")
