# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import draccus
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.shaping import (
    KeepTruncatedConfig,
    MaskTruncatedConfig,
    OverlongConfig,
    RewardTruncatedConfig,
    TruncationConfig,
    soft_overlong_penalty,
)


def oracle(length, max_length, buffer, factor):
    """DAPO's equation 13, case by case."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return ((max_length - buffer) - length) / buffer * factor
    return -factor


@given(st.integers(0, 60), st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 10))
def test_matches_the_definition_by_cases(length, max_length, buffer, factor):
    buffer = min(buffer, max_length)
    expected = oracle(length, max_length, buffer, factor)
    assert soft_overlong_penalty(length, max_length, buffer, factor) == pytest.approx(expected, rel=1e-12)


def test_worked_example():
    assert [soft_overlong_penalty(n, 100, 20, 2.0) for n in (0, 80, 81, 90, 100, 150)] == [0, 0, -0.1, -1.0, -2.0, -2.0]
    # Positive zero: -0.0 would be visible in the logs.
    assert math.copysign(1, soft_overlong_penalty(10, 100, 20, 1.0)) == 1.0


def test_no_penalty_without_a_buffer():
    assert [soft_overlong_penalty(n, 10, 0, 1.0) for n in (0, 10, 99)] == [0.0] * 3


@pytest.mark.parametrize(("fields", "message"), [
    ({"buffer": -1}, "buffer is -1"),
    ({"factor": -1.0}, "factor is -1.0"),
    ({"factor": math.nan}, "factor is nan"),
    ({"factor": math.inf}, "factor is inf"),
])  # fmt: skip
def test_invalid_penalties_raise_an_error_that_names_the_setting(fields, message):
    with pytest.raises(ValueError, match=rf"overlong\.{message}"):
        OverlongConfig(**fields)


def test_truncation_is_selected_by_type():
    choices = {
        "keep": (KeepTruncatedConfig(), False, None),
        "mask": (MaskTruncatedConfig(), True, None),
        "reward": (RewardTruncatedConfig(), False, 0.0),
    }
    assert set(TruncationConfig.get_known_choices()) == set(choices)
    for name, (config, masks, reward) in choices.items():
        assert draccus.decode(TruncationConfig, {"type": name}) == config
        assert (config.masks, config.fixed_reward) == (masks, reward)
    assert draccus.decode(TruncationConfig, {"type": "reward", "reward": -1.0}).fixed_reward == -1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_invalid_reward_raises_an_error_that_names_the_setting(value):
    with pytest.raises(ValueError, match=rf"truncation\.reward is {value}"):
        RewardTruncatedConfig(value)
