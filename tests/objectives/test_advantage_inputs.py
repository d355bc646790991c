# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.advantage_inputs import (
    centered,
    discounted_returns,
    sample_variance,
    standardized,
    uniform_advantages,
)
from tests.objectives.advantage_cases import make_inputs

VALID = make_inputs(1.0, [0.0, 1.0], id="step-3-1", tokens=[2, 1], penalties=[0.25, -0.5, 1.0])


def test_total_return_is_score_minus_penalties():
    assert VALID.total_return == 0.25
    assert make_inputs(None, [0.0], penalties=[2.0]).total_return is None


def test_total_return_does_not_depend_on_token_order():
    penalties = np.random.default_rng(0).normal(size=50).tolist()
    permuted = [
        make_inputs(1.0, [1.0], tokens=[50], penalties=p) for p in (penalties, penalties[::-1], sorted(penalties))
    ]
    assert len({inputs.total_return for inputs in permuted}) == 1


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
    ({"turn_ids": np.array([0, 1, 0], np.int32)}, "turn_ids must not decrease"),
    ({"turn_ids": np.array([0, 1, 2], np.int32)}, "turn 2 is out of range; turn_rewards has length 2"),
    ({"turn_ids": np.array([-1, 0, 1], np.int32)}, "turn -1 is out of range"),
    ({"unrewarded_turns": (2,)}, "turn 2 is out of range"),
])  # fmt: skip
def test_inconsistent_inputs_raise_an_error_that_names_the_rollout(change, message):
    with pytest.raises(ValueError, match=f"rollout step-3-1: .*{message}"):
        dataclasses.replace(VALID, **change)


def test_rollouts_without_tokens_or_turns_are_valid():
    assert make_inputs(2.0, [2.0], tokens=[0]).total_return == 2.0
    assert make_inputs(None, []).turn_ids.size == 0


def test_uniform_advantages_fill_all_tokens_with_zero_value_targets():
    token_advantages = uniform_advantages(VALID, -1.5)
    assert token_advantages.advantages.tolist() == [-1.5] * 3
    assert token_advantages.value_targets.tolist() == [0.0] * 3


numbers = st.lists(st.floats(-100, 100).map(lambda x: round(x, 4)), min_size=1, max_size=9)


@given(numbers)
def test_dispersion_matches_the_formulas(values):
    n = len(values)
    mean = sum(values) / n
    variance = sum((x - mean) ** 2 for x in values) / (n - 1) if n > 1 else 0.0
    array = np.array(values)
    np.testing.assert_allclose(centered(array), [x - mean for x in values], atol=1e-11)
    assert sample_variance(array) == pytest.approx(variance, rel=1e-9, abs=1e-18)
    expected = [(x - mean) / (math.sqrt(variance) + 1e-6) for x in values]
    np.testing.assert_allclose(standardized(array), expected, rtol=1e-6, atol=1e-6)


@given(value=st.floats(-1e9, 1e9), size=st.integers(1, 9))
def test_dispersion_of_equal_values_is_exactly_zero(value, size):
    array = np.full(size, value)
    assert centered(array).tolist() == standardized(array).tolist() == [0.0] * size
    assert sample_variance(array) == 0.0


def test_dispersion_of_no_values():
    assert centered(np.zeros(0)).size == standardized(np.zeros(0)).size == 0
    assert sample_variance(np.zeros(0)) == 0.0


@given(numbers, st.integers(0, 999))
def test_dispersion_does_not_depend_on_the_order_of_values(values, seed):
    order = np.random.default_rng(seed).permutation(len(values))
    array = np.array(values)
    assert centered(array[order]).tolist() == centered(array)[order].tolist()
    assert sample_variance(array[order]) == sample_variance(array)


rewards = st.lists(st.floats(-50, 50), max_size=8)


@given(rewards, st.floats(0, 1))
def test_discounted_returns_match_the_sum(rewards, gamma):
    expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    np.testing.assert_allclose(discounted_returns(np.array(rewards), gamma), expected, rtol=1e-12, atol=1e-9)


def test_discounted_returns_worked_example():
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 1.0).tolist() == [7.0, 6.0, 4.0]
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.0).tolist() == [1.0, 2.0, 4.0]


def test_discounted_returns_of_one_step_and_of_no_steps():
    assert discounted_returns(np.array([3.0]), 0.3).tolist() == [3.0]
    assert discounted_returns(np.zeros(0), 0.3).tolist() == []


def test_discounted_returns_sum_float32_rewards_in_float64():
    returns = discounted_returns(np.array([2.0**-30, 1.0], np.float32), 1.0)
    assert returns.tolist() == [1 + 2.0**-30, 1.0]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_invalid_discount_raises_an_error_that_names_the_setting(value):
    with pytest.raises(ValueError, match=f"gamma is {value}"):
        discounted_returns(np.zeros(1), value)
