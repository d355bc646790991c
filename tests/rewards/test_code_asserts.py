# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.code_asserts import CodeTestsError, convert_assert
from marin_rl.rewards.code_harness import encode
from marin_rl.rewards.code_values import CallTest, Comparison, Tolerance

TRUTH = Comparison.TRUTH


@pytest.mark.parametrize(
    ("line", "test"),
    [
        ("assert f(1) == 2", CallTest("f", (1,), {}, 2)),
        ("  assert f(1) == 2, 'message'\n", CallTest("f", (1,), {}, 2)),
        ("assert (f(1) == 2)", CallTest("f", (1,), {}, 2)),
        ("assert 2 == f(1)", CallTest("f", (1,), {}, 2)),
        ("assert f() == -2.5", CallTest("f", (), {}, -2.5)),
        ("assert f([(2,)], x={'a': {3}}) == {1: [None]}", CallTest("f", ([(2,)],), {"x": {"a": {3}}}, {1: [None]})),
        ("assert f(b'a', 1+2j) == (True,)", CallTest("f", (b"a", 1 + 2j), {}, (True,))),
        ("assert f(set()) == set([1, 2])", CallTest("f", (set(),), {}, {1, 2})),
        ("assert set() == f(1)", CallTest("f", (1,), {}, set())),
        ("assert f(frozenset({1})) == float('inf')", CallTest("f", (frozenset({1}),), {}, math.inf)),
        ("assert sum(10, 15) == 6", CallTest("sum", (10, 15), {}, 6)),
        ("assert Solution().two_sum([2, 7], 9) == [0, 1]", CallTest("Solution().two_sum", ([2, 7], 9), {}, [0, 1])),
        ("assert solution.f(1) == 2", CallTest("solution.f", (1,), {}, 2)),
        ("assert f(1) is None", CallTest("f", (1,), {}, None)),
        ("assert f(1) is True", CallTest("f", (1,), {}, True)),
        ("assert f(1)", CallTest("f", (1,), {}, True, TRUTH)),
        ("assert not f(1)", CallTest("f", (1,), {}, False, TRUTH)),
        ("assert math.isclose(f(1), 0.5)", CallTest("f", (1,), {}, 0.5, tolerance=Tolerance(1e-9, 0.0))),
        ("assert math.isclose(2, f(1), abs_tol=1)", CallTest("f", (1,), {}, 2.0, tolerance=Tolerance(1e-9, 1.0))),
        ("assert abs(f(1) - 0.5) <= 0.1", CallTest("f", (1,), {}, 0.5, tolerance=Tolerance(0.0, 0.1))),
        ("assert abs(2 - f(1)) < 1e-6",
         CallTest("f", (1,), {}, 2.0, tolerance=Tolerance(0.0, math.nextafter(1e-6, 0)))),
    ],
)  # fmt: skip
def test_asserts_are_converted(line: str, test: CallTest):
    found = convert_assert(line)
    assert found == test
    assert isinstance(found.expected, type(test.expected))


