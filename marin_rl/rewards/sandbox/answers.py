# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Answers of the processes of calls, which are untrusted: parsed and validated in the trainer."""

import pydantic

from marin_rl.rewards.functions import (
    EvaluateResult,
    RewardCallError,
    RewardFailure,
    RewardFunctionError,
    check_metric_names,
)


class _Answer(pydantic.BaseModel):
    """Answer of a call's process, as it writes it."""

    model_config = pydantic.ConfigDict(extra="forbid")

    results: list[EvaluateResult] | None = None
    raised: str | None = None
    memory: bool = False


def validated(answer: str, count: int) -> list[EvaluateResult]:
    """Parse the untrusted answer of a call.

    Args:
        answer: the output of the call's process.
        count: number of rollouts that the call scored.

    Raises:
        RewardCallError: if it does not hold `count` valid results.
    """
    if not answer:
        raise RewardCallError(RewardFailure.EXITED, "its process exited without an answer")
    try:
        parsed = _Answer.model_validate_json(answer)
    except pydantic.ValidationError as error:
        raise RewardCallError(
            RewardFailure.INVALID_ANSWER, f"{answer[:200]!r} is not a valid answer: {error}"
        ) from error
    if parsed.memory:
        raise RewardCallError(RewardFailure.MEMORY, "more memory than sandbox.memory_mb")
    if parsed.raised is not None:
        raise RewardCallError(RewardFailure.RAISED, parsed.raised)
    if parsed.results is None or len(parsed.results) != count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"{answer[:200]!r} does not hold {count} results")
    try:
        check_metric_names(parsed.results)
    except RewardFunctionError as error:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, str(error)) from error
    return parsed.results


_ANSWERS = pydantic.TypeAdapter(list[str])


def answers_of_calls(text: str, count: int) -> list[str]:
    """Parse the untrusted answers of a process that made several calls.

    Args:
        text: a JSON list.
        count: number of calls.

    Returns:
        The untrusted answer of each call that was made, in order.

    Raises:
        RewardCallError: if the text is not a list of at most `count` answers.
    """
    try:
        answers = _ANSWERS.validate_json(text)
    except pydantic.ValidationError as error:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"{text[:200]!r} is not a list of answers") from error
    if len(answers) > count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"{len(answers)} answers of {count} calls")
    return answers
