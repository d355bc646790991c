# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`mode: async`: rollout workers, weight transfer over Arrow Flight, and a replay buffer."""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import LocalClient
from marin_rl.distributed.replay_buffer import ReplayBuffer
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner
from marin_rl.runs.rollout_store import read_rollouts
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.sessions.replay import replay_step
from marin_rl.training import worker
from tests.distributed.inline_executor import InlineExecutor
from tests.distributed.thread_workers import thread_workers
from tests.tiny_run import MIXTURE, TinyRun, outcome, without_timings
from tests.training.reopened_run import config_of
from tests.training.sampled_versions import each_of_one_version


@pytest.fixture(autouse=True)
def workers_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in without_timings(record).items() if not name.startswith("workers/")}


def trained_groups(run: TinyRun) -> dict[int, list[str]]:
    """Ids of the groups that each step trained on."""
    found: dict[int, list[str]] = {}
    for table in read_rollouts(run.path / "rollouts", None, purposes=["training"]):
        for row in table.select(["step", "group_id"]).to_pylist():
            names = found.setdefault(row["step"], [])
            if row["group_id"] not in names:
                names.append(row["group_id"])
    return found


@pytest.mark.medium
@pytest.mark.parametrize("refresh", ["between_groups", "in_flight"])
def test_async_without_staleness_equals_sync(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], refresh: str
) -> None:
    run = new_run(
        mode="async",
        replay__max_staleness=0,
        checkpoint__keep_every=1,
        checkpoint__every=1,
        workers={"refresh": refresh, "decode_steps_per_weight_poll": 1},
    )
    assert run.train() == 0
    for record, expected in zip(run.records(), finished_run.records(), strict=True):
        assert comparable(record) == comparable(expected)
    found, expected = outcome(run), outcome(finished_run)
    assert found["rollouts"] == expected["rollouts"]
    assert found["hf"] == expected["hf"]
    assert found["state"] == expected["state"]


