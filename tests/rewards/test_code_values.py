# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.code_harness import encode
from marin_rl.rewards.code_values import DEFAULT_TOLERANCE, CallTest, Comparison, Tolerance, same_output


def passes(expected: Any, answer: Any, comparison: Comparison = Comparison.LITERAL, tolerance=DEFAULT_TOLERANCE):
    """Return whether a value that a program returned is the expected one."""
    test = CallTest("f", (), {}, expected, comparison, tolerance)
    return test.passes(json.loads(json.dumps(encode(answer))))


EQUAL = [
    (5, 5.0),
    (5.0, 5),
    (0.3, 0.1 + 0.2),
    (0.0, 1e-17),
    (-0.0, 0),
    (math.nan, math.nan),
    (math.inf, math.inf),
    (10**400, 10**400),
    (2.0**70, 2**70),
    ([1, (2.0, "a")], [1.0, (2, "a")]),
    ({1, 2.5, "a", None, (1, 2)}, frozenset({(1, 2), None, "a", 2.5 + 1e-15, 1})),
    ({0.1, 0.2, 0.3}, {0.1 + 0.2, 0.2, 0.1}),
    ({(1, "b"): [0.3], "a": {}}, {"a": {}, (1, "b"): [0.1 + 0.2]}),
    (b"ab", bytearray(b"ab")),
    (1 + 2j, 1 + 2j),
    (-2 + 2.4e-16j, -2 + 0j),
    (6.626e-34, 6.626e-34 * (1 + 1e-12)),
    ("\ud800", "\ud800"),
    (set(), frozenset()),
    ({frozenset({1, 2}), frozenset()}, {frozenset({2, 1}), frozenset()}),
    (None, None),
    ({True: 1}, {True: 1}),
]
DIFFERENT = [
    (1, True),
    (True, 1),
    (False, 0),
    (None, 0),
    (None, False),
    ("1", 1),
    (1, "1"),
    ("ab", b"ab"),
    (b"ab", "ab"),
    (b"ab", "6162"),
    ([1], (1,)),
    ((1,), [1]),
    ([1], {1}),
    ({1}, [1]),
    ([], ()),
    ([], None),
    ([], ""),
    ({}, set()),
    (set(), {}),
    ([1, 2], [2, 1]),
    ([1], [1, 1]),
    ({1: 2}, {1: 3}),
    ({1: 2}, {"1": 2}),
    ({1: 2}, {True: 2}),
    ({1: 2}, {1: 2, 3: 4}),
    (1.0, 1.0001),
    (1234567.0, 1234566.0),
    (10**18, 1e18 + 1024),
    (10**18, 10**18 + 1),
    (2**53, 2.0**53 + 2),
    (1e308, 10**400),
    (math.inf, -math.inf),
    (math.inf, 1e308),
    (math.nan, 0.0),
    (0.0, math.nan),
    (6.626e-34, 0),
    (6.626e-34, 5e-13),
    ([1e-13], [2e-13]),
    (0.0, 1e-9),
    (1, 1 + 0j),
    (1 + 0j, 1 + 1e-6j),
    ({0.1, 0.2}, {0.1, 0.3}),
]


@pytest.mark.parametrize(("expected", "answer"), EQUAL)
def test_equal_values(expected: Any, answer: Any):
    assert passes(expected, answer)


@pytest.mark.parametrize(("expected", "answer"), DIFFERENT)
def test_different_values(expected: Any, answer: Any):
    assert not passes(expected, answer)


def test_lists_of_json_equal_tuples():
    assert passes([1, [2]], (1, [2]), Comparison.JSON)
    assert passes([1, [2]], [1, (2,)], Comparison.JSON)
    assert passes({"a": [1]}, {"a": (1,)}, Comparison.JSON)
    assert not passes([1], {1}, Comparison.JSON)
    assert not passes({"1": 2}, {1: 2}, Comparison.JSON)


def test_the_tolerance_is_relative_or_absolute():
    for expected, answer in ((1.0, 1.05), (0.0, 0.05), (100.0, 105)):
        assert passes(expected, answer, tolerance=Tolerance(0.1, 0.1))
        assert not passes(expected, answer)
    assert not passes(100, 105, tolerance=Tolerance(0.1, 0.1))


