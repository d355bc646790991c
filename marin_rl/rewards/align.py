# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which turn a step's reward belongs to."""

from collections.abc import Sequence

from marin_rl.rewards.functions import StepOutput
from marin_rl.types import Message, TurnReward


class StepIndexError(ValueError):
    """A step index that names no message of the policy; the message names rollout, index and the valid ones."""


def policy_messages(messages: Sequence[Message], num_prompt_messages: int) -> list[int]:
    """The indices in `messages` of what the policy said: the k-th is turn k.

    Args:
        messages: the whole conversation.
        num_prompt_messages: messages of the prompt; assistant messages among them are examples that somebody wrote.

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
    """Match what a reward function says about steps with the turns that they are about.

    Args:
        rollout_id: names the rollout in errors.
        messages: the whole conversation, as the function was given it.
        step_outputs: what the function said, in any order.
        num_prompt_messages: messages of the prompt.

    Returns:
        The step rewards by turn, in the turns' order; turns without one are left out.

    Raises:
        StepIndexError: if an index names no message, a message that is not the policy's, or one twice.
    """
    turns = {index: turn for turn, index in enumerate(policy_messages(messages, num_prompt_messages))}
    found: dict[int, TurnReward] = {}
    for step in step_outputs:
        index = step.step_index
        problem = _problem(index, messages, num_prompt_messages)
        if problem is None and turns[index] in found:
            problem = "is given twice"
        if problem is not None:
            valid = ", ".join(map(str, turns)) or "none, it said nothing"
            raise StepIndexError(
                f"rollout {rollout_id}: step_index {index} {problem}; the policy's messages are {valid}"
            )
        found[turns[index]] = TurnReward(
            turn=turns[index], base_reward=step.base_reward, reason=step.reason, metrics=dict(step.metrics)
        )
    return dict(sorted(found.items()))


def _problem(index: int, messages: Sequence[Message], num_prompt_messages: int) -> str | None:
    if not 0 <= index < len(messages):
        return f"is outside of the {len(messages)} messages"
    role = messages[index]["role"]
    if role != "assistant":
        return f"is a message of role {role!r}"
    if index < num_prompt_messages:
        return f"is an example in the prompt, which ends at message {num_prompt_messages}"
    return None
