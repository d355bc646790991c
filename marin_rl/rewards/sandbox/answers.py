# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Answers of the processes of calls, which are untrusted: parsed and validated in the trainer."""

from typing import NamedTuple

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
    own_process: str | None = None
    """Reason for which calls of the function must not share a process."""
    stopped: bool = False
    """Whether the process made no further calls because its time was up."""
    answers: int = 0
    """Number of calls that the process had made when it stopped or ended the sharing."""


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


class SharedResults(NamedTuple):
    """Results of the calls of one process."""

    results: list[EvaluateResult | None]
    """The result of each call; None if it has no valid one."""
    failure: RewardCallError | None
    """The first failure of a call that was made; None if all succeeded."""
    own_process: str | None
    """Reason for which further calls of the function must not share a process, if any."""


def shared_results(answer: str, count: int) -> SharedResults:
    """Parse the untrusted answers of a process of several calls, one per line.

    Args:
        answer: the lines; the last can say that the process made no further calls.
        count: number of calls.

    Raises:
        RewardCallError: if lines are missing or were added, so that their order does not identify the calls.
    """
    *lines, rest = answer.split("\n")
    last = _parse(lines[-1]) if lines else None
    has_stopped = last is not None and (last.stopped or last.own_process is not None)
    if has_stopped:
        lines.pop()
    expected = count if last is None or not has_stopped else last.answers
    if rest or len(lines) != expected or len(lines) > count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"{len(lines)} answers of {count} calls")
    results: list[EvaluateResult | None] = [None] * count
    failure = None
    for index, line in enumerate(lines):
        try:
            [results[index]] = validated(line, 1)
        except RewardCallError as error:
            failure = failure or error
    return SharedResults(results, failure, None if last is None else last.own_process)


def _parse(line: str) -> _Answer | None:
    try:
        return _Answer.model_validate_json(line)
    except pydantic.ValidationError:
        return None
