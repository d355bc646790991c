# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading

import pytest

from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.rewards.math_grader import MathVerifyGrader
from marin_rl.rewards.math_worker import GroundTruthError


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


@pytest.mark.parametrize(
    ("reply", "read"),
    [(r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"), ("it is 4. The answer is 46.", "46"), ("hm?", None), ("", None)],
)
def test_the_final_answer_is_read(grader: MathVerifyGrader, reply: str, read: str | None):
    assert grader.read(reply) == read


def test_a_reply_that_takes_too_long_has_no_grade_and_the_next_is_graded():
    grader = MathVerifyGrader(timeout=0.2)
    nested = r"\sin(" * 30 + "x" + ")" * 30
    with pytest.raises(NoAnswerError, match=r"more than 0\.2 s of CPU time"):
        grader.grade(nested, "x + 1")
    assert grader.grade("it is 46", "46") == 1.0


@pytest.mark.parametrize("reply", ["9**9**9**9", "$9^{387420489}$", r"999999999!", r"\binom{99999999999}{9999999999}"])
def test_a_large_result_is_not_computed(grader: MathVerifyGrader, reply: str):
    assert grader.grade(reply, "46") == 0.0


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
