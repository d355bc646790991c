# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
from collections import deque

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments.base import Split, Step
from marin_rl.environments.games import View, find_action
from marin_rl.environments.gymnasium_games import draw_start, make_prototype
from marin_rl.environments.text_game import TextGameConfig, TextGameEnvironment, parse_action
from marin_rl.types import Message, Task
from tests.environments.episodes import play

STILL = {"is_slippery": False}


def lake(**changes) -> TextGameConfig:
    return TextGameConfig(**{"id": "FrozenLake-v1", "options": STILL, "num_tasks": 60, "validation": 0.1, **changes})


def whole(**changes) -> TextGameEnvironment:
    """Build an environment with all games in the training split."""
    return lake(held_out=0.0, validation=0.0, **changes).build()


def tasks(environment: TextGameEnvironment) -> list[Task]:
    return [task for split in Split for task in environment.tasks(split)]


def replies_of(messages: tuple[Message, ...]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def rewards(steps: list[Step], name: str) -> float:
    return sum(step.rewards[name] for step in steps)


LINE = ["SFFG"]
"""FrozenLake with one row: the goal is three steps to the right."""


def line(**changes) -> tuple[TextGameEnvironment, Task]:
    environment = whole(options={**STILL, "desc": LINE}, num_tasks=1, **changes)
    return environment, environment.tasks(Split.TRAIN)[0]


def test_an_episode_ends_at_the_goal():
    environment, task = line(view=View.COMPACT)
    assert [message["content"] for message in task.messages] == ["A..G"]
    steps = play(environment, task, ["r", "l", "r", "r", "r"])
    assert [step.messages[0]["content"] for step in steps[:-1]] == [".A.G", "A..G", ".A.G", "..AG"]
    assert [step.action for step in steps] == ["right", "left", "right", "right", "right"]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert [dict(step.rewards) for step in steps] == [{"correct": 0.0, "game": 0.0}] * 4 + [
        {"correct": 1.0, "game": 1.0}
    ]
    assert dict(steps[-1].metrics) == {"success": 1.0, "steps": 5.0, "invalid_actions": 0.0}
    hole = whole(options={**STILL, "desc": ["SH", "FG"]}, num_tasks=1)
    [step] = play(hole, hole.tasks(Split.TRAIN)[0], ["right"])
    assert (step.done, step.rewards["correct"], step.metrics["success"]) == (True, 0.0, 0.0)
    # Gymnasium limits FrozenLake to 100 steps, which a reply without an action also takes.
    assert len(play(environment, task, ["x", "l"] * 100)) == 100
    with pytest.raises(ValueError, match=r"'FrozenLake-v1' has no task .* of 'sums'"):
        play(environment, dataclasses.replace(task, environment="sums"), [])


def test_a_reply_without_an_action_costs_a_turn_and_returns_a_notice():
    environment, task = line(view=View.COMPACT, invalid_reward=-0.5, step_reward=-0.25, max_steps=3)
    steps = play(environment, task, ["x", "rr", ""])
    assert [step.messages for step in steps] == [({"role": "user", "content": "?\nA..G"},)] * 2 + [()]
    assert [step.action for step in steps] == [None] * 3
    assert dict(steps[-1].metrics) == {"success": 0.0, "steps": 3.0, "invalid_actions": 3.0}
    # Board and anchor have not changed; the notice does not affect the anchor.
    assert [step.anchor_state for step in steps] == [task.anchor_state] * 3
    readable, task = line()
    [step] = play(readable, task, ["I wait."])
    assert step.messages[0]["content"].startswith(
        "That reply names no action. Reply with one of: left, down, right, up."
    )


GAMES = [
    {"id": "FrozenLake-v1", "options": STILL},
    {"id": "FrozenLake-v1", "options": {"is_slippery": True, "size": 5}},
    {"id": "FrozenLake8x8-v1", "options": {"map_name": "8x8"}, "random_start": True},
    {"id": "Taxi-v4", "options": {"is_rainy": True, "fickle_passenger": True}},
    {"id": "CliffWalkingSlippery-v1", "random_start": True},
    {"id": "Blackjack-v1"},
]


@pytest.mark.parametrize("view", View)
@pytest.mark.parametrize("game", GAMES, ids=lambda game: game["id"])
def test_equal_tasks_seeds_and_replies_give_equal_steps(game: dict, view: View):
    config = TextGameConfig(**game, view=view, num_tasks=20, held_out=0.0, validation=0.0)
    first, second = config.build(), config.build()
    assert tasks(first) == tasks(second)
    for index, task in enumerate(tasks(first)[:6]):
        names = make_prototype(game["id"], first.starts[task.id].arguments).board.names(view)
        replies = np.random.default_rng(index).choice(names, 30).tolist()
        one = play(first, task, replies, seed=index)
        # Another game in between must not affect the result.
        play(first, tasks(first)[-1], replies, seed=index + 1)
        assert play(first, task, replies, seed=index) == one == play(second, task, replies, seed=index)


def test_chance_depends_on_the_start_seed():
    environment = whole(
        options={"is_slippery": True, "desc": ["FFFFF", "FFFFF", "FFSFF", "FFFFF", "FFFFG"]}, num_tasks=1
    )
    task = environment.tasks(Split.TRAIN)[0]
    replies = ["left", "up", "right", "down"] * 5
    seen = {str(play(environment, task, replies, seed)[-1].anchor_state) for seed in range(20)}
    assert len(seen) > 5


@given(seed=st.integers(0, 2**31), size=st.integers(2, 6), actions=st.lists(st.integers(0, 3), max_size=30))
@settings(max_examples=40, deadline=None)
def test_games_match_gymnasium(seed: int, size: int, actions: list[int]):
    """Compare states, rewards and ends with the result of `gymnasium.make`."""
    environment = whole(options={**STILL, "size": size}, num_tasks=1, seed=seed)
    task = environment.tasks(Split.TRAIN)[0]
    oracle = gymnasium.make("FrozenLake-v1", is_slippery=False, desc=task.anchor_state["options"]["desc"])
    state, _ = oracle.reset(seed=0)
    assert task.anchor_state["state"] == state
    for action, step in zip(
        actions, play(environment, task, [("left", "down", "right", "up")[number] for number in actions]), strict=False
    ):
        state, reward, ended, cut, _ = oracle.step(action)
        assert step.anchor_state["state"] == state
        assert step.rewards["game"] == reward
        assert step.done == (ended or cut)


def test_splits_of_starts_are_disjoint_and_independent_of_the_seed():
    first, second = lake(num_tasks=300).build(), lake(num_tasks=300, seed=9).build()
    anchors = {
        split: {str(task.anchor_state) for made in (first, second) for task in made.tasks(split)} for split in Split
    }
    assert all(anchors.values())
    assert len(set.union(*anchors.values())) == sum(map(len, anchors.values()))
    assert tasks(first) != tasks(second)
    for task in tasks(first)[:30]:
        # Moves into the corner or against the border end in the initial state.
        steps = play(first, task, ["left", "up", "nothing", "left"])
        assert [step.anchor_state for step in steps] == [task.anchor_state] * 4


def steps_to_goal(task: Task) -> int:
    """Compute the length of a shortest way on the map by breadth-first search."""
    rows = task.anchor_state["options"]["desc"]
    size = len(rows)
    start = divmod(task.anchor_state["state"], size)
    waiting, seen = deque([(start, 0)]), {start}
    while waiting:
        (row, column), steps = waiting.popleft()
        if rows[row][column] == "G":
            return steps
        for place in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if all(0 <= part < size for part in place) and place not in seen and rows[place[0]][place[1]] != "H":
                seen.add(place)
                waiting.append((place, steps + 1))
    raise AssertionError("no way to the goal")


@given(seed=st.integers(0, 2**31), size=st.integers(2, 7), random_start=st.booleans())
@settings(max_examples=40, deadline=None)
def test_demonstrations_win_on_a_shortest_way(seed: int, size: int, random_start: bool):
    environment = whole(options={**STILL, "size": size}, num_tasks=2, seed=seed, random_start=random_start)
    for task in environment.tasks(Split.TRAIN):
        shown = environment.demonstrate(task)
        assert shown[: len(task.messages)] == task.messages
        replies = replies_of(shown)
        assert len(replies) == steps_to_goal(task)
        steps = play(environment, task, replies)
        assert rewards(steps, "correct") == 1.0
        # The demonstration has exactly the messages of an episode with these replies.
        answered = [message for message in shown[len(task.messages) :] if message["role"] == "user"]
        assert answered == [message for step in steps for message in step.messages]
        assert [message["role"] for message in shown[len(task.messages) :]] == ["assistant", "user"] * (
            len(replies) - 1
        ) + ["assistant"]


def test_demonstrations_with_detours_are_longer_and_still_win():
    straight, wandering = whole(num_tasks=40), whole(num_tasks=40, detours=0.4)
    lengths = [
        [len(replies_of(made.demonstrate(task))) for task in made.tasks(Split.TRAIN)] for made in (straight, wandering)
    ]
    assert all(long >= short for short, long in zip(*lengths, strict=True))
    assert sum(lengths[1]) > 1.2 * sum(lengths[0])
    for task in wandering.tasks(Split.TRAIN):
        assert rewards(play(wandering, task, replies_of(wandering.demonstrate(task))), "correct") == 1.0
        assert wandering.demonstrate(task) == wandering.demonstrate(task)
    cards = TextGameConfig(id="Blackjack-v1", num_tasks=5, held_out=0.0, validation=0.0).build()
    task = cards.tasks(Split.TRAIN)[0]
    assert (cards.can_demonstrate(task), task.anchor_state) == (False, None)
    with pytest.raises(ValueError, match="'Blackjack-v1' has no transition table"):
        cards.demonstrate(task)


@pytest.mark.parametrize(
    ("game", "steps"),
    [({"id": "Taxi-v4"}, None), ({"id": "CliffWalking-v1"}, 13)],
    ids=["taxi", "cliff"],
)
def test_other_games_with_a_table_have_demonstrations(game: dict, steps: int | None):
    environment = TextGameConfig(**game, num_tasks=15, held_out=0.0, validation=0.0).build()
    for task in environment.tasks(Split.TRAIN):
        replies = replies_of(environment.demonstrate(task))
        assert steps is None or len(replies) == steps
        steps_taken = play(environment, task, replies)
        assert rewards(steps_taken, "correct") == 1.0
        assert steps_taken[-1].metrics["success"] == 1.0
        # Rewards: Taxi 20 for the delivery and -1 for other steps; CliffWalking -1 per step.
        assert rewards(steps_taken, "game") == (20 - (len(replies) - 1) if game["id"] == "Taxi-v4" else -len(replies))


def test_the_readable_boards():
    _, task = line()
    assert [message["role"] for message in task.messages] == ["system", "user"]
    assert task.messages[0]["content"].startswith("You cross a frozen lake")
    assert task.messages[-1]["content"] == "A . . G\nYou are in row 1, column 1."
    [cliff] = TextGameConfig(id="CliffWalking-v1", num_tasks=1, held_out=0.0, validation=0.0).build().tasks(Split.TRAIN)
    assert cliff.messages[-1]["content"].splitlines() == [
        *[" ".join("............")] * 3,
        " ".join("ACCCCCCCCCCG"),
        "You are in row 4, column 1.",
    ]
    taxi = TextGameConfig(id="Taxi-v4", num_tasks=40, held_out=0.0, validation=0.0).build()
    for task in tasks(taxi):
        row, column, passenger, destination = make_prototype("Taxi-v4", "{}").game.decode(task.anchor_state["state"])
        text = task.messages[-1]["content"]
        board = text.splitlines()
        assert [len(cells) for cells in board[:7]] == [11] * 7
        assert board[row + 1][2 * column + 1] == "A"
        assert f"The taxi is in row {row + 1}, column {column + 1}." in text
        assert f"waiting at {'RGYB'[passenger]} and wants to go to {'RGYB'[destination]}." in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "FrozenLak-v1"}, "gymnasium has no text game 'FrozenLak-v1'; did you mean 'FrozenLake-v1'"),
        ({"id": "Pendulum-v1", "options": {}}, "'Pendulum-v1' has actions Box.*only discrete actions"),
        ({"options": {"slippery": False}}, "'FrozenLake-v1' rejects its options .*slippery"),
        ({"options": {"map_name": "5x5"}}, r"rejects its options \{'map_name': '5x5'\}: KeyError\('5x5'\)"),
        ({"options": {"size": 1}}, "options size 1 and p 0.8 must be"),
        ({"options": {"p": 1.5}}, "options size 4 and p 1.5 must be"),
        ({"options": {"map_name": "4x4"}}, "has a single initial state .*random_start: true"),
        ({"id": "Blackjack-v1", "options": {}, "random_start": True}, "no transition table to draw a start from"),
        (
            {"num_tasks": 2, "held_out": 0.01, "validation": 0.01},
            "none of its 2 distinct problems fell into the validation",
        ),
    ],
)
def test_games_that_cannot_be_constructed_are_rejected(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        lake(**fields).build()


LAKE = draw_start("FrozenLake-v1", {**STILL, "desc": LINE}, seed=0, random_start=False).prototype.board


@pytest.mark.parametrize(
    ("view", "regex", "reply", "action"),
    [
        (View.READABLE, None, "Left would be wrong, so I go RIGHT.", "right"),
        (View.READABLE, None, "upright", None),
        (View.READABLE, None, "r", None),
        (View.COMPACT, None, "r", "right"),
        (View.COMPACT, None, "l or r", "right"),
        (View.COMPACT, None, "lr", None),
        (View.COMPACT, None, "right", None),
        (View.READABLE, r"<go>(.*?)</go>", "<go>left</go> no: <go> Right </go> left", "right"),
        (View.READABLE, r"<go>(.*?)</go>", "<go>r</go>", "right"),
        (View.READABLE, r"<go>(.*?)</go>", "<go>away</go>", None),
        (View.READABLE, r"<go>(.*?)</go>", "right", None),
    ],
)
def test_the_last_action_name_counts(view: View, regex: str | None, reply: str, action: str | None):
    text = asyncio.run(find_action(reply, regex))
    number = parse_action(text, LAKE, view, is_name=regex is not None)
    assert (None if number is None else LAKE.actions[number]) == action
