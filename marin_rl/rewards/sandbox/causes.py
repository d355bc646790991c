# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Why a rollout has no score from a reward component."""

import enum
import os
import signal
from typing import Any

from marin_rl.rewards.sandbox.zygote import NOT_CONFINED


class LossCause(enum.StrEnum):
    """Why a rollout has no score; counted under these names."""

    TIMEOUT = "timeout"
    """It took longer than `wall_seconds`."""
    CPU = "cpu"
    """It used more than `cpu_seconds` of processor time."""
    MEMORY = "memory"
    """It asked for more than `memory_mb`."""
    FILE_SIZE = "file_size"
    """It wrote a file larger than `file_mb`."""
    OUTPUT = "output"
    """It printed or answered more than `output_kb`."""
    PROCESSES = "processes"
    """It had more than `processes` processes."""
    SIGNAL = "signal"
    """A signal ended it, a crash for instance."""
    EXITED = "exited"
    """It ended its process without an answer."""
    INVALID_ANSWER = "invalid_answer"
    """Its answer is not what a reward function answers."""
    RAISED = "raised"
    """It raised an exception."""
    WORKER = "worker"
    """The worker process died, did not answer, or could not confine the call."""
    INVALID_SCORE = "invalid_score"
    """The function itself said that its score is not valid."""
    STEP_INDEX = "step_index"
    """A step's index names no message of the policy, or one twice."""
    REQUEST = "request"
    """A judge or another service did not answer, after every retry."""


class SandboxError(RuntimeError):
    """A call that brought no answer."""

    def __init__(self, cause: LossCause, detail: str):
        super().__init__(f"{cause.value}: {detail}")
        self.cause = cause
        """Why."""
        self.detail = detail
        """Why, in words."""


_VIOLATIONS = {
    "timeout": (LossCause.TIMEOUT, "no answer within sandbox.wall_seconds"),
    "output": (LossCause.OUTPUT, "more output than sandbox.output_kb"),
    "processes": (LossCause.PROCESSES, "more processes than sandbox.processes"),
}
_SIGNALS = {
    signal.SIGXCPU: (LossCause.CPU, "more processor time than sandbox.cpu_seconds"),
    signal.SIGXFSZ: (LossCause.FILE_SIZE, "a file larger than sandbox.file_mb"),
}


def loss_of(report: dict[str, Any], cpu_seconds: float) -> SandboxError | None:
    """Why a call's process ended before its time, or None where it ended by itself with status 0.

    Args:
        report: what the worker observed.
        cpu_seconds: the limit on processor time.
    """
    if report["violation"] is not None:
        return SandboxError(*_VIOLATIONS[report["violation"]])
    if report["status"] is None:
        return SandboxError(LossCause.WORKER, "the process that holds the loaded file died")
    code = os.waitstatus_to_exitcode(report["status"])
    if code >= 0:
        return _exit_loss(code, report["stderr"])
    if -code in _SIGNALS:
        return SandboxError(*_SIGNALS[signal.Signals(-code)])
    if -code == signal.SIGKILL and report["cpu"] >= cpu_seconds:
        return SandboxError(*_SIGNALS[signal.SIGXCPU])
    return SandboxError(LossCause.SIGNAL, f"ended by {_signal_name(-code)}")


def _exit_loss(code: int, stderr: str) -> SandboxError | None:
    if code == 0:
        return None
    if code == NOT_CONFINED:
        return SandboxError(LossCause.WORKER, f"the call was not confined, and not run: {stderr[-500:]}")
    return SandboxError(LossCause.EXITED, f"it ended its process with status {code}: {stderr[-500:]}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
