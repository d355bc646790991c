# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.rewards.math_worker import GroundTruthError, math_verify_match, parse_answer


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


@given(st.text(alphabet=st.sampled_from("0123x+-=(){}[]\\$ .,frac^_\n\u0000é\ud800")))
@settings(max_examples=60, deadline=None)
def test_never_raises_on_any_reply(reply: str):
    assert math_verify_match(reply, "46") in (True, False)


def test_works_outside_the_main_thread():
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(math_verify_match("it is 46", "46")))
    thread.start()
    thread.join()
    assert results == [True]


def test_ground_truth_is_parsed_without_dollars():
    assert str(parse_answer(r"\sqrt{2}")[0]) == "sqrt(2)"
