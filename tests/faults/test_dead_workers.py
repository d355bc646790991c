# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of an asynchronous run are killed: the run continues and leaves no processes."""

import os
import signal
from collections.abc import Callable

import pytest

from experiments.lab.soak import LiveRun, pause, whole_and_once
from tests.faults.live_run import HEARTBEAT_TIMEOUT, async_settings, live, started
from tests.tiny_run import TinyRun


def endless_run(finished_run: TinyRun, new_run: Callable[..., TinyRun]) -> LiveRun:
    """A run that ends when it is asked to: the number of its steps while faults happen depends on the machine."""
    settings = async_settings(
        num_steps=1_000_000,
        replay__max_staleness=1,
        initialize_from=str(finished_run.path),
        checkpoint__every=5,
        evaluation={"tasks": 2, "greedy": False, "every": 0},
    )
    return live(new_run(**settings))


def trains_on(run: LiveRun, steps: int = 3) -> None:
    after = run.steps
    run.wait_until(lambda: run.steps >= after + steps, f"step {after + steps}")


@pytest.mark.slow
def test_run_survives_killed_and_paused_workers_and_coordinator(
    finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    run = endless_run(finished_run, new_run)
    with started(run):
        run.wait_until(lambda: run.steps >= 3, "step 3")
        (first, *_) = run.named("ray::RayWorker")
        os.kill(first, signal.SIGKILL)
        trains_on(run)
        for worker in run.named("ray::RayWorker"):
            os.kill(worker, signal.SIGKILL)
        trains_on(run)
        # Workers that are paused beyond the heartbeat timeout are dropped, and join again when they continue.
        # A coordinator that was itself delayed may hear of them first.
        given_up = run.records()[-1]["workers/lost"]
        while run.records()[-1]["workers/lost"] == given_up:
            pause(run.named("ray::RayWorker"), 2 * HEARTBEAT_TIMEOUT)
            trains_on(run)
        (coordinator,) = run.named("ray::Coordinator")
        os.kill(coordinator, signal.SIGKILL)
        trains_on(run)
        children = run.children()
        assert run.process is not None
        run.process.terminate()
        assert run.end() == 0, run.output.read_text()
        assert [child for child in children if child.is_alive] == []
    assert whole_and_once(run, groups=4, members=4, staleness=1) == run.saved_steps >= 15
    log = (run.run_dir / "log.txt").read_text()
    assert "the coordinator was restarted; submitting" in log
