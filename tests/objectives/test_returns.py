# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.returns import check_discount, discounted_returns

rewards = st.lists(st.floats(-50, 50), max_size=8)


@given(rewards, st.floats(0, 1))
def test_matches_the_sum(rewards, gamma):
    expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
    np.testing.assert_allclose(discounted_returns(np.array(rewards), gamma), expected, rtol=1e-12, atol=1e-9)


def test_worked_by_hand():
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.5).tolist() == [3.0, 4.0, 4.0]
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 1.0).tolist() == [7.0, 6.0, 4.0]
    assert discounted_returns(np.array([1.0, 2.0, 4.0]), 0.0).tolist() == [1.0, 2.0, 4.0]


def test_one_step_and_none():
    assert discounted_returns(np.array([3.0]), 0.3).tolist() == [3.0]
    assert discounted_returns(np.zeros(0), 0.3).tolist() == []


def test_float32_rewards_are_summed_in_float64():
    returns = discounted_returns(np.array([2.0**-30, 1.0], np.float32), 1.0)
    assert returns.tolist() == [1 + 2.0**-30, 1.0]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_what_is_no_discount_is_named(value):
    with pytest.raises(ValueError, match=rf"advantage\.gamma is {value}"):
        check_discount("advantage.gamma", value)
    with pytest.raises(ValueError, match=f"gamma is {value}"):
        discounted_returns(np.zeros(1), value)
