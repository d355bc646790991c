# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import copy
import dataclasses

import pytest

from marin_rl.objectives.shaping import (
    KeepTruncatedConfig,
    MaskTruncatedConfig,
    OverlongConfig,
    RewardTruncatedConfig,
    TruncationConfig,
)
from marin_rl.rollouts.shape_rewards import shape_rewards
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")
OFF = OverlongConfig()
SOFT = OverlongConfig(buffer=4, factor=2.0)
"""Begins at 6 of 10 tokens."""


def rollout(*lengths: int, status: RolloutStatus = RolloutStatus.COMPLETED, reward: float = 1.0) -> Rollout:
    """A rollout with an answer of each length."""
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


def shaped(made: Rollout, overlong: OverlongConfig, truncation: TruncationConfig) -> Rollout:
    [group] = shape_rewards([RolloutGroup("g", [made])], overlong, truncation, max_new_tokens=10)
    assert group.id == "g"
    [found] = group.rollouts
    return found


@pytest.mark.parametrize(
    ("lengths", "penalty"),
    [
        ((6,), 0.0),
        ((7,), -0.5),
        ((8,), -1.0),
        ((10,), -2.0),
        # The longest of several answers, and not their sum.
        ((3, 8, 2), -1.0),
        ((6, 6, 6), 0.0),
    ],
)
def test_the_penalty_is_a_component_of_the_reward(lengths: tuple[int, ...], penalty: float):
    found = shaped(rollout(*lengths), SOFT, KeepTruncatedConfig())
    assert found.rewards == {"correct": 1.0, "overlong": penalty}
    assert found.total_reward == 1.0 + penalty


def test_the_worked_example_of_dapo():
    # L_max = 20480, L_buf = 4096: nothing up to 16384 tokens, -1 at the limit.
    config = OverlongConfig(buffer=4096)
    for length, penalty in ((16384, 0.0), (18432, -0.5), (20480, -1.0)):
        [group] = shape_rewards(
            [RolloutGroup("g", [rollout(length)])], config, KeepTruncatedConfig(), max_new_tokens=20480
        )
        assert group.rollouts[0].rewards["overlong"] == penalty


def test_without_a_penalty_nothing_is_added():
    made = rollout(10)
    assert shaped(made, OFF, KeepTruncatedConfig()) == made


@pytest.mark.parametrize("truncation", [KeepTruncatedConfig(), MaskTruncatedConfig()])
def test_truncated_rollouts_keep_what_they_earned_unless_a_reward_is_fixed(truncation: TruncationConfig):
    made = rollout(10, status=RolloutStatus.TRUNCATED)
    assert shaped(made, OFF, truncation) == made
    assert shaped(made, SOFT, truncation).rewards == {"correct": 1.0, "overlong": -2.0}


@pytest.mark.parametrize("overlong", [OFF, SOFT])
def test_a_fixed_reward_stands_for_all_others(overlong: OverlongConfig):
    found = shaped(rollout(10, status=RolloutStatus.TRUNCATED), overlong, RewardTruncatedConfig(reward=-0.5))
    assert found.rewards == {"truncated": -0.5}
    assert found.total_reward == -0.5
    # Estimators that credit turns find none of the others either.
    several = shaped(rollout(3, 10, status=RolloutStatus.TRUNCATED), overlong, RewardTruncatedConfig(reward=-0.5))
    assert [turn.reward for turn in several.turns] == [None, None]
    completed = rollout(2)
    assert shaped(completed, OFF, RewardTruncatedConfig(reward=-0.5)) == completed


def test_a_reward_with_the_name_of_the_penalty_is_refused():
    made = dataclasses.replace(rollout(10), rewards={"correct": 1.0, "overlong": 5.0})
    with pytest.raises(ValueError, match=r"rollout r: .* a reward named 'overlong'.*overlong.buffer: 0"):
        shaped(made, SOFT, KeepTruncatedConfig())
    assert shaped(made, OFF, KeepTruncatedConfig()) == made


def test_failed_rollouts_stay_without_a_reward():
    failed = rollout(10, status=RolloutStatus.FAILED)
    assert shaped(failed, SOFT, RewardTruncatedConfig()) == failed


def test_what_was_given_is_left_as_it_was():
    groups = [RolloutGroup("g", [rollout(10), rollout(2)])]
    before = copy.deepcopy(groups)
    found = shape_rewards(groups, SOFT, KeepTruncatedConfig(), max_new_tokens=10)
    assert groups == before
    assert [r.rewards["overlong"] for r in found[0].rollouts] == [-2.0, 0.0]
    # Rewards of single turns are the environment's; the penalty is the whole rollout's.
    assert [turn.reward for r in found[0].rollouts for turn in r.turns] == [1.0, 1.0]
