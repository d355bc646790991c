# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.rewards.math_grader import MathVerifyGrader
from marin_rl.rewards.math_worker import GroundTruthError, math_verify_match, parse_answer
from tests.rewards.math_cases import GROUPS


@pytest.fixture(scope="module")
def grader() -> MathVerifyGrader:
    return MathVerifyGrader(timeout=20.0)


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("46", "46"),
        ("so the answer is 46.", "46"),
        (r"first 12, then \boxed{46}", "46"),
        ("0.5", r"\frac{1}{2}"),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}"),
        ("1,000", "1000"),
        ("#### -7", "-7"),
        (r"$\sqrt{8}$", r"2\sqrt{2}"),
        ("Tuesday", "Tuesday"),
        (r"\boxed{6}. No wait, that is wrong. \boxed{7}", "7"),
        (r"\boxed{6}" + "\n" + r"\boxed{7}", "7"),
        (r"First $\boxed{\frac{1}{2}}$, then $\boxed{\{1, 2\}}$ or so, at last $\boxed{\frac{1}{3}}$.", r"\frac{1}{3}"),
        (r"\boxed{6}. The final answer is $7$.", "7"),
        (r"\boxed{6}. No, \boxed{7}. I was asked to put it in \boxed{}.", "7"),
        (r"The answer is \$18", "18"),
        (r"**\$18**", "18"),
        (r"\boxed{\$18}", "18"),
        (r"She makes \$18 every day.", "18"),
        ("18", r"\$18"),
    ],
)
def test_equal(reply: str, answer: str):
    assert math_verify_match(reply, answer)


@pytest.mark.parametrize(
    ("reply", "answer"), [("47", "46"), ("", "46"), ("46, no, 47", "46"), ("46 or so", "460"), ("((((", "46")]
)
def test_unequal(reply: str, answer: str):
    assert not math_verify_match(reply, answer)


@pytest.mark.parametrize("answer", ["", "$", "((", r"\frac{1"])
def test_broken_ground_truth_is_named(answer: str):
    with pytest.raises(GroundTruthError, match="cannot parse the ground truth") as raised:
        math_verify_match("46", answer)
    assert repr(answer) in str(raised.value)


@pytest.mark.parametrize(
    ("extracted", "answer"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}"),
        (r" 2\sqrt{2}" + "\n", r"\sqrt{8}"),
        ("x+1", "1+x"),
        ("2x", "2*x"),
        ("(2, 1)", "(2,1)"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("1, 2", "1,2"),
        (r"3\pi", r"\pi*3"),
    ],
)
def test_bare_expressions_are_parsed_like_the_ground_truth(extracted: str, answer: str):
    assert math_verify_match(extracted, answer)
    assert not math_verify_match(extracted, r"5\sqrt{3}")


@pytest.mark.parametrize(
    ("reply", "answer"),
    [("7 or 8", "7"), ("6, 7", "7, 6, 5"), (r"\sqrt{8} = 3", r"\sqrt{8}"), ("(2, 1)", "(1, 2)"), ("12, 34", "34, 1")],
)
def test_bare_expressions_that_differ(reply: str, answer: str):
    assert not math_verify_match(reply, answer)


@given(st.text(alphabet=st.sampled_from("0123x+-=(){}[]\\$ .,frac^_\n\u0000é\ud800")))
@settings(max_examples=60, deadline=None)
def test_never_raises_on_any_reply(reply: str):
    assert math_verify_match(reply, "46") in (True, False)


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
    found = {number: math_verify_match(reply, number) for number in ("1", "2", "3")}
    assert found == {number: number == result for number in found}


def test_works_outside_the_main_thread():
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(math_verify_match("it is 46", "46")))
    thread.start()
    thread.join()
    assert results == [True]


@pytest.mark.parametrize("kind", GROUPS)
def test_cases(kind: str):
    right, wrong = GROUPS[kind].right, GROUPS[kind].wrong
    assert [case for case in right if not math_verify_match(*case)] == []
    assert [case for case in wrong if math_verify_match(*case)] == []


@pytest.mark.parametrize("kind", GROUPS)
def test_every_ground_truth_equals_itself(kind: str):
    truths = {truth for _, truth in (*GROUPS[kind].right, *GROUPS[kind].wrong)}
    assert [truth for truth in truths if not math_verify_match(f" {truth}\n", truth)] == []
    wrapped = {truth for truth in truths if "\n" not in truth and parse_answer(truth).value is not None}
    assert [truth for truth in wrapped if not math_verify_match(f"<answer>{truth}</answer>", truth)] == []


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("#### 18", "#### 18"),
        ("18", "#### 18"),
        (r"\boxed{18}", "9 * 2 = <<9*2=18>>18\n#### 18"),
        ("9 * 2 = <<9*2=18>>18\n#### 18", "18"),
        (r"So $x = \boxed{\frac{1}{2}}$.", "0.5"),
        ("C) 15", "C) 15"),
    ],
)
def test_worked_answers(reply: str, answer: str):
    assert math_verify_match(reply, answer)
    assert not math_verify_match(reply, answer + "7")


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


@given(numbers, st.sampled_from(WRAPPERS))
def test_a_wrapped_number_is_equal(number: str, wrapper: str):
    assert math_verify_match(wrapper.format(number), number)
    assert not math_verify_match(wrapper.format(f"-{number}"), number)


@given(numbers, st.sampled_from(WRAPPERS), st.integers(1, 9))
def test_a_further_digit_is_another_number(number: str, wrapper: str, digit: int):
    for other in (f"{digit}{number}", f"{number}{digit}", f"{number} {digit}", f"{digit} {number} {digit}"):
        assert not math_verify_match(wrapper.format(other), number)


@given(numbers, numbers, st.sampled_from(WRAPPERS), st.sampled_from([" or ", ", ", " and ", "; ", "\\text{ or }"]))
def test_two_guesses_are_wrong(number: str, guess: str, wrapper: str, separator: str):
    if parse_answer(number).value != parse_answer(guess).value:
        for both in (number + separator + guess, guess + separator + number):
            assert not math_verify_match(wrapper.format(both), number)


@pytest.mark.parametrize(
    "part",
    ["answer is ", "answer:\n", r"\boxed{", r"\boxed{5}", r"\boxed{5} or ", "<answer>", "<answer>5</answer>",
     "#### 5\n", "$5", "$5$", r"\[", r"\(5\)", "no, ", "(", "5 ", "5. ", "5\n", "final ",
     "<<", r"\text{", "*", "1,", "-"],
)  # fmt: skip
def test_long_replies_are_read_in_time(grader: MathVerifyGrader, part: str):
    # A quadratic search would need minutes, and the process be killed.
    assert grader.grade(part * (10**6 // len(part)), "46") == 0.0
