# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of an asynchronous run are killed while it trains: it goes on, and leaves nothing behind."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.soak import LARGE_TRANSFERS, LiveRun, kill_in_transfer, pause, whole_and_once
from marin_rl.rollouts.store import read_rollouts
from tests.faults.live_run import SILENCE, all_end, async_settings, live, started
from tests.tiny_run import TinyRun


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
def test_workers_and_coordinator_are_killed_and_paused_and_the_run_goes_on(
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
        # Workers that stand still for longer than they may be silent are given up; when they move again they join anew.
        given_up = run.records()[-1]["workers/lost"]
        pause(run.named("ray::Worker"), 2 * SILENCE)
        trains_on(run)
        assert run.records()[-1]["workers/lost"] > given_up
        (coordinator,) = run.named("ray::Office")
        os.kill(coordinator, signal.SIGKILL)
        trains_on(run)
        children = run.children()
        assert run.end() == 0, run.output.read_text()
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    assert whole_and_once(run, groups=4, members=4, staleness=1) == 30
    log = (run.run_dir / "log.txt").read_text()
    assert "the coordinator was started anew; it is told of" in log


@pytest.mark.slow
def test_a_killed_trainer_takes_its_workers_along_and_goes_on_from_its_checkpoint(
    finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    run = async_run(finished_run, new_run, steps=12)
    with started(run):
        run.wait_until(lambda: run.saved_steps >= 5, "the checkpoint of step 5")
        children = run.children()
        run.kill()
        all_end(children)
    with started(run):
        assert run.end() == 0, run.output.read_text()
    assert whole_and_once(run, groups=4, members=4, staleness=1) == 12


@pytest.mark.slow
def test_a_weight_server_killed_in_mid_transfer_leaves_no_mixed_weights(
    finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    # Weights as large as these are from scratch, and so never right; a coin gives them something to learn.
    problems = {"type": "jsonl", "name": "ones", "path": str(finished_run.config.with_name("problems.jsonl"))}
    settings = async_settings(
        num_steps=15,
        environment={"type": "random_control", "environment": problems},
        replay={"max_staleness": 1, "keep_old_weights": True},
        mismatch={"type": "tis"},
        policy_loss={"type": "ppo_clip"},
        checkpoint__every=5,
        evaluation={"tasks": 0},
        **{name.replace(".", "__"): value for name, value in LARGE_TRANSFERS.items()},
    )
    run = live(new_run(**settings))
    with started(run):
        run.wait_until(lambda: run.saved_steps >= 5, "the checkpoint of step 5")
        children = run.children()
        kill_in_transfer(run)
        all_end(children)
    saved = run.saved_steps
    with started(run):
        assert run.end() == 0, run.output.read_text()
    assert f"resuming after step {saved}, from " in (run.run_dir / "log.txt").read_text()
    assert whole_and_once(run, groups=4, members=4, staleness=1) == 15
    for row in played(run):
        for turn in row["turns"]:
            assert row["step"] - 2 <= turn["first_version"] == turn["last_version"] < row["step"]
    records = run.records()[1:]
    # Each token is as likely under the weights that it is said to be of as its sampler found: both compute in float32.
    assert max(record["mismatch/logprob_difference_max"] for record in records) < 1e-4
    # Under the weights of another version it is not.
    assert max(record["staleness/max"] for record in records) == 1
    assert max(abs(record["val/ratio"] - 1) for record in records) > 1e-3


def played(run: LiveRun) -> list[dict[str, Any]]:
    """Steps and turns of all stored rollouts."""
    tables = read_rollouts(run.run_dir / "rollouts", None, ["step", "turns"], purposes=["training"])
    return [row for table in tables for row in table.to_pylist()]
