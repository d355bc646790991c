# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import statistics

import pytest

from experiments.benchmarks.waiting_environment import TASKS, make_waiting
from marin_rl.environments.base import AbstractEnvironment, Split


def test_attempts_at_a_task_take_equally_long_and_tasks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = make_waiting(2.0, 0.5)
    assert isinstance(environment, AbstractEnvironment)
    tasks = environment.tasks(Split.TRAIN)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("experiments.benchmarks.waiting_environment.asyncio.sleep", sleep)

    async def play() -> list[float]:
        rewards = []
        for seed, task in enumerate((*tasks, tasks[0])):
            episode = await environment.start(task, seed)
            rewards.append((await episode.step("x" * (seed % 3))).rewards["correct"])
            await episode.close()
        return rewards

    rewards = asyncio.run(play())
    assert rewards[:4] == [0.0, 1.0, 0.0, 0.0]
    assert slept[-1] == slept[0]
    # The error of the mean of 2000 draws is 2·sqrt(e^0.25 − 1)/sqrt(2000) = 0.024.
    assert statistics.mean(slept) == pytest.approx(2.0, abs=0.1)
    assert len(set(slept)) == TASKS


def test_splits_share_no_problem() -> None:
    environment = make_waiting(1.0)
    problems = [{str(task.messages) for task in environment.tasks(split)} for split in Split]
    assert [len(texts) for texts in problems] == [TASKS] * 3
    assert len(set.union(*problems)) == 3 * TASKS
