# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Scoring of rollouts by reward components, and combination of their results into rewards and metrics.

Importing this module registers all types of components.
"""

import asyncio
import collections
import logging
from collections.abc import Iterable, Sequence

import marin_rl.rewards.code
import marin_rl.rewards.in_process
import marin_rl.rewards.judge  # noqa: F401
from marin_rl.rewards.component import RewardComponent, RewardComponentConfig, RewardConfigError, RewardScope
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest, StepOutput
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import Message, RewardFailure, RewardResult, TurnReward

logger = logging.getLogger(__name__)


class StepIndexError(ValueError):
    """A step index does not refer to a message of the policy; the message lists the valid indices."""


def build_components(configs: Sequence[RewardComponentConfig], sandbox: Sandbox) -> list[RewardComponent]:
    """Build the components of a config's `rewards`. The sandbox runs user code and model-written code.

    Raises:
        RewardConfigError: if two components have the same name.
    """
    components = [config.build(sandbox) for config in configs]
    counts = collections.Counter(component.name for component in components)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise RewardConfigError(f"rewards: duplicate names {', '.join(duplicates)}; give each a unique `name`")
    return components


async def check_components(components: Iterable[RewardComponent]) -> None:
    """Check that all components are usable, before any rollout is sampled. Their sandbox must be started.

    Raises:
        RewardConfigError: if any is not; the message has a line for each problem, with the names of the components.
    """
    problems: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for component in components:
        try:
            await component.check()
        except RewardConfigError as error:
            problems[str(error)][repr(component.name)] = None
    if problems:
        raise RewardConfigError("\n".join(f"reward {', '.join(names)}: {text}" for text, names in problems.items()))


async def score_rollouts(
    components: Sequence[RewardComponent], scope: RewardScope, requests: Sequence[RewardRequest]
) -> list[list[RewardResult]]:
    """Score rollouts with the components of one scope. A failed call affects only the rollouts of that call.

    Only the components of `scope` are called; results are in the order of these. Requests are those of one prompt or of
    a step for the scopes `group` and `batch`, any for `pointwise`.
    """
    called = [component for component in components if component.scope is scope] if requests else []
    by_component = await asyncio.gather(*(_call(component, requests) for component in called))
    return [[results[index] for results in by_component] for index in range(len(requests))]


async def _call(component: RewardComponent, requests: Sequence[RewardRequest]) -> list[RewardResult]:
    try:
        results = await component.score(requests)
    except RewardCallError as error:
        return [_failed(component, request, error) for request in requests]
    return [_result(component, *pair) for pair in zip(requests, results, strict=True)]


def _result(
    component: RewardComponent, request: RewardRequest, result: EvaluateResult | RewardCallError
) -> RewardResult:
    if isinstance(result, RewardCallError):
        return _failed(component, request, result)
    if not result.is_score_valid:
        why = result.error or result.reason
        detail = "the function returned is_score_valid=False" + (f": {why}" if why else "")
        return _failed(component, request, RewardCallError(RewardFailure.INVALID_SCORE, detail))
    outputs = result.step_outputs or ()
    try:
        steps = align_steps(request.rollout_id, request.messages, outputs, request.num_prompt_messages)
    except StepIndexError as error:
        return _failed(component, request, RewardCallError(RewardFailure.STEP_INDEX, str(error)))
    logger.debug(
        "rollout %s: reward %r, rewards by message %s, rewards by turn %s",
        request.rollout_id,
        component.name,
        [(step.step_index, step.base_reward) for step in outputs],
        [(turn, step.base_reward) for turn, step in steps.items()],
    )
    return RewardResult(
        component=component.name,
        weight=component.weight,
        score=result.total_score,
        steps=tuple(steps.values()),
        metrics=dict(result.metrics),
        reason=result.reason,
        error=result.error,
    )


def _failed(component: RewardComponent, request: RewardRequest, failure: RewardCallError) -> RewardResult:
    logger.debug(
        "reward %r failed for rollout %s: %s: %s", component.name, request.rollout_id, failure.cause, failure.detail
    )
    return RewardResult(
        component.name,
        component.weight,
        score=None,
        metrics=failure.metrics,
        error=failure.detail,
        failure=failure.cause.value,
    )


def align_steps(
    rollout_id: str, messages: Sequence[Message], step_outputs: Sequence[StepOutput], num_prompt_messages: int = 0
) -> dict[int, TurnReward]:
    """Map the step outputs of a reward function to turns; turn k is the k-th message of the policy.

    Args:
        rollout_id: names the rollout in errors.
        messages: the whole conversation, as passed to the function.
        step_outputs: the function's step outputs, in any order.
        num_prompt_messages: number of messages in the prompt; assistant messages among them are few-shot examples.

    Returns:
        The step rewards by turn, in the order of turns; turns without one are omitted.

    Raises:
        StepIndexError: if an index is out of range, refers to a message that is not the policy's, or is repeated.

    >>> chat = [{"role": role, "content": ""} for role in ("user", "assistant", "user", "assistant")]
    >>> align_steps("r1", chat, [StepOutput(step_index=3, base_reward=0.5)])[1].base_reward
    0.5
    """
    policy = (index for index in range(num_prompt_messages, len(messages)) if messages[index]["role"] == "assistant")
    turns = {index: turn for turn, index in enumerate(policy)}
    rewards: dict[int, TurnReward] = {}
    for step in step_outputs:
        index = step.step_index
        problem = None
        if not 0 <= index < len(messages):
            problem = f"is out of range for {len(messages)} messages"
        elif messages[index]["role"] != "assistant":
            problem = f"refers to a message of role {messages[index]['role']!r}"
        elif index < num_prompt_messages:
            problem = f"refers to an example in the prompt, which has {num_prompt_messages} messages"
        elif turns[index] in rewards:
            problem = "is repeated"
        if problem is not None:
            valid = ", ".join(map(str, turns)) or "none (it has no messages)"
            raise StepIndexError(
                f"rollout {rollout_id}: step_index {index} {problem}; the indices of the policy's messages are {valid}"
            )
        turn = turns[index]
        rewards[turn] = TurnReward(turn, step.base_reward, reason=step.reason, metrics=dict(step.metrics))
    return dict(sorted(rewards.items()))


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

    Raises:
        IndexError: if a result refers to a turn that does not exist.
    """
    rewards: list[dict[str, float]] = [{} for _ in range(turns)]
    for result in results:
        for step in result.steps:
            rewards[step.turn][result.component] = result.weight * step.base_reward
    return rewards
