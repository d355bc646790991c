# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import signal
import sys
from typing import Any

import pytest

from marin_rl.rewards.failures import RewardFailure, failure_of


def ended(program: str) -> int:
    """Return the kernel's exit status of a process that runs a program."""
    code = f"import os, signal\n{program}"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", code], os.environ)
    return os.waitpid(pid, 0)[1]


def killed(number: int) -> str:
    reset = "" if number == signal.SIGKILL else f"signal.signal({number}, signal.SIG_DFL)\n"
    return f"{reset}os.kill(os.getpid(), {number})"


def report(status: int | None = 0, violation: str | None = None, cpu: float = 0.0) -> dict[str, Any]:
    streams = {"stderr": "said", "stdout": "", "answer": ""}
    return {"status": status, "violation": violation, "cpu": cpu, "confined": True, **streams}


def test_successful_call_has_no_failure():
    assert failure_of(report(ended("pass")), 10.0) is None


@pytest.mark.parametrize(
    ("program", "cpu", "cause", "detail"),
    [
        (killed(signal.SIGXCPU), 10.0, RewardFailure.CPU, "cpu_seconds"),
        (killed(signal.SIGKILL), 11.0, RewardFailure.CPU, "cpu_seconds"),
        (killed(signal.SIGKILL), 0.1, RewardFailure.SIGNAL, "SIGKILL"),
        (killed(signal.SIGXFSZ), 0.1, RewardFailure.FILE_SIZE, "file_mb"),
        (killed(signal.SIGTERM), 0.1, RewardFailure.SIGNAL, "SIGTERM"),
        (killed(signal.SIGRTMIN + 1), 0.1, RewardFailure.SIGNAL, f"signal {signal.SIGRTMIN + 1}"),
        ("os._exit(3)", 0.1, RewardFailure.EXITED, "status 3: said"),
    ],
)
def test_failure_of_exit_status(program: str, cpu: float, cause: RewardFailure, detail: str):
    failure = failure_of(report(ended(program), cpu=cpu), 10.0)
    assert failure is not None
    assert failure.cause is cause
    assert detail in failure.detail


@pytest.mark.parametrize("status", [0, 1])
def test_unconfined_call_is_a_worker_failure(status: int):
    failure = failure_of(report(ended(f"os._exit({status})")) | {"confined": False}, 10.0)
    assert failure is not None
    assert failure.cause is RewardFailure.WORKER
    assert "could not be confined and was not run: said" in failure.detail


@pytest.mark.parametrize("violation", ["timeout", "output", "processes"])
def test_violation_takes_precedence_over_exit_status(violation: str):
    failure = failure_of(report(ended(killed(signal.SIGKILL)), violation), 10.0)
    assert failure is not None
    assert failure.cause == violation


def test_dead_forkserver_is_a_worker_failure():
    failure = failure_of(report(None), 10.0)
    assert failure is not None
    assert failure.cause is RewardFailure.WORKER
