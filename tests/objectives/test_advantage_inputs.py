# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math

import numpy as np
import pytest

from marin_rl.objectives.advantage_inputs import uniform_advantages
from tests.objectives.advantage_cases import make_signal

GOOD = make_signal(1.0, [0.0, 1.0], id="step-3-1", tokens=[2, 1], penalties=[0.25, -0.5, 1.0])


def test_total_return_is_the_score_less_the_penalties():
    assert GOOD.total_return == 0.25
    assert make_signal(None, [0.0], penalties=[2.0]).total_return is None


def test_total_return_does_not_depend_on_the_order_of_the_tokens():
    penalties = np.random.default_rng(0).normal(size=50).tolist()
    ways = [make_signal(1.0, [1.0], tokens=[50], penalties=p) for p in (penalties, penalties[::-1], sorted(penalties))]
    assert len({signal.total_return for signal in ways}) == 1


@pytest.mark.parametrize(("change", "message"), [
    ({"score": math.nan}, "score is nan"),
    ({"score": math.inf}, "score is inf"),
    ({"score": -math.inf}, "score is -inf"),
    ({"turn_rewards": np.array([0.0, math.nan])}, r"turn_rewards\[1\] is nan"),
    ({"penalties": np.array([0.0, 0.0, math.inf])}, r"penalties\[2\] is inf"),
    ({"values": np.array([-math.inf, 0.0, 0.0])}, r"values\[0\] is -inf"),
    ({"anchors": ("s",)}, "anchors has length 1, but turn_rewards has length 2"),
    ({"penalties": np.zeros(2)}, "penalties has length 2, but turn_ids has length 3"),
    ({"values": np.zeros(4)}, "values has length 4, but turn_ids has length 3"),
    ({"turn_ids": np.array([0, 1, 0], np.int32)}, "turn_ids goes back"),
    ({"turn_ids": np.array([0, 1, 2], np.int32)}, "turn 2 is named, but turn_rewards has length 2"),
    ({"turn_ids": np.array([-1, 0, 1], np.int32)}, "turn -1 is named"),
    ({"unrewarded_turns": (2,)}, "turn 2 is named"),
])  # fmt: skip
def test_what_does_not_fit_names_the_rollout(change, message):
    with pytest.raises(ValueError, match=f"rollout step-3-1: .*{message}"):
        dataclasses.replace(GOOD, **change)


def test_a_rollout_without_tokens_or_turns_is_one():
    assert make_signal(2.0, [2.0], tokens=[0]).total_return == 2.0
    assert make_signal(None, []).turn_ids.size == 0


def test_uniform_credit_is_on_every_token_and_gives_a_critic_nothing():
    token_advantages = uniform_advantages(GOOD, -1.5)
    assert token_advantages.advantages.tolist() == [-1.5] * 3
    assert token_advantages.value_targets.tolist() == [0.0] * 3
