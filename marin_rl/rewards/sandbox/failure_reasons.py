# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Classification of failed sandbox calls from the worker's report."""

import os
import signal
from typing import Any

from marin_rl.rewards.failures import RewardCallError, RewardFailure

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
