# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Causes of failed reward calls, their error, and the classification of failed sandbox calls."""

import enum
import os
import signal
from typing import Any


class RewardFailure(enum.StrEnum):
    """Cause for which a rollout has no score; failures are counted under these names."""

    TIMEOUT = "timeout"
    """The call took longer than `wall_seconds`."""
    CPU = "cpu"
    """It used more than `cpu_seconds` of CPU time."""
    MEMORY = "memory"
    """It requested more memory than `memory_mb`."""
    FILE_SIZE = "file_size"
    """It wrote a file larger than `file_mb`."""
    OUTPUT = "output"
    """It printed or returned more than `output_kb`."""
    PROCESSES = "processes"
    """It had more than `processes` processes."""
    THREADS = "threads"
    """It had more than `threads` threads."""
    SIGNAL = "signal"
    """A signal terminated it, for example after a crash."""
    EXITED = "exited"
    """Its process exited without an answer."""
    INVALID_ANSWER = "invalid_answer"
    """Its answer is not a valid result, or an LLM judge's answer holds no valid scores after all retries."""
    RAISED = "raised"
    """It raised an exception."""
    WORKER = "worker"
    """The worker process died, did not answer, or could not confine the call."""
    INVALID_SCORE = "invalid_score"
    """The function returned `is_score_valid=False`."""
    STEP_INDEX = "step_index"
    """A step index does not refer to a message of the policy, or is repeated."""
    REQUEST = "request"
    """An LLM judge or another service did not answer after all retries."""


class RewardCallError(RuntimeError):
    """A call of a reward component failed."""

    def __init__(self, cause: RewardFailure, detail: str):
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause
        """Category of the failure."""
        self.detail = detail
        """Description of the failure."""


_VIOLATIONS = {
    "timeout": (RewardFailure.TIMEOUT, "no answer within sandbox.wall_seconds"),
    "output": (RewardFailure.OUTPUT, "more output than sandbox.output_kb"),
    "cpu": (RewardFailure.CPU, "more CPU time than sandbox.cpu_seconds"),
    "threads": (RewardFailure.THREADS, "more threads than sandbox.threads"),
    "files": (RewardFailure.FILE_SIZE, "its folder is larger than four times sandbox.file_mb"),
    "processes": (RewardFailure.PROCESSES, "more processes than sandbox.processes"),
}
_SIGNALS = {
    signal.SIGXCPU: (RewardFailure.CPU, "more CPU time than sandbox.cpu_seconds"),
    signal.SIGXFSZ: (RewardFailure.FILE_SIZE, "a file larger than sandbox.file_mb"),
}


def failure_of(report: dict[str, Any], cpu_seconds: float) -> RewardCallError | None:
    """Return the reason for which a call failed, or None if its process exited with status 0.

    Args:
        report: the worker's report on the call's process.
        cpu_seconds: the limit on CPU time in seconds.
    """
    if report["violation"] is not None:
        return RewardCallError(*_VIOLATIONS[report["violation"]])
    if report["status"] is None:
        return RewardCallError(RewardFailure.WORKER, "the forkserver of the loaded file died")
    code = os.waitstatus_to_exitcode(report["status"])
    if code >= 0 and not report["confined"]:
        return RewardCallError(
            RewardFailure.WORKER, f"the call could not be confined and was not run: {report['stderr'][-500:]}"
        )
    if code >= 0:
        return _exit_failure(code, report["stderr"])
    if -code in _SIGNALS:
        return RewardCallError(*_SIGNALS[signal.Signals(-code)])
    if -code == signal.SIGKILL and report["cpu"] >= cpu_seconds:
        return RewardCallError(*_SIGNALS[signal.SIGXCPU])
    return RewardCallError(RewardFailure.SIGNAL, f"terminated by {_signal_name(-code)}")


def _exit_failure(code: int, stderr: str) -> RewardCallError | None:
    if code == 0:
        return None
    return RewardCallError(RewardFailure.EXITED, f"its process exited with status {code}: {stderr[-500:]}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
