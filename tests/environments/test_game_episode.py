# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from marin_rl.environments.games import View, draw_start
from marin_rl.environments.text_game import TextGameConfig, TextGameEpisode, parse_action

LINE_START = draw_start("FrozenLake-v1", {"is_slippery": False, "desc": ["SFFG"]}, seed=0, random_start=False)
"""FrozenLake with one row: the goal is three steps to the right."""
LAKE = LINE_START.prototype.board
CONFIG = TextGameConfig(id="FrozenLake-v1", view=View.COMPACT)


def episode(max_steps: int | None = None, **rewards: float) -> TextGameEpisode:
    return TextGameEpisode(dataclasses.replace(CONFIG, **rewards), max_steps, LINE_START, LAKE, *LINE_START.begin(0))


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
    number = parse_action(reply, LAKE, view, regex)
    assert (None if number is None else LAKE.actions[number]) == action


def test_a_reply_without_an_action_does_not_change_the_game():
    game = episode()
    step = game.take_turn("x")
    assert (step.done, step.action, step.anchor_state) == (False, None, LINE_START.anchor(LINE_START.state))
    assert game.observation == LINE_START.state
    assert [game.take_turn("r").done for _ in range(3)] == [False, False, True]
    assert (game.steps, game.invalid) == (4, 1)


@pytest.mark.parametrize(("max_steps", "won"), [(3, 1.0), (2, 0.0)])
def test_the_last_permitted_step_counts(max_steps: int, won: float):
    game = episode(max_steps=max_steps)
    steps = [game.take_turn("r") for _ in range(max_steps)]
    assert [step.done for step in steps] == [False] * (max_steps - 1) + [True]
    assert (steps[-1].rewards["correct"], steps[-1].metrics["success"]) == (won, won)


def test_components_with_zero_weight_are_absent():
    assert set(episode(game_weight=0.0).take_turn("r").rewards) == {"correct"}
    rewarded = episode(game_weight=2.0, step_reward=-0.25, invalid_reward=-0.5)
    assert dict(rewarded.take_turn("x").rewards) == {"correct": 0.0, "game": 0.0, "step": -0.25, "format": -0.5}
    assert dict(rewarded.take_turn("r").rewards) == {"correct": 0.0, "game": 0.0, "step": -0.25, "format": 0.0}


def test_step_after_the_end_raises():
    game = episode(max_steps=1)
    game.take_turn("r")
    with pytest.raises(RuntimeError, match="the game 'FrozenLake-v1' has ended"):
        game.take_turn("r")
