# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From what a worker observed of a call's process to the cause of the loss."""

import os
import signal
from typing import Any

from marin_rl.rewards.failures import RewardCallError, RewardFailure

_VIOLATIONS = {
    "timeout": (RewardFailure.TIMEOUT, "no answer within sandbox.wall_seconds"),
    "output": (RewardFailure.OUTPUT, "more output than sandbox.output_kb"),
    "cpu": (RewardFailure.CPU, "more processor time than sandbox.cpu_seconds"),
    "threads": (RewardFailure.THREADS, "more threads than sandbox.threads"),
    "files": (RewardFailure.FILE_SIZE, "more in its folder than four times sandbox.file_mb"),
    "processes": (RewardFailure.PROCESSES, "more processes than sandbox.processes"),
}
_SIGNALS = {
    signal.SIGXCPU: (RewardFailure.CPU, "more processor time than sandbox.cpu_seconds"),
    signal.SIGXFSZ: (RewardFailure.FILE_SIZE, "a file larger than sandbox.file_mb"),
}


def failure_of(report: dict[str, Any], cpu_seconds: float) -> RewardCallError | None:
    """Why a call's process ended before its time, or None where it ended by itself with status 0.

    Args:
        report: what the worker observed.
        cpu_seconds: the limit on processor time.
    """
    if report["violation"] is not None:
        return RewardCallError(*_VIOLATIONS[report["violation"]])
    if report["status"] is None:
        return RewardCallError(RewardFailure.WORKER, "the process that holds the loaded file died")
    code = os.waitstatus_to_exitcode(report["status"])
    if code >= 0 and not report["confined"]:
        return RewardCallError(
            RewardFailure.WORKER, f"the call was not confined, and not run: {report['stderr'][-500:]}"
        )
    if code >= 0:
        return _exit_failure(code, report["stderr"])
    if -code in _SIGNALS:
        return RewardCallError(*_SIGNALS[signal.Signals(-code)])
    if -code == signal.SIGKILL and report["cpu"] >= cpu_seconds:
        return RewardCallError(*_SIGNALS[signal.SIGXCPU])
    return RewardCallError(RewardFailure.SIGNAL, f"ended by {_signal_name(-code)}")


def _exit_failure(code: int, stderr: str) -> RewardCallError | None:
    if code == 0:
        return None
    return RewardCallError(RewardFailure.EXITED, f"it ended its process with status {code}: {stderr[-500:]}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
