# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.code import same_output, same_value

EQUAL: list[tuple[Any, Any]] = [
    (5, 5.0), (5.0, 5), (0.3, 0.1 + 0.2), (0.0, 1e-17), (-0.0, 0), (math.nan, math.nan), (math.inf, math.inf),
    (10**400, 10**400), (2.0**70, 2**70), ([1, [2.0, "a"]], [1.0, [2, "a"]]),
    ({"b": [0.3], "a": {}}, {"a": {}, "b": [0.1 + 0.2]}), (6.626e-34, 6.626e-34 * (1 + 1e-12)), ("\ud800", "\ud800"),
    (None, None), (True, True),
]  # fmt: skip
DIFFERENT: list[tuple[Any, Any]] = [
    (1, True), (True, 1), (False, 0), (0, False), (1.0, True), (None, 0), (None, False), (0, None), ("1", 1), (1, "1"),
    (1.5, "1.5"), ("", None), ([], None), ([], ""), ([], {}), ({}, []), ({}, None), ("a", ["a"]), (["a"], "a"),
    ([1, 2], [2, 1]), ([1], [1, 1]), ([1, 1], [1]), ({"1": 2}, {"1": 3}), ({"1": 2}, {"1": 2, "3": 4}),
    ({"1": 2, "3": 4}, {"1": 2}), ({"1": 2}, {"2": 2}), (1.0, 1.0001), (1234567.0, 1234566.0), (10**18, 1e18 + 1024),
    (10**18, 10**18 + 1), (2**53, 2.0**53 + 2), (1e308, 10**400), (math.inf, -math.inf), (math.inf, 1e308),
    (math.nan, 0.0), (0.0, math.nan), (6.626e-34, 0), (6.626e-34, 5e-13), ([1e-13], [2e-13]), (0.0, 1e-9),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "answer"), EQUAL)
def test_equal_values(expected: Any, answer: Any):
    assert same_value(expected, answer)


@pytest.mark.parametrize(("expected", "answer"), DIFFERENT)
def test_different_values(expected: Any, answer: Any):
    assert not same_value(expected, answer)
    assert not same_value([expected], [answer])
    assert not same_value({"a": expected}, {"a": answer})


def test_the_tolerance_is_relative_or_absolute():
    for expected, answer in ((1.0, 1.05), (0.0, 0.05), (100.0, 105)):
        assert same_value({"a": [expected]}, {"a": [answer]}, tolerance=0.1)
        assert not same_value(expected, answer)
    assert not same_value(100, 105, tolerance=0.1)


EXACT = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.integers() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=1), inner, max_size=2),
    max_leaves=8,
)


@given(expected=EXACT, answer=EXACT)
def test_values_without_floats_are_equal_if_their_json_is(expected: Any, answer: Any):
    def text(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    assert same_value(expected, answer) is (text(expected) == text(answer))
    assert same_value(expected, json.loads(text(expected)))


@given(answer=EXACT | st.floats())
def test_no_answer_raises(answer: Any):
    for expected in (0.5, math.inf, math.nan, 10**400, [1, {"a": 0.5}]):
        assert same_value(expected, answer) in (True, False)
        assert not same_value([1, {"a": expected, "b": "c"}], [1, {"a": answer}])


@pytest.mark.parametrize(
    ("expected", "printed", "tolerance", "same"),
    [
        ("5\n", "5", None, True), ("5\n", "5  \n\n\n", None, True), ("1 2\n3", "1 2 \r\n3\t\n", None, True),
        ("", "\n", None, True), ("5", " 5", None, False), ("5", "\n5", None, False), ("1 2", "1\n2", None, False),
        ("1 2", "1  2", None, False), ("5", "5\x0c6", None, False), ("0.5", "0.50", None, False),
        ("yes", "YES", None, False), ("0.333333", "0.3333333333", 1e-6, True), ("0.333333", "0.3334", 1e-6, False),
        ("1000000.0", "1000000.5", 1e-6, True), ("1000000", "1000001", 1e-6, False),
        ("1\n2 3", "1 2\n3.0000001", 1e-6, True), ("case 1: 2.0", "case 1: 2", 1e-6, True),
        ("case 1: 2.0", "Case 1: 2", 1e-6, False), ("2.0", "2.0 2.0", 1e-6, False), ("2.0", "", 1e-6, False),
        ("0.5", "nan", 1e-6, False), ("nan", "nan", 1e-6, True), ("1e400", "inf", 1e-6, False),
        ("1_0.0", "10.0", 1e-6, False), ("2.0", "2." + "0" * 1_000_000, 1e-6, False),
        ("2.0", "1" * 1_000_000 + "x", 1e-6, False),
    ],
)  # fmt: skip
def test_output_is_compared_as_in_contests(expected: str, printed: str, tolerance: float | None, same: bool):
    assert same_output(expected, printed, tolerance) is same
