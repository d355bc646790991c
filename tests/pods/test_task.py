# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exit status of a task."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.needs_iris import NEEDS_IRIS
from tests.tiny_run import make_run
from tests.training_hosts import hosts, started

pytestmark = pytest.mark.both_lines


@NEEDS_IRIS
@pytest.mark.medium
def test_all_processes_are_started_again_after_one_was_stopped(tmp_path: Path) -> None:
    """Iris would start only those again whose status is not 0, and they would wait for the others."""
    run = make_run(tmp_path, num_steps=100_000, evaluation__tasks=0, warm_start__max_steps=0)
    training = hosts(run, 2)
    for host in training:
        host.program, host.arguments = "marin_rl.pods.task", [json.dumps(["train", *host.arguments])]
    with started(training):
        training[0].wait_until(lambda: training[0].steps > 0, "a step")
        process = training[1].process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        assert [host.end() for host in training] == [os.EX_TEMPFAIL] * 2, [host.said for host in training]


@NEEDS_IRIS
@pytest.mark.medium
@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (0, None, None),
        (1, ValueError("steps is -1\ud800 " + "x" * 10_000), "steps is -1\\ud800 " + "x" * 200 + "…"),
        (1, ConnectionError("the store is down"), None),
        # Such as plan, if a run does not fit.
        (2, None, "marin_rl.plan ended with status 2; see the log"),
        (os.EX_TEMPFAIL, None, None),
        (130, None, None),
    ],
)
def test_only_mistakes_end_the_job(
    status: int, error: Exception | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marin_rl import plan
    from marin_rl.pods import task

    failed: list[str] = []
    client = SimpleNamespace(fail_tasks=lambda attempts, reason: failed.append(reason))
    monkeypatch.setattr(task, "iris_ctx", lambda: SimpleNamespace(client=client, task_attempt="/root/job/0:0"))
    monkeypatch.setattr(sys, "last_exc", error, raising=False)
    monkeypatch.setattr(plan, "main", lambda arguments: status)
    assert task.main(['["plan"]']) == status
    assert failed == ([] if reason is None else [reason])
