# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import copy
import dataclasses
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
    shape_rewards,
    soft_overlong_penalty,
)
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn


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


def test_truncation_is_selected_by_type():
    choices = {
        "keep": (KeepTruncatedConfig(), False, None),
        "mask": (MaskTruncatedConfig(), True, None),
        "reward": (RewardTruncatedConfig(), False, 0.0),
    }
    assert set(TruncationConfig.get_known_choices()) == set(choices)
    for name, (config, masks, reward) in choices.items():
        assert draccus.decode(TruncationConfig, {"type": name}) == config
        assert (config.masks, config.reward) == (masks, reward)
    assert draccus.decode(TruncationConfig, {"type": "reward", "reward": -1.0}).reward == -1.0


TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")
OFF = OverlongConfig()
SOFT = OverlongConfig(buffer=4, factor=2.0)
"""The penalty starts at 6 of 10 tokens."""


def rollout(*lengths: int, status: RolloutStatus = RolloutStatus.COMPLETED, reward: float = 1.0) -> Rollout:
    """A rollout with one reply per length."""
    turns = tuple(
        Turn(
            (1,),
            Generation((3,) * n, (-1.0,) * n, StopReason.STOP, 0, 0),
            (),
            {"correct": reward},
            starts_sequence=index == 0,
        )
        for index, n in enumerate(lengths)
    )
    rewards = {} if status is RolloutStatus.FAILED else {"correct": reward}
    return Rollout("r", "g", TASK, turns, status, rewards, None if rewards else "ValueError: no")


def shaped(original: Rollout, overlong: OverlongConfig, truncation: TruncationConfig) -> Rollout:
    [group] = shape_rewards([RolloutGroup("g", [original])], overlong, truncation, max_new_tokens=10)
    assert group.id == "g"
    [result] = group.rollouts
    return result


@pytest.mark.parametrize(
    ("lengths", "penalty"),
    [
        ((6,), 0.0),
        ((7,), -0.5),
        ((8,), -1.0),
        ((10,), -2.0),
        # The longest of several replies, not their sum.
        ((3, 8, 2), -1.0),
        ((6, 6, 6), 0.0),
    ],
)
def test_the_penalty_is_a_component_of_the_reward(lengths: tuple[int, ...], penalty: float):
    result = shaped(rollout(*lengths), SOFT, KeepTruncatedConfig())
    assert result.rewards == {"correct": 1.0, "overlong": penalty}
    assert result.total_reward == 1.0 + penalty


def test_the_worked_example_of_dapo():
    # L_max = 20480, L_buf = 4096: nothing up to 16384 tokens, -1 at the limit.
    config = OverlongConfig(buffer=4096)
    for length, penalty in ((16384, 0.0), (18432, -0.5), (20480, -1.0)):
        [group] = shape_rewards(
            [RolloutGroup("g", [rollout(length)])], config, KeepTruncatedConfig(), max_new_tokens=20480
        )
        assert group.rollouts[0].rewards["overlong"] == penalty


def test_without_a_penalty_nothing_is_added():
    original = rollout(10)
    assert shaped(original, OFF, KeepTruncatedConfig()) == original


@pytest.mark.parametrize("truncation", [KeepTruncatedConfig(), MaskTruncatedConfig()])
def test_truncated_rollouts_keep_their_rewards_without_a_fixed_reward(truncation: TruncationConfig):
    original = rollout(10, status=RolloutStatus.TRUNCATED)
    assert shaped(original, OFF, truncation) == original
    assert shaped(original, SOFT, truncation).rewards == {"correct": 1.0, "overlong": -2.0}


@pytest.mark.parametrize("overlong", [OFF, SOFT])
def test_a_fixed_reward_replaces_all_others(overlong: OverlongConfig):
    result = shaped(rollout(10, status=RolloutStatus.TRUNCATED), overlong, RewardTruncatedConfig(reward=-0.5))
    assert result.rewards == {"truncated": -0.5}
    assert result.total_reward == -0.5
    # The rewards of turns are removed too, for estimators that use them.
    several = shaped(rollout(3, 10, status=RolloutStatus.TRUNCATED), overlong, RewardTruncatedConfig(reward=-0.5))
    assert [turn.reward for turn in several.turns] == [None, None]
    completed = rollout(2)
    assert shaped(completed, OFF, RewardTruncatedConfig(reward=-0.5)) == completed


def test_a_reward_with_the_name_of_the_penalty_is_refused():
    original = dataclasses.replace(rollout(10), rewards={"correct": 1.0, "overlong": 5.0})
    with pytest.raises(ValueError, match=r"rollout r: .* a reward named 'overlong'.*overlong.buffer: 0"):
        shaped(original, SOFT, KeepTruncatedConfig())
    assert shaped(original, OFF, KeepTruncatedConfig()) == original


def test_failed_rollouts_stay_without_a_reward():
    failed = rollout(10, status=RolloutStatus.FAILED)
    assert shaped(failed, SOFT, RewardTruncatedConfig()) == failed


def test_the_arguments_are_unchanged():
    groups = [RolloutGroup("g", [rollout(10), rollout(2)])]
    before = copy.deepcopy(groups)
    result = shape_rewards(groups, SOFT, KeepTruncatedConfig(), max_new_tokens=10)
    assert groups == before
    assert [r.rewards["overlong"] for r in result[0].rollouts] == [-2.0, 0.0]
    # The penalty applies to the rollout, not to single turns.
    assert [turn.reward for r in result[0].rollouts for turn in r.turns] == [1.0, 1.0]