@pytest.mark.medium
def test_sigterm_while_workers_are_busy_saves_last_finished_step(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(mode="async", replay__max_staleness=0, checkpoint__keep_every=1, checkpoint__every=1, num_steps=3)
    over = threading.Event()
    stream_groups, stop = worker.stream_groups, Coordinator.stop

    def hold_step_3(runner: RolloutRunner, requests: Sequence[GroupInput], **settings: Any) -> None:
        if any(request.group_id.startswith("train-3-") for request in requests):
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait()
        else:
            stream_groups(runner, requests, **settings)

    @functools.wraps(stop)
    def stop_holding(coordinator: Coordinator) -> None:
        stop(coordinator)
        over.set()

    with monkeypatch.context() as patched:
        patched.setattr(worker, "stream_groups", hold_step_3)
        patched.setattr(Coordinator, "stop", stop_holding)
        assert run.train("--checkpoint.every", "0") == 0
    assert run.steps() == [0, 2]
    assert run.train() == 0
    assert run.steps() == [0, 2, 3]
    assert [comparable(record) for record in run.records()] == [
        comparable(record) for record in finished_run.records()[:4]
    ]


@pytest.mark.medium
def test_workers_sample_ahead_and_interrupted_run_resumes(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(
        mode="async",
        replay__max_staleness=2,
        workers__num_workers=2,
        weights={"streams": 2},
        initialize_from=str(finished_run.path),
        warm_start__max_steps=0,
        checkpoint__every=1,
        checkpoint__keep_every=1,
        evaluation={"tasks": 2, "greedy": False, "every": 0},
    )
    from marin_rl.training.collect import GroupCollector

    draw_tasks, drawn = GroupCollector.draw_tasks, 0

    def dies_at_the_fourth(*arguments: Any) -> Any:
        nonlocal drawn
        drawn += 1
        if drawn == 4:
            raise OSError("pulled the plug")
        return draw_tasks(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(GroupCollector, "draw_tasks", dies_at_the_fourth)
        assert run.train() == 1
    died_after = run.steps()[-1]
    assert 0 < died_after < 6
    progress = json.loads((run.checkpoint(died_after) / "manifest.json").read_text())["progress"]
    waiting = ReplayBuffer(max_staleness=2)
    saved = run.checkpoint(died_after) / "replay.bin"
    waiting.load(saved.read_bytes(), saved)
    pending = [
        f"train-{step}-{index}" for step, index in (one["number"] for one in progress["scheduler"]["outstanding"])
    ]
    # Requested but unused groups are all restored, to be sampled or trained on.
    assert len(pending) + len(waiting) == 8

    assert run.train() == 0
    groups = trained_groups(run)
    assert sorted(groups) == [1, 2, 3, 4, 5, 6]
    assert [len(names) for _, names in sorted(groups.items())] == [4] * 6
    names = [name for step in groups.values() for name in step]
    assert len(set(names)) == len(names)
    later = {name for step, of_step in groups.items() if step > died_after for name in of_step}
    assert {entry.group.id for entry in waiting.expire(10**9)} <= later | set(pending)
    records = run.records()[1:]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert max(record["staleness/max"] for record in records) in (1, 2)
    # Workers may start late, and a step on restored groups does not ask for them.
    assert {record["workers/alive"] for record in records} <= {0.0, 1.0, 2.0}
    assert any(record["workers/alive"] for record in records)


@pytest.mark.medium
@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_tokens_of_former_weights_have_their_version(
    model: str, finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    """Also with experts that routers of former weights chose."""
    start = {"initialize_from": str(finished_run.path), "warm_start__max_steps": 0}
    run = new_run(
        mode="async",
        num_steps=4,
        replay={"max_staleness": 2},
        off_policy_correction={"type": "tis"},
        policy_loss={"type": "ppo_clip"},
        **(start if model == "llama" else MIXTURE),
        evaluation={"tasks": 2, "greedy": False, "every": 0},
        checkpoint={"every": 1, "keep_every": 1},
    )
    assert run.train() == 0
    each_of_one_version(run.path, max(int(record["staleness/max"]) for record in run.records()[1:]))
    # The stored log-probs of the learner are those of the run.
    replayed = replay_step(RunDirectory(run.path), config_of(run), 4)
    assert (replayed.start, replayed.weight_difference) == (3, 0.0)
    assert without_timings(replayed.metrics) == without_timings(replayed.recorded)


@pytest.mark.medium
def test_in_flight_generations_continue_with_new_weights(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An untrained policy rarely ends an answer early.
    run = new_run(
        mode="async",
        num_steps=3,
        replay__max_staleness=2,
        workers={"refresh": "in_flight", "decode_steps_per_weight_poll": 1},
        warm_start__max_steps=0,
        evaluation={"tasks": 2, "greedy": False, "every": 0},
    )
    polls, call = 0, LocalClient.call

    def poll_when_step_1_is_trained(client: LocalClient, method: Any, *arguments: Any, **named: Any) -> Any:
        # Polls 1 to 3 belong to the first four groups, which step 1 trains on; poll 5 follows the first tokens of the
        # groups that replace them.
        nonlocal polls
        if method is Coordinator.announced:
            polls += 1
            deadline = time.monotonic() + 600
            while polls == 5 and call(client, method).version < 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return call(client, method, *arguments, **named)

    monkeypatch.setattr(LocalClient, "call", poll_when_step_1_is_trained)
    monkeypatch.setattr("marin_rl.training.worker.ThreadPoolExecutor", InlineExecutor)
    monkeypatch.setattr(
        "marin_rl.rollouts.run_rollouts.RequestBatcher", functools.partial(RequestBatcher, max_wait=600.0)
    )
    assert run.train() == 0
    assert {step: len(names) for step, names in trained_groups(run).items()} == {1: 4, 2: 4, 3: 4}
    rows = [
        row
        for table in read_rollouts(run.path / "rollouts", None, purposes=["training"])
        for row in table.select(["step", "turns"]).to_pylist()
    ]
    mixed = [row for row in rows if any(turn["first_version"] != turn["last_version"] for turn in row["turns"])]
    versions = [(turn["first_version"], turn["last_version"]) for row in mixed for turn in row["turns"]]
    assert (0, 1) in versions
    shares = {record["step"]: record["staleness/mixed_share"] for record in run.records()[1:]}
    assert shares == {step: pytest.approx(sum(row["step"] == step for row in mixed) / 16) for step in (1, 2, 3)}
    assert shares[1] == 0 < shares[2]
    for row in rows:
        assert 0 <= row["step"] - 1 - min(turn["first_version"] for turn in row["turns"]) <= 2


@pytest.mark.medium
def test_worker_error_ends_run(new_run: Callable[..., TinyRun], capfd: pytest.CaptureFixture[str]) -> None:
    run = new_run(
        mode="async",
        warm_start__max_steps=0,
        evaluation={"tasks": 2, "greedy": False, "every": 0},
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker, "stream_groups", lambda *arguments, **settings: 1 / 0)
        assert run.train() == 1
    output = capfd.readouterr().err
    assert "error: a rollout worker ended with an error: worker-0: ZeroDivisionError: division by zero" in output


@pytest.mark.medium
def test_trainer_times_out_on_silent_workers(new_run: Callable[..., TinyRun], capfd) -> None:
    run = new_run(
        mode="async",
        workers__no_progress_timeout=1.0,
        warm_start__max_steps=0,
        evaluation={"tasks": 2, "greedy": False, "every": 0},
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker.RolloutWorker, "run", lambda *arguments: None)
        assert run.train() == 1
    output = capfd.readouterr().err
    assert (
        "no rollout worker finished a group in 1 s (workers.no_progress_timeout); 8 are pending (train-1-0, " in output
    )
