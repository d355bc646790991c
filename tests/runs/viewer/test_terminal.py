# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Output for single rows; `tests/test_view.py` tests whole runs and escaping."""

import dataclasses
import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from marin_rl.runs.stored_rollout import StoredAdvantages, as_table
from marin_rl.runs.viewer.selection import Listing
from marin_rl.runs.viewer.summary import summarize
from marin_rl.runs.viewer.terminal import print_listing, print_rollout
from marin_rl.types import Rollout, RolloutStatus, Task
from tests.rollouts.rollout_cases import piece, rich_rollout, rollout_of, turn_of


def row_of(rollout: Rollout, signal: StoredAdvantages | None = None) -> dict[str, Any]:
    """Row of a rollout as it is read back, with null for missing columns."""
    signals = {} if signal is None else {rollout.id: signal}
    [row] = as_table([rollout], 3, "training", signals, piece).to_pylist()
    return row


def shown(show: Any, *arguments: Any, width: int = 200, **keywords: Any) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None), *arguments, **keywords)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def listed(*rollouts: Rollout, total: int | None = None, width: int = 200) -> list[str]:
    rows = [{**row_of(rollout), **summarize(row_of(rollout))._asdict()} for rollout in rollouts]
    return shown(print_listing, Listing(rows, total or len(rows)), "view RUN --id a", width=width)


def test_list_has_a_column_per_component_with_a_dash_if_missing():
    lines = listed(rollout_of("a"), rollout_of("b", reward=0.5, rewards={"style": 0.5}), total=7)
    head, first, second = (
        next(line.split() for line in lines if line[:2].strip() == start) for start in ("id", "a", "b")
    )
    place = head.index("correct")
    assert head[place : place + 2] == ["correct", "style"]
    assert (first[place], first[place + 1]) == ("1", "–")
    assert (second[place], second[place + 1]) == ("–", "0.5")
    assert "2 of 7 rollouts, first those of groups with different rewards" in lines


def test_list_explains_a_reward_and_prints_shared_values_once():
    wrong = rollout_of("wrong", reply="71", reward=0.0, info={"reason": "expected 17, found 71"})
    right = rollout_of("right", reply="17")
    task = Task("t", "sums", ({"role": "user", "content": "2+3"},), "17")
    lines = listed(*(dataclasses.replace(one, task=task) for one in (wrong, right)))
    head, _, first, second = (line.split() for line in lines[:4])
    assert head[:6] == ["id", "reward", "prompt", "answer", "reply", "reason"]
    assert first[:9] == ["wrong", "0", "2+3", "17", "71", "expected", "17,", "found", "71"]
    assert second[:5] == ["right", "1", "2+3", "17", "17"]
    assert (
        "the same in all: step 3, turns 1, tokens 3, status completed, environment sums, not trained filtered" in lines
    )
    assert lines[-1] == "one in full: view RUN --id a"


TEXTS = {
    "ascii": "word " * 2000,
    "one word": "x" * 10_000,
    "chinese": "计算三十加四十一" * 50,
    "arabic": "احسب ناتج الجمع " * 50,
    "latex": r"\frac{a_{1}}{\sqrt{b}} + \int_0^1 x\,dx " * 20,
    "code": "def f(x):\n\treturn x\n" * 20,
    "combining": "e\u0301\u0302" * 200,
    "emoji": "🙂👨‍👩‍👧" * 80,
    "escaped": "\x1b[31m\u202e" * 40,
}


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("kind", TEXTS)
def test_every_line_of_a_list_fits_the_console(kind: str, width: int):
    text = TEXTS[kind]
    turns = (
        dataclasses.replace(
            turn_of("", text), messages=({"role": "user", "content": text}, {"role": "assistant", "content": text})
        ),
    )
    rollout = rollout_of("train-1000-15-7", reward=0.0, turns=turns, info={"reason": text})
    rollout = dataclasses.replace(rollout, task=Task("t", "sums", ({"role": "user", "content": text},), text))
    lines = listed(rollout, rollout_of("b", status=RolloutStatus.TRUNCATED), width=width)
    assert all(cell_len(line) <= width for line in lines[:-1])
    if width >= 80:
        [line] = [line for line in lines if line.startswith("train-1000-15-7")]
        assert line.count("…") == 4
        assert lines[0].split() == ["id", "reward", "prompt", "answer", "reply", "reason", *lines[0].split()[6:]]


@pytest.mark.parametrize(("width", "shown"), [(50, 0), (80, 2), (90, 3), (100, 4)])
def test_narrow_list_names_the_columns_that_it_leaves_out(width: int, shown: int):
    lines = listed(rich_rollout(), rollout_of("b", status=RolloutStatus.TRUNCATED), width=width)
    others = ["style", "turns", "tokens", "status"]
    assert lines[0].split() == ["id", "reward", "prompt", "answer", "reply", "reason", *others[:shown]]
    left_out = f"not shown for lack of width: {', '.join(others[shown:])}"
    assert (left_out in " ".join(lines)) == (shown < 4)


def test_anchor_states_rewards_by_name_and_metadata_are_shown():
    turns = (turn_of("2+3", "5", anchor_state="0123456789abcdef\x1b", rewards={"moves": 0.5, "style": -0.25}),)
    rollout = rollout_of("r", turns=turns, info={"map": "\x1b[31m"})
    text = "\n".join(shown(print_rollout, row_of(rollout), tokens=False))
    assert "reward 0.25 · anchor 0123456789ab · weights 3" in text
    assert "moves 0.5, style -0.25" in text
    assert '{"map": "\\u001b[31m"}' in text
    lines = [line.strip() for line in shown(print_rollout, row_of(rich_rollout()), tokens=False)]
    assert lines[-3:] == ["last observation · not answered", "tool", "46 ü"]
    assert "not answered" not in text
    assert "anchor" not in "\n".join(shown(print_rollout, row_of(rollout_of("r")), tokens=False))
