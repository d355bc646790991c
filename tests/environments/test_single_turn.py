# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.rewards.patterns import FormatConfig
from marin_rl.types import Message, Task

TASK = Task(id="a", environment="test", messages=(Message(role="user", content="1+1="),), answer="2")


def environment(**fields) -> SingleTurnEnvironment:
    settings = {
        "name": "test",
        "splits": {Split.TRAIN: [TASK], Split.VALIDATION: [], Split.HELD_OUT: []},
        "score": lambda task, reply: float(reply == task.answer),
    }
    return SingleTurnEnvironment(**{**settings, **fields})


def test_one_reply_ends_the_episode():
    step = environment().start(TASK, seed=0).step("2")
    assert (step.rewards, step.messages, step.done) == ({"correct": 1.0}, (), True)


def test_format_is_a_component_of_its_own():
    made = environment(format=FormatConfig(regex=r"\d+", weight=0.5))
    assert made.start(TASK, 0).step("3").rewards == {"correct": 0.0, "format": 0.5}
    assert made.start(TASK, 0).step("two").rewards == {"correct": 0.0, "format": 0.0}


def test_reply_regex_takes_the_scored_part():
    made = environment(reply_regex=r"<a>(.*?)</a>", format=FormatConfig(regex=r"<a>.*</a>"))
    assert made.start(TASK, 0).step("<a>2</a>").rewards == {"correct": 1.0, "format": 1.0}
    assert made.start(TASK, 0).step("2").rewards == {"correct": 0.0, "format": 0.0}


def test_a_raising_grader_propagates():
    def broken(task: Task, reply: str) -> float:
        raise ZeroDivisionError("in the reward")

    with pytest.raises(ZeroDivisionError, match="in the reward"):
        environment(score=broken).start(TASK, 0).step("2")


def test_an_episode_is_used_once():
    episode = environment().start(TASK, 0)
    episode.step("2")
    with pytest.raises(RuntimeError, match="task 'a': the episode is over"):
        episode.step("2")


def test_a_task_of_another_environment_is_refused():
    with pytest.raises(ValueError, match="environment 'other' cannot grade task 'a' of 'test'"):
        environment(name="other").start(TASK, 0)
