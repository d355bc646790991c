# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One job at a time, and no error lost or told twice."""

import threading

import pytest

from marin_rl.background_job import BackgroundJob


def fail(error: Exception) -> None:
    raise error


def test_an_error_is_raised_once_by_what_comes_next() -> None:
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


def test_a_job_that_is_under_way_is_not_waited_for_by_a_question() -> None:
    job, gate = BackgroundJob("test"), threading.Event()
    job.start(lambda: gate.wait() and None)
    job.raise_if_failed()
    gate.set()
    job.flush()
    job.raise_if_failed()
    job.close()
