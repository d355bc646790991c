# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Grading of mathematics: `math_cases.tsv` has the replies."""

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.rewards.grading import MathGraderConfig
from marin_rl.rewards.grading_process import GroundTruthError, NoAnswerError
from marin_rl.rewards.math.worker import math_match, parse_answer


def read_cases() -> dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
    """Return the right and the wrong pairs of reply and ground truth, by kind."""
    kinds: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {}
    signs = str.maketrans({"␤": "\n", "␠": " ", "␢": "\u200b", "␀": ""})
    kind = ""
    for line in Path(__file__).with_name("math_cases.tsv").read_text(encoding="utf-8").split("\n"):
        if line.startswith("["):
            kind = line[1:].partition("]")[0]
            kinds[kind] = [], []
        elif line and not line.startswith("#"):
            verdict, *cases = line.split("\t")
            for case in cases:
                reply, truth = (part.translate(signs) for part in case.split(" ⇒ "))
                kinds[kind]["=!".index(verdict)].append((reply, truth))
    return kinds


CASES = read_cases()


@pytest.mark.parametrize("kind", CASES)
def test_cases(kind: str):
    right, wrong = CASES[kind]
    assert [case for case in right if not math_match(*case)] == []
    assert [case for case in wrong if math_match(*case)] == []


def test_the_table_is_complete():
    assert sum(len(right) + len(wrong) for right, wrong in CASES.values()) == 953


@pytest.mark.parametrize("kind", CASES)
def test_every_ground_truth_equals_itself(kind: str):
    truths = {truth for _, truth in (*CASES[kind][0], *CASES[kind][1])}
    assert [truth for truth in truths if not math_match(f" {truth}\n", truth)] == []
    wrapped = {truth for truth in truths if "\n" not in truth and parse_answer(truth).value is not None}
    assert [truth for truth in wrapped if not math_match(f"<answer>{truth}</answer>", truth)] == []


@pytest.mark.parametrize("answer", ["", "$", "((", r"\frac{1"])
def test_broken_ground_truth_is_named(answer: str):
    for use in (lambda: math_match("46", answer), lambda: MathGraderConfig().check(answer)):
        with pytest.raises(GroundTruthError, match="cannot parse the ground truth") as raised:
            use()
        assert repr(answer) in str(raised.value)


@given(st.text(alphabet=st.sampled_from("0123x+-=(){}[]\\$ .,frac^_\n\u0000é\ud800")))
@settings(max_examples=60)
def test_never_raises_on_any_reply(reply: str):
    assert math_match(reply, "46") in (True, False)


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (r"\boxed{1} The final answer is 2. I hope it is correct. \boxed{3}", "3"),
        (r"The final answer is $2$. Or \boxed{3}.", None),
        (r"\boxed{3}. The final answer is $2$.", "2"),
        (r"\boxed{3}. Answer: 2", "3"),
        ("Answer: 2. The answer is 3.", "3"),
        ("The answer is 2. The answer is 3.", "3"),
        ("The answer is 2. So 3.", "2"),
        ("$2$, then 3", None),
        ("3, then $2$", None),
    ],
)
def test_order_of_preference(reply: str, result: str | None):
    found = {number: math_match(reply, number) for number in ("1", "2", "3")}
    assert found == {number: number == result for number in found}


WRAPPERS = (
    "{}", " {}.\n", "**{}**", "*{}*", "`{}`", '"{}"', "${}$", r"\({}\)", "$${}$$", r"\boxed{{{}}}", r"$\boxed{{{}}}$",
    "<answer>{}</answer>", "<answer>**{}**</answer>", "#### {}", "Answer: {}", "**Answer:** {}", "The answer is {}.",
    "The final answer is **{}**.", "### Answer\n\n{}", "x = {}", "We get {}.", "{} apples", r"{}\text{{ cm}}", r"\${}",
)  # fmt: skip
numbers = st.one_of(
    st.integers(1, 10**6).map(str),
    st.tuples(st.integers(0, 999), st.integers(1, 999)).map(lambda pair: f"{pair[0]}.{pair[1]}"),
    st.tuples(st.integers(1, 99), st.integers(2, 99)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.tuples(st.integers(1, 99), st.integers(2, 9)).map(lambda pair: f"{pair[0]} 1/{pair[1]}"),
)


@given(numbers, st.sampled_from(WRAPPERS), st.integers(1, 9))
def test_a_wrapped_number_is_equal_to_itself_alone(number: str, wrapper: str, digit: int):
    assert math_match(wrapper.format(number), number)
    for other in (f"-{number}", f"{digit}{number}", f"{number}{digit}", f"{number} {digit}", f"{digit} {number} 1"):
        assert not math_match(wrapper.format(other), number)


@given(numbers, numbers, st.sampled_from(WRAPPERS), st.sampled_from([" or ", ", ", " and ", "; ", "\\text{ or }"]))
def test_two_guesses_are_wrong(number: str, guess: str, wrapper: str, separator: str):
    if parse_answer(number).value != parse_answer(guess).value:
        for both in (number + separator + guess, guess + separator + number):
            assert not math_match(wrapper.format(both), number)


@pytest.mark.parametrize(
    "part",
    ["answer is ", "answer:\n", r"\boxed{", r"\boxed{5}", r"\boxed{5} or ", "<answer>", "<answer>5</answer>",
     "#### 5\n", "$5", "$5$", r"\[", r"\(5\)", "no, ", "(", "5 ", "5. ", "5\n", "final ",
     "<<", r"\text{", "*", "1,", "-"],
)  # fmt: skip
def test_long_replies_are_read_in_time(part: str):
    # A quadratic search would need minutes, and the process be killed.
    assert MathGraderConfig(timeout=20.0).grade(part * (10**6 // len(part)), "46") == 0.0


@pytest.mark.parametrize("reply", ["9**9**9**9", "$9^{387420489}$", r"999999999!", r"\binom{99999999999}{9999999999}"])
def test_a_large_result_is_not_computed(reply: str):
    assert MathGraderConfig(timeout=1.0).grade(reply, "46") == 0.0


@pytest.mark.parametrize(
    ("reply", "read"),
    [(r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"), ("it is 4. The answer is 46.", "46"), ("hm?", None), ("", None)],
)
def test_the_final_answer_is_read(reply: str, read: str | None):
    assert MathGraderConfig().read(reply) == read


@pytest.mark.medium
def test_a_reply_that_takes_too_long_has_no_grade_and_the_next_is_graded():
    grader = MathGraderConfig(timeout=0.2)
    nested = r"\sin(" * 30 + "x" + ")" * 30
    with pytest.raises(NoAnswerError, match=r"more than 0\.2 s of CPU time"):
        grader.grade(nested, "x + 1")
    assert grader.grade("it is 46", "46") == 1.0


def test_grades_of_many_threads():
    rewards: dict[int, float] = {}

    def grade(number: int) -> None:
        rewards[number] = MathGraderConfig().grade(f"it is {number}", str(number - number % 2))

    threads = [threading.Thread(target=grade, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {number: float(number % 2 == 0) for number in range(8)}
