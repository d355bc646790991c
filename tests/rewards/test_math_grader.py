# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import gc
import os
import queue
import signal
import threading

import pytest

from marin_rl.rewards import math_grader
from marin_rl.rewards.math_grader import MathVerifyGrader
from marin_rl.rewards.math_worker import GroundTruthError
from marin_rl.rewards.sandbox.processes import list_descendants


@pytest.fixture
def grader() -> MathVerifyGrader:
    return MathVerifyGrader(timeout=1.0)


@pytest.mark.parametrize(
    ("reply", "answer", "reward"),
    [
        ("46", "46", 1.0),
        ("it is 46", "46", 1.0),
        ("47", "46", 0.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("\ud800\0", "46", 0.0),
    ],
)
def test_math_verify(grader: MathVerifyGrader, reply: str, answer: str, reward: float):
    assert grader.grade(reply, answer) == reward


@pytest.mark.medium
@pytest.mark.parametrize("reply", ["9**9**9**9", "$9^{387420489}$"])
def test_endless_reply_is_wrong_and_the_next_is_graded(grader: MathVerifyGrader, reply: str, caplog):
    assert grader.grade(reply, "46") == 0.0
    assert "gave up on a reply" in caplog.text
    assert grader.grade("it is 46", "46") == 1.0


def test_math_verify_names_a_broken_ground_truth(grader: MathVerifyGrader):
    with pytest.raises(GroundTruthError, match="cannot parse the ground truth"):
        grader.grade("46", r"\frac{1")
    with pytest.raises(GroundTruthError, match="cannot parse the ground truth"):
        grader.check(r"\frac{1")
    assert grader.grade("it is 46", "46") == 1.0


def test_math_verify_from_many_threads(grader: MathVerifyGrader):
    rewards: dict[int, float] = {}

    def grade(number: int) -> None:
        rewards[number] = grader.grade(f"it is {number}", str(number - number % 2))

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {number: float(number % 2 == 0) for number in range(8)}


def test_interrupted_exchange_does_not_shift_the_answers(grader: MathVerifyGrader, monkeypatch):
    assert grader.grade("it is 46", "46") == 1.0

    def write_only(worker: math_grader._MathWorker, request: str) -> str:
        worker._process.stdin.write(request + "\n")
        worker._process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(math_grader._MathWorker, "_exchange", write_only)
        with pytest.raises(KeyboardInterrupt):
            grader.grade("it is 46", "46")
    assert grader.grade("it is 47", "46") == 0.0


def test_a_slow_reply_delays_no_other(grader: MathVerifyGrader):
    before = set(list_descendants(os.getpid()))
    assert grader.grade("0.5", "1/2") == 1.0
    [worker] = set(list_descendants(os.getpid())) - before
    os.kill(worker, signal.SIGSTOP)
    rewards: queue.Queue[float] = queue.Queue()
    threads = [threading.Thread(target=lambda: rewards.put(grader.grade("0.5", "1/2"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    # One of them waits for the stopped process.
    assert rewards.get(timeout=600) == 1.0
    assert rewards.empty()
    os.kill(worker, signal.SIGCONT)
    assert rewards.get(timeout=600) == 1.0
    for thread in threads:
        thread.join()


def test_a_worker_that_ended_between_replies_is_replaced(grader: MathVerifyGrader):
    before = set(list_descendants(os.getpid()))
    assert grader.grade("0.5", "1/2") == 1.0
    [worker] = set(list_descendants(os.getpid())) - before
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert grader.grade("0.5", "1/2") == 1.0


def test_worker_ends_with_its_grader():
    before = set(list_descendants(os.getpid()))
    made = MathVerifyGrader(timeout=5.0)
    made.grade("it is 46", "46")
    [worker] = set(list_descendants(os.getpid())) - before
    del made
    gc.collect()
    assert worker not in list_descendants(os.getpid())
