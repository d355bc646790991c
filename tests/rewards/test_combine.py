# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.combine import (
    StepIndexError,
    align_steps,
    evaluation_metrics,
    failure,
    policy_messages,
    turn_rewards,
    weighted_rewards,
)
from marin_rl.rewards.functions import StepOutput
from marin_rl.types import Message, RewardResult, TurnReward

ROLES = ("system", "user", "assistant", "user", "assistant", "tool", "assistant")


def chat(roles) -> list[Message]:
    return [Message(role=role, content="") for role in roles]


def test_steps_are_aligned_with_turns():
    steps = [
        StepOutput(step_index=6, base_reward=3.0),
        StepOutput(step_index=2, base_reward=1.0, reason="good", metrics={"moves": 2.0}),
    ]
    assert align_steps("r1", chat(ROLES), steps) == {
        0: TurnReward(turn=0, base_reward=1.0, reason="good", metrics={"moves": 2.0}),
        2: TurnReward(turn=2, base_reward=3.0),
    }


def test_prompt_examples_are_not_turns():
    assert policy_messages(chat(ROLES), 3) == [4, 6]
    [(turn, step)] = align_steps("r1", chat(ROLES), [StepOutput(step_index=4, base_reward=1.0)], 3).items()
    assert turn == step.turn == 0
    with pytest.raises(StepIndexError, match=r"rollout r1: step_index 2 refers to an example in the prompt.* are 4, 6"):
        align_steps("r1", chat(ROLES), [StepOutput(step_index=2, base_reward=1.0)], 3)


@pytest.mark.parametrize(
    ("indices", "problem"),
    [
        ([1], "step_index 1 refers to a message of role 'user'"),
        ([0], "step_index 0 refers to a message of role 'system'"),
        ([5], "step_index 5 refers to a message of role 'tool'"),
        ([7], "step_index 7 is out of range for 7 messages"),
        ([2, 4, 2], "step_index 2 is repeated"),
    ],
)
def test_wrong_indices_are_named(indices, problem):
    steps = [StepOutput(step_index=index, base_reward=0.0) for index in indices]
    with pytest.raises(StepIndexError) as raised:
        align_steps("rollout-17", chat(ROLES), steps)
    assert str(raised.value) == f"rollout rollout-17: {problem}; the indices of the policy's messages are 2, 4, 6"


def test_conversation_without_policy_messages():
    with pytest.raises(StepIndexError, match="none \\(it has no messages\\)"):
        align_steps("r1", chat(["user"]), [StepOutput(step_index=0, base_reward=0.0)])


@given(
    roles=st.lists(st.sampled_from(["user", "assistant", "tool"]), max_size=12),
    first=st.integers(0, 12),
    data=st.data(),
)
def test_each_policy_message_is_one_turn(roles, first, data):
    messages = chat(roles)
    # The oracle counts the policy's messages.
    turns, count = {}, 0
    for index, role in enumerate(roles):
        if index >= first and role == "assistant":
            turns[index] = count
            count += 1
    chosen = data.draw(st.lists(st.sampled_from(sorted(turns)), unique=True)) if turns else []
    steps = [StepOutput(step_index=index, base_reward=float(index)) for index in chosen]
    found = align_steps("r1", messages, steps, first)
    assert {turn: step.base_reward for turn, step in found.items()} == {turns[index]: float(index) for index in chosen}
    assert list(found) == sorted(found)


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
