# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from marin_rl.environments.games import View, draw_start
from marin_rl.environments.text_game import GameSettings, TextGameEpisode, parse_action

LINE = draw_start("FrozenLake-v1", {"is_slippery": False, "desc": ["SFFG"]}, seed=0, random_start=False)
"""FrozenLake with one row: the goal is three steps to the right."""
LAKE = LINE.prototype.board
TERMS = GameSettings(
    View.COMPACT, action_regex=None, max_steps=None, game_weight=1.0, step_reward=0.0, invalid_reward=0.0
)


def episode(**settings) -> TextGameEpisode:
    return TextGameEpisode(dataclasses.replace(TERMS, **settings), LINE, LAKE, *LINE.begin(0))


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
    played = episode()
    step = played.play("x")
    assert (step.done, step.action, step.anchor_state) == (False, None, LINE.anchor(LINE.state))
    assert played.observation == LINE.state
    assert [played.play("r").done for _ in range(3)] == [False, False, True]
    assert (played.steps, played.invalid) == (4, 1)


@pytest.mark.parametrize(("max_steps", "won"), [(3, 1.0), (2, 0.0)])
def test_the_last_permitted_step_counts(max_steps: int, won: float):
    played = episode(max_steps=max_steps)
    steps = [played.play("r") for _ in range(max_steps)]
    assert [step.done for step in steps] == [False] * (max_steps - 1) + [True]
    assert (steps[-1].rewards["correct"], steps[-1].metrics["success"]) == (won, won)


def test_components_with_zero_weight_are_absent():
    assert set(episode(game_weight=0.0).play("r").rewards) == {"correct"}
    paid = episode(game_weight=2.0, step_reward=-0.25, invalid_reward=-0.5)
    assert dict(paid.play("x").rewards) == {"correct": 0.0, "game": 0.0, "step": -0.25, "format": -0.5}
    assert dict(paid.play("r").rewards) == {"correct": 0.0, "game": 0.0, "step": -0.25, "format": 0.0}


def test_step_after_the_end_raises():
    played = episode(max_steps=1)
    played.play("r")
    with pytest.raises(RuntimeError, match="the game 'FrozenLake-v1' has ended"):
        played.play("r")
