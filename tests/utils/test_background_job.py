# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One job at a time, and each error is raised exactly once."""

import threading

import pytest

from marin_rl.utils.background_job import BackgroundJob


def fail(error: Exception) -> None:
    raise error


def test_the_next_call_raises_an_error_once() -> None:
    job = BackgroundJob("test")
    done: list[int] = []
    job.start(fail, OSError("first"))
    with pytest.raises(OSError, match="first"):
        job.start(done.append, 1)
    assert done == []
    job.start(done.append, 2)
    job.flush()
    assert done == [2]
    job.start(fail, OSError("second"))
    with pytest.raises(OSError, match="second"):
        job.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]


def test_raise_if_failed_does_not_wait_for_a_running_job() -> None:
    job, gate = BackgroundJob("test"), threading.Event()
    job.start(lambda: gate.wait() and None)
    job.raise_if_failed()
    gate.set()
    job.flush()
    job.raise_if_failed()
    job.close()
