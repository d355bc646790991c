# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Assignment of step rewards to turns."""

from collections.abc import Sequence

from marin_rl.rewards.functions import StepOutput
from marin_rl.types import Message, TurnReward


class StepIndexError(ValueError):
    """A step index does not refer to a message of the policy; the message lists the valid indices."""


def policy_messages(messages: Sequence[Message], num_prompt_messages: int) -> list[int]:
    """Return the indices in `messages` of the policy's messages; the k-th is turn k.

    Args:
        messages: the whole conversation.
        num_prompt_messages: number of messages in the prompt; assistant messages among them are few-shot examples.

    >>> chat = [{"role": role, "content": ""} for role in ("user", "assistant", "user", "assistant")]
    >>> policy_messages(chat, 0), policy_messages(chat, 2)
    ([1, 3], [3])
    """
    return [
        index
        for index, message in enumerate(messages)
        if index >= num_prompt_messages and message["role"] == "assistant"
    ]


def align_steps(
    rollout_id: str, messages: Sequence[Message], step_outputs: Sequence[StepOutput], num_prompt_messages: int = 0
) -> dict[int, TurnReward]:
    """Map the step outputs of a reward function to turns.

    Args:
        rollout_id: names the rollout in errors.
        messages: the whole conversation, as passed to the function.
        step_outputs: the function's step outputs, in any order.
        num_prompt_messages: number of messages in the prompt.

    Returns:
        The step rewards by turn, in the order of turns; turns without one are omitted.

    Raises:
        StepIndexError: if an index is out of range, refers to a message that is not the policy's, or is repeated.
    """
    turns = {index: turn for turn, index in enumerate(policy_messages(messages, num_prompt_messages))}
    rewards: dict[int, TurnReward] = {}
    for step in step_outputs:
        index = step.step_index
        problem = _problem(index, messages, num_prompt_messages)
        if problem is None and turns[index] in rewards:
            problem = "is repeated"
        if problem is not None:
            valid = ", ".join(map(str, turns)) or "none (it has no messages)"
            raise StepIndexError(
                f"rollout {rollout_id}: step_index {index} {problem}; the indices of the policy's messages are {valid}"
            )
        rewards[turns[index]] = TurnReward(
            turn=turns[index], base_reward=step.base_reward, reason=step.reason, metrics=dict(step.metrics)
        )
    return dict(sorted(rewards.items()))


def _problem(index: int, messages: Sequence[Message], num_prompt_messages: int) -> str | None:
    if not 0 <= index < len(messages):
        return f"is out of range for {len(messages)} messages"
    role = messages[index]["role"]
    if role != "assistant":
        return f"refers to a message of role {role!r}"
    if index < num_prompt_messages:
        return f"refers to an example in the prompt, which has {num_prompt_messages} messages"
    return None
