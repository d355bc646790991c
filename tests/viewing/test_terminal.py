# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Output for single rows; `tests/test_view.py` tests whole runs and escaping."""

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from marin_rl.rollouts.stored_rollout import StoredAdvantages, as_table
from marin_rl.types import Message, Rollout
from marin_rl.viewing.selection import Listing
from marin_rl.viewing.terminal import number, print_listing, print_rollout, print_side_by_side
from tests.rollouts.rollout_cases import piece, rich_rollout, rich_signal, rollout_of, turn_of


def row_of(rollout: Rollout, signal: StoredAdvantages | None = None) -> dict[str, Any]:
    """Row of a rollout as it is read back, with null for missing columns."""
    signals = {} if signal is None else {rollout.id: signal}
    [row] = as_table([rollout], 3, "training", signals, piece).to_pylist()
    return row


def shown(show: Any, *arguments: Any, width: int = 200, **keywords: Any) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None), *arguments, **keywords)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0, "0"), (-0.0, "0"), (0.25, "0.25"), (-1.5, "-1.5"), (123456.0, "1.235e+05"), (2 / 3, "0.6667")],
)
def test_numbers(value: float | None, text: str):
    assert number(value) == text


def test_missing_values_have_no_column():
    def head(signal: StoredAdvantages | None) -> list[str]:
        lines = shown(print_rollout, row_of(rich_rollout(), signal), tokens=True)
        return next(line.split() for line in lines if line.split()[:3] == ["#", "id", "token"])

    assert head(None) == ["#", "id", "token", "logprob"]
    assert head(rich_signal()) == [
        *("#", "id", "token", "logprob", "learner", "policy−learner", "reference", "advantage"),
        *("value", "value", "target"),
    ]


def test_list_has_a_column_per_component_with_a_dash_if_missing():
    rollouts = [rollout_of("a"), rollout_of("b", reward=0.5, rewards={"style": 0.5})]
    rows = [{**row_of(rollout), "last_reply": "5"} for rollout in rollouts]
    lines = [line.split() for line in shown(print_listing, Listing(rows, 7))]
    head, first, second = (next(line for line in lines if line[:1] == [start]) for start in ("id", "a", "b"))
    place = head.index("correct")
    assert head[place : place + 2] == ["correct", "style"]
    assert (first[place], first[place + 1]) == ("1", "–")
    assert (second[place], second[place + 1]) == ("–", "0.5")
    assert lines[-1] == ["2", "of", "7", "rollouts"]


def test_list_has_the_last_reply_if_there_is_room():
    reply = "the answer\x1b is 5"
    listing = Listing([{**row_of(rich_rollout()), "last_reply": reply}], 1)
    wide, narrow = (shown(print_listing, listing, width=width) for width in (200, 70))
    assert any(line.endswith(r"the answer\x1b is 5") for line in wide)
    assert not any("reply" in line for line in narrow)


def test_last_observation_follows_the_turns():
    lines = [line.strip() for line in shown(print_rollout, row_of(rich_rollout()), tokens=False)]
    assert lines[-3:] == ["last observation · not answered", "tool", "46 ü"]
    assert not any("not answered" in line for line in shown(print_rollout, row_of(rollout_of("a")), tokens=False))


def test_shorter_rollout_ends_first_side_by_side():
    long, short = row_of(rich_rollout()), row_of(rollout_of("short", reply="7"))
    lines = shown(print_side_by_side, [short, long], tokens=False)
    turns = [line for line in lines if "turn 1" in line and "turn 10" not in line]
    # The second turn is in the right column only.
    assert any(line.strip().startswith("turn 1") and line.index("turn 1") >= 100 for line in turns)
    assert any(line.startswith("turn 0") and "turn 0" in line[100:] for line in lines)


def test_anchor_states_rewards_by_name_and_metadata_are_shown():
    turns = (turn_of("2+3", "5", anchor_state="0123456789abcdef\x1b", rewards={"moves": 0.5, "style": -0.25}),)
    rollout = rollout_of("r", turns=turns, info={"map": "\x1b[31m"})
    text = "\n".join(shown(print_rollout, row_of(rollout), tokens=False))
    assert "reward 0.25 · anchor 0123456789ab · weights 3" in text
    assert "moves 0.5, style -0.25" in text
    assert '{"map": "\\u001b[31m"}' in text
    assert "anchor" not in "\n".join(shown(print_rollout, row_of(rollout_of("r")), tokens=False))


def test_further_fields_of_a_message_are_shown():
    offered: Message = {"role": "system", "content": "Be brief.", "tools": [{"type": "function"}]}
    turn = turn_of("2+3", "5", reward=1.0)
    rollout = rollout_of("r", turns=(dataclasses.replace(turn, messages=(offered, *turn.messages)),))
    text = "\n".join(shown(print_rollout, row_of(rollout), tokens=False))
    assert 'Be brief.{"tools": [{"type": "function"}]}' in text
