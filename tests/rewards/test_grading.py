# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import gc
import os
import queue
import signal
import threading

import draccus
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards import grading
from marin_rl.rewards.grading import (
    ExactConfig,
    FormatConfig,
    GraderConfig,
    MathVerifyConfig,
    MathVerifyGrader,
    check_pattern,
    exact_match,
    extract_last,
)
from marin_rl.rewards.math_worker import GroundTruthError
from marin_rl.rewards.sandbox.processes import list_descendants


def test_last_match_counts():
    assert extract_last(r"<answer>(.*?)</answer>", "<answer>1</answer> no <answer>2</answer>") == "2"


def test_no_match_is_none():
    assert extract_last(r"#### (\d+)", "42") is None


def test_format_must_match_the_whole_reply():
    config = FormatConfig(regex=r"(?s)<think>.*</think>-?\d+", weight=0.25)
    assert config.reward("<think>a\nb</think>4") == 0.25
    assert config.reward("<think>a</think>4 apples") == 0.0


def test_broken_pattern_names_field_and_pattern():
    with pytest.raises(ValueError, match=r"format\.regex: '\(' is not a regular expression"):
        FormatConfig(regex="(")


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -float("inf")])
def test_format_weight_must_be_finite(weight: float):
    with pytest.raises(ValueError, match=rf"format\.weight must be finite, got {weight}"):
        FormatConfig(regex="x", weight=weight)


def test_missing_group_names_field():
    with pytest.raises(ValueError, match=r"reply_regex: 'abc' has 0 groups but needs 1"):
        check_pattern("reply_regex", "abc", groups=1)


@pytest.fixture
def grader() -> MathVerifyGrader:
    return MathVerifyConfig(timeout=1.0).build()


@given(st.text(), st.text())
def test_exact_match_is_equality_of_stripped_text(reply: str, answer: str):
    assert exact_match(reply, answer) is (reply.strip() == answer.strip())


@pytest.mark.parametrize("reply", ["046", "46.0", "+46", "46!", "4 6", "64", ""])
def test_exact_rejects_padding(reply: str):
    assert ExactConfig().build().grade(reply, "46") == 0.0


def test_exact_case():
    assert ExactConfig().build().grade("paris", "Paris") == 0.0
    assert ExactConfig(ignore_case=True).build().grade("paris", "Paris") == 1.0


def test_exact_rejects_an_empty_ground_truth():
    with pytest.raises(GroundTruthError, match="' ' is empty"):
        ExactConfig().build().grade("", " ")


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

    def write_only(worker: grading._MathWorker, request: str) -> str:
        worker._process.stdin.write(request + "\n")
        worker._process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(grading._MathWorker, "_exchange", write_only)
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
    made = MathVerifyConfig().build()
    made.grade("it is 46", "46")
    [worker] = set(list_descendants(os.getpid())) - before
    del made
    gc.collect()
    assert worker not in list_descendants(os.getpid())


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_timeout_must_be_positive_and_finite(timeout: float):
    with pytest.raises(ValueError, match=r"grader\.timeout must be"):
        MathVerifyConfig(timeout=timeout)


def test_grader_is_chosen_by_type():
    assert draccus.decode(GraderConfig, {"type": "math_verify", "timeout": 2}) == MathVerifyConfig(timeout=2.0)
    assert draccus.decode(GraderConfig, {"type": "exact"}) == ExactConfig()
