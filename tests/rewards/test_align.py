# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.align import StepIndexError, align_steps, policy_messages
from marin_rl.rewards.functions import StepOutput
from marin_rl.types import Message, TurnReward

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
