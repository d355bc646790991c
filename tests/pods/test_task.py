# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exit status of a task."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.needs_iris import NEEDS_IRIS
from tests.tiny_run import make_run
from tests.training_hosts import hosts, started


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
