# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.code_asserts import CodeTestsError, split_assert


@pytest.mark.parametrize(
    ("line", "expressions", "condition"),
    [
        ("assert f(1) == 2", ("f(1)",), "_0 == 2"),
        ("assert f(g(1), [2]) == 2, 'message'", ("f(g(1), [2])",), "_0 == 2"),
        ("assert Solution().two_sum([2, 7], 9) == [0, 1]", ("Solution().two_sum([2, 7], 9)",), "_0 == [0, 1]"),
        ("assert math.isclose(f(1), 0.5)", ("f(1)",), "math.isclose(_0, 0.5)"),
        ("assert sorted(f(1)) == [1] and not f(2)", ("f(1)", "f(2)"), "sorted(_0) == [1] and (not _1)"),
        ("assert set(f([x for x in range(3)])) == {1}", ("f([x for x in range(3)])",), "set(_0) == {1}"),
        ("assert LIMIT > 3", ("LIMIT",), "_0 > 3"),
        ("assert f(1)[0] == 2", ("f(1)[0]",), "_0 == 2"),
        ("assert 'a'.join(f(1)) == ''", ("f(1)",), "'a'.join(_0) == ''"),
        ("assert Counter(f(1)) == Counter('ab')", ("f(1)",), "Counter(_0) == Counter('ab')"),
        ("assert f(np.array([1])) == 1", ("f(np.array([1]))",), "_0 == 1"),
        ("assert sorted(map(len, f(1)), key=abs) == [2]", ("f(1)",), "sorted(map(len, _0), key=abs) == [2]"),
        ("assert isinstance(f(1), (int, float))", ("f(1)",), "isinstance(_0, (int, float))"),
    ],
)
def test_asserts_are_split(line: str, expressions: tuple[str, ...], condition: str):
    found = split_assert(line)
    assert (found.expressions, found.condition) == (expressions, condition)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("f(1) == 2", "is not one assert statement"),
        ("assert f(1) == 2; import os", "is not one assert statement"),
        ("assert 1 == 1", "does not use the tested code"),
        ("assert sum(10, 15) == 25", "does not use the tested code; call .* as `solution.NAME` if it has the name"),
        ("assert (f(1) == 2, 'message')", "asserts a tuple, which is always true; remove the parentheses"),
        ("assert all(f(i) == i for i in range(3))", "binds names"),
        ("assert (y := f(1)) == 2", "binds names"),
        ("assert np.allclose(f(1), [1.0])", "calls 'np', which the tested code could replace; write it with comp"),
        ("assert f(1) == pytest.approx(0.5)", "calls 'pytest', which the tested code could replace"),
        ("assert f(1) == Decimal('0.1')", "calls 'Decimal', which the tested code could replace"),
        ("assert f(1).startswith('a')", "calls 'startswith', which the tested code could replace"),
        ("assert list(map(f, [1, 2])) == [1, 4]", r"passes 'f' to map, .* in separate asserts"),
        ("assert max(f(1), key=m.f) == 2", r"passes 'm.f' to max"),
        ("assert isinstance(f(1), Point)", r"passes 'Point' to isinstance"),
        ("assert isinstance(f(1), range)", r"passes 'range' to isinstance, .* with plain values .* compare the values"),
        ("assert isinstance(f(1), collections.Counter)", r"passes 'collections.Counter' to isinstance"),
        ("assert f(1).isalnum()", "calls 'isalnum', which the tested code could replace"),
        ("assert f(x).equals(pd.Series([1]))", "calls 'equals', which the tested code could replace"),
        ("assert isclose(f(16), 4.0)", "calls 'isclose', .*; if the code defines it, write `solution.isclose`"),
        ("assert f(1) == json.loads('[1]')", "calls 'json', which the tested code could replace"),
        ("assert list(map(make(1), [1])) == [2]", r"passes 'make\(1\)' to map"),
        ("assert isinstance(f(1), (P, int))", r"passes '\(P, int\)' to isinstance"),
        ("assert f(1", "is not valid Python"),
        ("assert f(1) == '\x00'", "is not valid Python"),
    ],
)
def test_asserts_that_cannot_be_split(line: str, problem: str):
    with pytest.raises(CodeTestsError, match=problem):
        split_assert(line)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(value=VALUES)
def test_expressions_contain_no_expected_results(value: object):
    test = split_assert(f"assert f(1) == {value!r}")
    assert test.expressions == ("f(1)",)
