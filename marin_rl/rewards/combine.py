# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Combination of component results into rewards: assignment of step rewards to turns, weights and metrics."""

from collections.abc import Iterable, Sequence

from marin_rl.metrics import Metric, mean, merge_all, total
from marin_rl.rewards.functions import StepOutput
from marin_rl.types import Message, RewardResult, TurnReward


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


def failure(results: Sequence[RewardResult]) -> str | None:
    """Return the reason for which a rollout has no reward, or None if every component has a score for it.

    A missing score does not count as 0: the rollout is excluded from its group's baseline and from training.
    """
    failed = [result for result in results if result.score is None]
    return "; ".join(f"reward {result.component!r}: {result.error}" for result in failed) or None


def weighted_rewards(results: Sequence[RewardResult]) -> dict[str, float]:
    """Return the rewards of a rollout by component: weight times score.

    Raises:
        ValueError: if a component has no score for the rollout.

    >>> results = [RewardResult("correct", weight=2.0, score=1.0), RewardResult("short", weight=0.5, score=0.5)]
    >>> weighted_rewards(results)
    {'correct': 2.0, 'short': 0.25}
    """
    missing = failure(results)
    if missing is not None:
        raise ValueError(f"the rollout has no reward: {missing}")
    return {result.component: result.weight * result.score for result in results if result.score is not None}


def turn_rewards(results: Sequence[RewardResult], turns: int) -> list[dict[str, float]]:
    """Return the rewards of each turn by component: weight times base reward; empty for turns without step rewards.

    Args:
        results: results of the components for the rollout.
        turns: number of turns of the rollout.

    Raises:
        IndexError: if a result refers to a turn that does not exist.
    """
    rewards: list[dict[str, float]] = [{} for _ in range(turns)]
    for result in results:
        for step in result.steps:
            rewards[step.turn][result.component] = result.weight * step.base_reward
    return rewards


def evaluation_metrics(results: Iterable[RewardResult]) -> dict[str, Metric]:
    """Return the metrics of components: `rewards/<component>/score` and `rewards/<component>/<metric>`.

    Scores are averaged over the rollouts that have one; metrics of a step are averaged over steps. Rollouts without a
    score are counted by cause, as `rewards/<component>/failed_<cause>`.
    """
    return merge_all(record for result in results for record in _records(result))


def _records(result: RewardResult) -> Iterable[dict[str, Metric]]:
    measured = [result.metrics, *(step.metrics for step in result.steps)]
    scores = {f"failed_{result.failure}": total([1])} if result.score is None else {"score": mean([result.score])}
    for record in (
        *({name: mean([value]) for name, value in part.items() if not _is_reserved(name)} for part in measured),
        scores,
    ):
        yield {f"rewards/{result.component}/{name}": metric for name, metric in record.items()}


def _is_reserved(name: str) -> bool:
    # A user's metric must not replace the component's own metrics.
    return name == "score" or name.startswith("failed_")
