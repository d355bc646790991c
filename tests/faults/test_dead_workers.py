# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of an asynchronous run are killed: the run continues and leaves no processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.soak import LiveRun, kill_in_transfer, pause, whole_and_once
from experiments.soak_train import hold_transfers
from tests.faults.live_run import (
    SILENCE,
    all_end,
    async_settings,
    each_of_one_version,
    live,
    started,
    verifiable_versions,
)
from tests.tiny_run import TinyRun, make_run


def async_run(finished_run: TinyRun, new_run: Callable[..., TinyRun], steps: int) -> LiveRun:
    settings = async_settings(
        num_steps=steps,
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
    run = async_run(finished_run, new_run, steps=30)
    with started(run):
        run.wait_until(lambda: run.steps >= 3, "step 3")
        (first, *_) = run.named("ray::Worker")
        os.kill(first, signal.SIGKILL)
        trains_on(run)
        for worker in run.named("ray::Worker"):
            os.kill(worker, signal.SIGKILL)
        trains_on(run)
        # Workers that are paused beyond the heartbeat timeout are dropped, and join again when they continue.
        given_up = run.records()[-1]["workers/lost"]
        pause(run.named("ray::Worker"), 2 * SILENCE)
        trains_on(run)
        assert run.records()[-1]["workers/lost"] > given_up
        (coordinator,) = run.named("ray::Coordinator")
        os.kill(coordinator, signal.SIGKILL)
        trains_on(run)
        children = run.children()
        assert run.end() == 0, run.output.read_text()
        assert [child for child in children if child.is_alive] == []
    assert whole_and_once(run, groups=4, members=4, staleness=1) == 30
    log = (run.run_dir / "log.txt").read_text()
    assert "the coordinator was restarted; submitting" in log


@pytest.mark.slow
def test_weight_server_killed_during_transfer_leaves_no_mixed_weights(tmp_path: Path) -> None:
    settings = async_settings(**verifiable_versions(tmp_path / "problems.jsonl"), num_steps=8, checkpoint__every=2)
    run = live(make_run(tmp_path, **settings))
    run.hold = tmp_path / "hold"
    # Step 4 publishes this version, so it is trained and saved, and the run cannot end without the version.
    hold_transfers(run.hold, 4)
    with started(run):
        run.wait_until(lambda: run.saved_steps >= 4, "the checkpoint of step 4")
        children = run.children()
        kill_in_transfer(run)
        all_end(children)
    saved = run.saved_steps
    with started(run):
        assert run.end() == 0, run.output.read_text()
    assert f"resuming after step {saved}, from " in (run.run_dir / "log.txt").read_text()
    assert whole_and_once(run, groups=4, members=4, staleness=1) == 8
    each_of_one_version(run)