@pytest.mark.parametrize("value", [0, 0.0, "", [], (), {}, set(), None, False, b"", 0j, 1, -2.5, "0", [0], (0,), {0: 0},
                                   {0}, True, b"0", 1j, 2**70, math.nan])  # fmt: skip
def test_truth_is_that_of_python(value: Any):
    for expected in (True, False):
        assert passes(expected, value, Comparison.TRUTH) is (bool(value) is expected)


NOT_OF_THE_PROTOCOL = [
    {},
    {"tuple": 1},
    {"tuple": {}},
    {"tuple": [1], "set": [1]},
    {"set": [{}]},
    {"set": [[1]]},
    {"set": [1, 1]},
    {"set": [{"set": 5}]},
    {"dict": [1]},
    {"dict": [[]]},
    {"dict": [{}]},
    {"dict": ["ab"]},
    {"dict": [[1, 2, 3]]},
    {"dict": [[1, 2], [1, 2]]},
    {"int": 5},
    {"int": "9" * 5000},
    {"int": "0xzz"},
    {"int": None},
    {"complex": 5},
    {"complex": ["a", "b"]},
    {"bytes": 1},
    {"__class__": []},
    {"Equal": []},
]


@pytest.mark.parametrize("answer", NOT_OF_THE_PROTOCOL)
def test_answers_that_are_not_of_the_protocol_fail(answer: Any):
    for expected in (1, (1,), {1}, {(1,), 2}, {1: 2}, {1: 2, 3: 4}, 1j, b"a", [1], 0.5):
        assert not CallTest("f", (), {}, expected).passes(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["tuple", "set", "dict", "int", "bytes", "complex", "frozenset"]), inner)
    ),
    max_leaves=8,
)


@given(answer=JSON)
def test_no_answer_raises(answer: Any):
    assert not CallTest("f", (), {}, {(1, "a"): {2.5, None}, "b": [1j, b"c"]}).passes(answer)
    assert not CallTest("f", (), {}, {("x", True)}).passes({"set": [answer]})
    assert CallTest("f", (), {}, True, Comparison.TRUTH).passes(answer) in (True, False)


def test_deeply_nested_answers_fail():
    answer: Any = 1
    for _ in range(900):
        answer = {"tuple": [answer]}
    assert not CallTest("f", (), {}, {1}).passes({"set": [answer]})


@pytest.mark.parametrize(
    ("expected", "printed", "tolerance", "same"),
    [
        ("5\n", "5", None, True),
        ("5\n", "5  \n\n\n", None, True),
        ("1 2\n3", "1 2 \r\n3\t\n", None, True),
        ("", "\n", None, True),
        ("5", " 5", None, False),
        ("5", "\n5", None, False),
        ("1 2", "1\n2", None, False),
        ("1 2", "1  2", None, False),
        ("5", "5\x0c6", None, False),
        ("0.5", "0.50", None, False),
        ("yes", "YES", None, False),
        ("0.333333", "0.3333333333", 1e-6, True),
        ("0.333333", "0.3334", 1e-6, False),
        ("1000000.0", "1000000.5", 1e-6, True),
        ("1000000", "1000001", 1e-6, False),
        ("1\n2 3", "1 2\n3.0000001", 1e-6, True),
        ("case 1: 2.0", "case 1: 2", 1e-6, True),
        ("case 1: 2.0", "Case 1: 2", 1e-6, False),
        ("2.0", "2.0 2.0", 1e-6, False),
        ("2.0", "", 1e-6, False),
        ("0.5", "nan", 1e-6, False),
        ("nan", "nan", 1e-6, True),
        ("1e400", "inf", 1e-6, False),
        ("1_0.0", "10.0", 1e-6, False),
        ("2.0", "2." + "0" * 1_000_000, 1e-6, False),
        ("2.0", "1" * 1_000_000 + "x", 1e-6, False),
    ],
)
def test_output_is_compared_as_in_contests(expected: str, printed: str, tolerance: float | None, same: bool):
    assert same_output(expected, printed, tolerance) is same
