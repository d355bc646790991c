# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Faults of a user's environment in single episodes: an error at the start, an error in a step, and a hang."""

from pathlib import Path

import pytest

from marin_rl.runs.run_directory import RunDirectory
from marin_rl.sessions.replay import replay_step
from marin_rl.utils.event_loop import BackgroundLoop
from tests.tiny_run import TinyRun, without_timings
from tests.training.fault_cases import (
    ShortRuns,
    assert_nothing_else_is_lost,
    assert_trained,
    groups_of,
    rows_of,
    written,
)
from tests.training.reopened_run import config_of

ENVIRONMENT = """
    import asyncio
    import collections
    import string

    from marin_rl.environments.base import AbstractEnvironment, Split, Step
    from marin_rl.types import Message, Task


    class Letters(AbstractEnvironment):
        name = "letters"

        def __init__(self, faults):
            self.faults = faults
            self.started = collections.Counter()

        def tasks(self, split):
            letters = {Split.TRAIN: string.ascii_lowercase, Split.VALIDATION: "012", Split.HELD_OUT: "789"}[split]
            return [Task(letter, self.name, (Message(role="user", content=letter),), letter) for letter in letters]

        async def start(self, task, seed):
            self.started[task.id] += 1
            # Only the second attempt at a task.
            fault = self.faults.get(task.id) if self.started[task.id] == 2 else None
            if fault == "start":
                raise ConnectionError("no game today")
            return Episode(fault)


    class Episode:
        def __init__(self, fault):
            self.fault = fault
            self.turns = 0

        async def step(self, reply):
            self.turns += 1
            if self.turns == 1:
                return Step({}, (Message(role="user", content="?"),), done=False, metrics={"first": 1.0})
            if self.fault == "step":
                raise RuntimeError("the game crashed")
            if self.fault == "hang":
                await asyncio.Event().wait()
            return Step({"score": float(sum(reply.encode()) % 7)})

        async def close(self):
            if self.fault == "step":
                raise RuntimeError("it crashed before")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ShortRuns:
    folder = tmp_path_factory.mktemp("environment")
    written(folder / "letters.py", ENVIRONMENT)
    return ShortRuns(folder, sampling__max_new_tokens=2, rollouts__max_turns=2, rollouts__max_seconds=2.0)


def play(runs: ShortRuns, **faults: str) -> TinyRun:
    """Train with an environment that fails in the second attempts at these tasks."""
    environment = {"type": "file", "path": str(runs.folder / "letters.py"), "name": "Letters"}
    return runs.run(environment={**environment, "options": {"faults": faults}})


@pytest.mark.medium
def test_failing_and_hanging_episodes_affect_only_themselves(runs: ShortRuns, monkeypatch: pytest.MonkeyPatch):
    # The same limit would end the run if the event loop was slow to respond.
    responds = BackgroundLoop.responds
    monkeypatch.setattr(BackgroundLoop, "responds", lambda loop, seconds: responds(loop, 600.0))
    undisturbed = play(runs)
    assert_trained(undisturbed, [{}, {}])
    expected = rows_of(undisturbed, 1)
    tasks = [group[0]["task_id"] for group in groups_of(expected)]
    assert len(set(tasks)) == 4
    run = play(runs, **dict(zip(tasks, ("start", "step", "hang"), strict=False)))

    assert_trained(run, [{"rollouts/failed": 2.0, "rollouts/timed_out": 1.0}, {}])
    found = rows_of(run, 1)
    lost = {id: row for id, row in found.items() if row["status"] not in ("completed", "truncated")}
    assert [
        (row["task_id"], row["status"], row["error"].partition("\n")[0], len(row["turns"])) for row in lost.values()
    ] == [
        (tasks[0], "failed", "ConnectionError: no game today", 0),
        (tasks[1], "failed", "RuntimeError: the game crashed", 2),
        (tasks[2], "timed_out", "its environment took longer than 2 s (rollouts.max_seconds)", 2),
    ]
    assert [row["not_trained"] for row in found.values() if row["id"] in lost] == ["failed", "failed", "timed_out"]
    assert all(row["not_trained"] is None for row in found.values() if row["id"] not in lost)
    # Turns sampled before the failure are kept unchanged.
    for id, row in lost.items():
        for turn, before in zip(row["turns"], expected[id]["turns"], strict=False):
            assert (turn["token_ids"], turn["logprobs"]) == (before["token_ids"], before["logprobs"])
    assert_nothing_else_is_lost(found, expected, lost)
    assert "closing its episode failed: RuntimeError: it crashed before" in (run.path / "log.txt").read_text()


@pytest.mark.medium
def test_fully_failed_group_is_dropped(runs: ShortRuns, tmp_path: Path):
    # All attempts at one task of each step fail.
    code = ENVIRONMENT.replace("self.started[task.id] == 2", "self.started[task.id] > 0")
    everything = ShortRuns(tmp_path, sampling__max_new_tokens=2, rollouts__max_turns=2, filter={"type": "drop"})
    written(tmp_path / "letters.py", code)
    undisturbed = play(everything)
    expected = [rows_of(undisturbed, step) for step in (1, 2)]
    broken = [groups_of(rows)[1][0]["task_id"] for rows in expected]
    run = play(everything, **dict.fromkeys(broken, "step"))

    assert_trained(run, [{"rollouts/failed": 4.0, "filter/dropped_ungraded": 1}] * 2)
    for step, task in enumerate(broken, start=1):
        found = rows_of(run, step)
        lost = [id for id, row in found.items() if row["task_id"] == task]
        assert {id for id, row in found.items() if row["status"] == "failed"} == set(lost)
        assert len(lost) == 4
    assert_nothing_else_is_lost(rows_of(run, 1), expected[0], [row["id"] for row in groups_of(expected[0])[1]])

    # The dropped groups are stored, but a replay does not train on them.
    replayed = replay_step(RunDirectory(run.path), config_of(run), 2)
    assert (replayed.start, replayed.weight_difference) == (0, 0.0)
    assert without_timings(replayed.metrics) == without_timings(replayed.recorded)