def test_a_strict_bound_is_strict():
    strict, loose = (convert_assert(f"assert abs(f() - 2.0) {sign} 0.5") for sign in ("<", "<="))
    assert (strict.passes(2.5), loose.passes(2.5), loose.passes(2.75)) == (False, True, False)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("f(1) == 2", "is not one assert statement"),
        ("assert f(1) == 2; import os", "is not one assert statement"),
        ("assert f(1) == 2\nassert f(2) == 3", "is not one assert statement"),
        ("def check(f):\n    assert f(1) == 2", "is not one assert statement"),
        ("assert f(1", "is not valid Python"),
        ("assert f(1) == '\x00'", "is not valid Python"),
        ("assert f(1) == " + "1" * 5000, "is not valid Python"),
        ("assert f(1) == " + "(" * 5000, "is not valid Python"),
        ("assert f(1) == " + "[" * 90 + "[" * 20, "is not valid Python"),
        ("assert f(1) == " + "-" * 3000 + "1", "is not valid Python|recursion"),
        ("assert f(" + "[" * 110 + "]" * 110 + ") == 1", "nested more than 100 deep"),
        ("assert eval(f(4)) == 24", r"f\(4\) is not a literal"),
        ("assert set(f(1)) == {1}", r"set\(f\(1\)\) is not a call of a function of the program"),
        ("assert sorted(f(1)) == [1]", r"f\(1\) is not a literal"),
        ("assert f(g(1)) == 2", r"g\(1\) is not a literal"),
        ("assert f(1) == g(1)", r"g\(1\) is not a literal"),
        ("assert f(x) == 2", "x is not a literal"),
        ("assert f(*[1]) == 2", r"\*\[1\] is not a literal"),
        ("assert f(**{'a': 1}) == 2", r"\{'a': 1\} is unpacked"),
        ("assert f({**{1: 2}}) == 2", r"\{\*\*\{1: 2\}\} is not a literal"),
        ("assert f({[1]}) == 2", "unhashable"),
        ("assert f(1) == 2 ** 10", "is not a literal"),
        ("assert f(1) == [0] * 5", "is not a literal"),
        ("assert f(1) == ...", r"\.\.\. is not a literal"),
        ("assert f(1) == f'{2}'", "is not a literal"),
        ("assert f(1) != 2", r"f\(1\) != 2 is not a call"),
        ("assert f(1) < 2", "is not a call"),
        ("assert f(1) is not None", "is not a call"),
        ("assert f(1) is 5", "is not a call"),
        ("assert f(1) in (1, 2)", "is not a call"),
        ("assert f(1) == 2 == 2", "is not a call"),
        ("assert f(1) == 2 and f(2) == 3", "is not a call"),
        ("assert not f(1) == 2", "is not a call"),
        ("assert (f(1) == 2, 'message')", "is not a call"),
        ("assert all(f(i) == i for i in range(3))", "is not a literal"),
        ("assert (y := f(1)) == 2", "is not a call"),
        ("assert f(1)[0] == 2", "is not a call"),
        ("assert f(1) + 1 == 2", "is not a call"),
        ("assert True", "is not a call"),
        ("assert 1 == 1", "is not a call"),
        ("assert (lambda: 1)() == 1", "is not the name of a function"),
        ("assert f(1)(2) == 3", r"f\(1\) is not the name of a function"),
        ("assert f[0](2) == 3", r"f\[0\] is not the name of a function"),
        ("assert f(1).startswith('a')", r"f\(1\) is not the name of a function"),
        ("assert np.allclose(f(1), [1.0])", r"f\(1\) is not a literal"),
        ("assert f(1) == pytest.approx(0.5)", "is not a literal"),
        ("assert f(1) == Decimal('0.1')", "is not a literal"),
        ("assert abs(f(1) - 0.5) > 0.1", "compared with < or <="),
        ("assert abs(f(1) - 0.5) < 0", "is not positive"),
        ("assert abs(f(1) - 'a') < 0.1", "not a number"),
        ("assert abs(f(1) - 9007199254740993) < 0.1", "not a number that a float can hold"),
        ("assert abs(f(1) + 0.5) < 0.1", "is not a call|is not a literal"),
        ("assert round(f(1), 2) == 0.5", r"f\(1\) is not a literal"),
        ("assert math.isclose(f(1), 0.5, tolerance=1)", "rel_tol and abs_tol"),
        ("assert math.isclose(f(1), 0.5, rel_tol=-1)", "rel_tol and abs_tol"),
        ("assert math.isclose(f(1), True)", "not a number"),
        ("assert f(float('x')) == 1", "could not convert"),
    ],
)
def test_other_statements_are_refused_with_the_line(line: str, problem: str):
    with pytest.raises(CodeTestsError, match=problem) as caught:
        convert_assert(line)
    assert repr(line[:200]) in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=6,
)


@given(value=VALUES)
def test_literals_are_their_values(value: Any):
    test = convert_assert(f"assert f({value!r}) == {value!r}")
    assert test == CallTest("f", (value,), {}, value)
    assert test.passes(encode(value))
