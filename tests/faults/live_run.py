# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Asynchronous runs in processes of their own, with two workers under Ray."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.soak import Child, LiveRun
from marin_rl.rollouts.store import read_rollouts
from tests.tiny_run import TinyRun

SILENCE = 3.0
"""Seconds that a worker may be silent."""
PATIENCE = 600.0
"""Seconds that anything may take on a busy machine."""


def async_settings(**changes: Any) -> dict[str, Any]:
    """What makes a tiny run an asynchronous one that begins to train at once."""
    return {
        "mode": "async",
        "workers": {"num_workers": 2, "heartbeat_timeout": SILENCE, "no_progress_timeout": PATIENCE},
        "warm_start__max_steps": 0,
        **changes,
    }


def verifiable_versions(problems: Path) -> dict[str, Any]:
    """Changes to a run that let `each_of_one_version` check which weights sampled each token.

    Args:
        problems: a file of them.
    """
    return {
        # An untrained policy is never right; random rewards give it something to learn.
        "environment": {
            "type": "random_control",
            "environment": {"type": "jsonl", "name": "ones", "path": str(problems)},
        },
        "replay": {"max_staleness": 1, "keep_sampling_weights": True},
        "off_policy_correction": {"type": "tis"},
        "policy_loss": {"type": "ppo_clip"},
        "evaluation": {"tasks": 0},
    }


def each_of_one_version(run: LiveRun) -> None:
    """See that a run with `verifiable_versions`, which has ended, sampled with weights that were never a mixture."""
    tables = read_rollouts(run.run_dir / "rollouts", None, ["step", "turns"], purposes=["training"])
    for row in (row for table in tables for row in table.to_pylist()):
        for turn in row["turns"]:
            assert row["step"] - 2 <= turn["first_version"] == turn["last_version"] < row["step"]
    records = run.records()[1:]
    # Each token is as likely under the weights that it is said to be of as its sampler found: both compute in float32.
    assert max(record["mismatch/logprob_difference_max"] for record in records) < 1e-4
    # Under the weights of another version it is not.
    assert max(record["staleness/max"] for record in records) == 1
    assert max(abs(record["val/ratio"] - 1) for record in records) > 1e-3


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


def all_end(children: Iterable[Child]) -> None:
    """Wait until none of these processes is left."""

    def left() -> list[str]:
        return [child for child in children if child.is_alive]

    until(lambda: not left(), lambda: f"still running: {left()}")
