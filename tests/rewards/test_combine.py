# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.rewards.combine import evaluation_metrics, failure, turn_rewards, weighted_rewards
from marin_rl.types import RewardResult, TurnReward

CORRECT = RewardResult(
    "correct",
    weight=2.0,
    score=1.0,
    steps=(TurnReward(0, 0.5, metrics={"moves": 1.0}), TurnReward(2, 0.0, metrics={"moves": 4.0})),
    metrics={"length": 3.0, "score": 99.0, "failed_timeout": 99.0},
)
SHORT = RewardResult("short", weight=-0.5, score=0.5, steps=(TurnReward(2, 4.0),))
LOST = RewardResult("judge", weight=1.0, score=None, error="timeout: no answer", failure="timeout")


def test_rewards_are_weighted():
    assert weighted_rewards([CORRECT, SHORT]) == {"correct": 2.0, "short": -0.25}
    assert failure([CORRECT, SHORT]) is None


def test_a_missing_score_fails_the_rollout():
    assert failure([CORRECT, LOST]) == "reward 'judge': timeout: no answer"
    with pytest.raises(ValueError, match="'judge': timeout: no answer"):
        weighted_rewards([CORRECT, LOST])


def test_turn_rewards_have_the_names_of_their_components():
    assert turn_rewards([CORRECT, SHORT], 3) == [{"correct": 1.0}, {}, {"correct": 0.0, "short": -2.0}]
    assert turn_rewards([], 2) == [{}, {}]
    with pytest.raises(IndexError):
        turn_rewards([CORRECT], 2)


def test_metrics_are_means_over_rollouts_and_steps():
    other = RewardResult("correct", weight=2.0, score=0.0, metrics={"length": 6.0})
    lost = RewardResult("correct", weight=2.0, score=None, error="timeout: no answer", failure="timeout")
    found = evaluation_metrics([CORRECT, other, LOST, lost])
    assert {name: (metric.value, metric.weight) for name, metric in found.items()} == {
        "rewards/correct/score": (0.5, 2.0),
        "rewards/correct/length": (4.5, 2.0),
        "rewards/correct/moves": (2.5, 2.0),
        "rewards/correct/failed_timeout": (1.0, 1.0),
        "rewards/judge/failed_timeout": (1.0, 1.0),
    }
