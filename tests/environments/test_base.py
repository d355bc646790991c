# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import collections
import dataclasses

import pytest

from marin_rl.environments import ArithmeticConfig, TextGameConfig
from marin_rl.environments.base import Split
from marin_rl.splits import split_of
from marin_rl.types import Message


@pytest.mark.parametrize(("held_out", "validation"), [(0.1, 0.05), (0.3, 0.2), (0.0, 0.0)])
def test_splits_have_the_requested_shares(held_out, validation):
    counts = collections.Counter(split_of(f"{a}+{b}", held_out, validation) for a in range(100) for b in range(100))
    assert counts[Split.HELD_OUT] / 10_000 == pytest.approx(held_out, abs=0.015)
    assert counts[Split.VALIDATION] / 10_000 == pytest.approx(validation, abs=0.015)


def test_a_larger_held_out_share_contains_the_smaller_one():
    problems = [f"{a}x{b}" for a in range(50) for b in range(50)]
    small = {problem for problem in problems if split_of(problem, 0.1, 0.0) is Split.HELD_OUT}
    large = {problem for problem in problems if split_of(problem, 0.3, 0.0) is Split.HELD_OUT}
    assert small < large


def test_split_of_a_text_is_machine_independent():
    # Fixed values: a changed split would move training problems of older runs into the held-out split.
    splits = [split_of(f"{n}+{n}=", 0.3, 0.3) for n in range(6)]
    assert splits == [Split.HELD_OUT] * 5 + [Split.TRAIN]


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
