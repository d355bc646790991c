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
    describe_invalid,
)
from marin_rl.rewards.sandbox.config import SandboxConfig

_LIMITS = {
    RewardFailure.TIMEOUT: "gave no answer within {0.wall_seconds:g} s; make it faster, or raise sandbox.wall_seconds",
    RewardFailure.CPU: "used over {0.cpu_seconds:g} s of CPU time; make it faster, or raise sandbox.cpu_seconds",
    RewardFailure.MEMORY: "requested over {0.memory_mb} MiB of memory; use less, or raise sandbox.memory_mb",
    RewardFailure.FILE_SIZE: "wrote over {0.file_mb} MiB to a file, or too much in all; raise sandbox.file_mb",
    RewardFailure.OUTPUT: "printed or returned over {0.output_kb} KiB; print less, or raise sandbox.output_kb",
    RewardFailure.PROCESSES: "started over {0.processes} processes; start fewer, or raise sandbox.processes",
    RewardFailure.THREADS: "started over {0.threads} threads; start fewer, or raise sandbox.threads",
}


def failure_of_function(function: object, error: RewardCallError, config: SandboxConfig) -> str:
    """Describe the failure of a function's call in a sentence with the remedy.

    Args:
        function: name and file of the function.
        error: the failure.
        config: the limits of the call.

    >>> failure_of_function("'f' of f.py", RewardCallError(RewardFailure.TIMEOUT, ""), SandboxConfig())
    "'f' of f.py gave no answer within 10 s; make it faster, or raise sandbox.wall_seconds"
    """
    if error.cause in _LIMITS:
        return f"{function} {_LIMITS[error.cause].format(config)}"
    is_own = error.cause in (RewardFailure.RAISED, RewardFailure.INVALID_ANSWER)
    return f"{function} {error.detail}" if is_own else f"{function} failed: {error.detail.rstrip(': ')}"


class _Answer(pydantic.BaseModel):
    """Answer of a call's process, as it writes it."""

    model_config = pydantic.ConfigDict(extra="forbid")

    results: list[EvaluateResult] | None = None
    raised: str | None = None
    invalid: str | None = None
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
            RewardFailure.INVALID_ANSWER, f"sent the answer {answer[:200]!r}, an invalid {describe_invalid(error)}"
        ) from error
    if parsed.memory:
        raise RewardCallError(RewardFailure.MEMORY, "requested more memory than sandbox.memory_mb")
    if parsed.raised is not None:
        raise RewardCallError(RewardFailure.RAISED, parsed.raised)
    if parsed.invalid is not None:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, parsed.invalid)
    if parsed.results is None or len(parsed.results) != count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"sent {answer[:200]!r} instead of {count} results")
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
        raise RewardCallError(
            RewardFailure.INVALID_ANSWER, f"sent {text[:200]!r} instead of a list of answers"
        ) from error
    if len(answers) > count:
        raise RewardCallError(RewardFailure.INVALID_ANSWER, f"sent {len(answers)} answers of {count} calls")
    return answers
