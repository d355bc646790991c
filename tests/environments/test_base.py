# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.environments import ArithmeticConfig, Split, TextGameConfig
from marin_rl.environments.base import EpochStream, StreamState, TaskStream
from marin_rl.environments.streams import MixtureConfig, MixturePartConfig
from marin_rl.types import Message, Task
from tests.environments.fake_environments import Cards, CardsConfig, group


def test_worked_answer_is_the_default_demonstration():
    environment = ArithmeticConfig(size=50).build()
    task = environment.tasks(Split.TRAIN)[0]
    assert environment.can_demonstrate(task)
    assert environment.demonstrate(task) == (*task.messages, Message(role="assistant", content=task.answer))
    unworked = dataclasses.replace(task, worked_answer=None)
    assert not environment.can_demonstrate(unworked)
    with pytest.raises(ValueError, match="has no worked answer to imitate"):
        environment.demonstrate(unworked)


def test_games_prefer_their_demonstration_to_the_worked_answer():
    game = TextGameConfig(id="FrozenLake-v1", num_tasks=5, held_out=0.0, validation=0.0).build()
    task = dataclasses.replace(game.tasks(Split.TRAIN)[0], worked_answer="up")
    assert len(game.demonstrate(task)) > len(task.messages) + 1


MIXTURE = MixtureConfig((MixturePartConfig(CardsConfig("a"), 3.0), MixturePartConfig(CardsConfig("b", 7)))).build()
CURRICULUM = MixtureConfig(
    (
        MixturePartConfig(CardsConfig("a"), window=6, unlock_at=0.5, graduate_at=0.9),
        MixturePartConfig(CardsConfig("b", 7), after=("a",), window=6),
    )
).build()
STREAMS = {
    "one": Cards("a").stream(3),
    "mixture": MIXTURE.stream(3),
    "curriculum": CURRICULUM.stream(3),
}


def score(task: Task, index: int) -> float:
    """Score of an improving policy."""
    return float((index + len(task.id)) % 4 < index // 5)


def play(stream: TaskStream, state: StreamState, rounds: range) -> tuple[list[Task], StreamState]:
    """Draw tasks and update the state in each round."""
    drawn: list[Task] = []
    for index in rounds:
        tasks, state = stream.draw(state, 1 + index % 3)
        drawn += tasks
        state = stream.learn(state, [group(task, score(task, index), 1.0) for task in tasks])
    return drawn, state


@pytest.mark.medium
@pytest.mark.parametrize("name", STREAMS)
@given(cut=st.integers(0, 40))
def test_a_resumed_stream_draws_the_same_tasks(name: str, cut: int):
    stream = STREAMS[name]
    whole, end = play(stream, {}, range(40))
    before, state = play(stream, {}, range(cut))
    # Checkpoints store the state as JSON.
    restored = json.loads(json.dumps(state))
    assert restored == state
    after, again = play(stream, restored, range(cut, 40))
    # The old state has not changed.
    assert restored == state
    assert before + after == whole
    assert again == end
    assert stream.metrics(again) == stream.metrics(end)


def test_each_epoch_has_every_task_once_in_a_new_order():
    stream = EpochStream(Cards("a", 9), 0)
    drawn, _ = stream.draw({}, 27)
    passes = [[task.id for task in drawn[start : start + 9]] for start in (0, 9, 18)]
    everything = sorted(task.id for task in Cards("a", 9).tasks(Split.TRAIN))
    assert [sorted(one) for one in passes] == [everything] * 3
    assert len({tuple(one) for one in [*passes, everything]}) == 4
    assert EpochStream(Cards("a", 9), 1).draw({}, 27)[0] != drawn
