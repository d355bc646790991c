# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.environments.calculator import MAX_LENGTH, CalculatorConfig, calculate
from marin_rl.environments.tools import Tool, ToolError, tool_schema


def test_the_calculator():
    tool = CalculatorConfig().build()
    assert isinstance(tool, Tool)
    assert asyncio.run(tool.call({"expression": "6*7"})) == "42"
    assert tool_schema(tool)["function"]["parameters"]["required"] == ["expression"]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["0", "1", "2", "7", "12", "0.5", "3e2"]))
    left, right = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    return f"({left}{draw(st.sampled_from(['+', '-', '*', '/', '//', '%', '**']))}{right})"


@given(expression=expressions())
def test_values_match_python(expression: str):
    try:
        found = calculate(expression)
    except ToolError:
        return
    # eval is the oracle; the calculator has checked the size of the expression.
    value = eval(expression)
    if isinstance(value, int):
        assert found == str(value)
    else:
        assert math.isclose(float(found), value, rel_tol=1e-14)


@given(text=st.text(max_size=30) | st.text("0123456789+-*/%(). eEabsqrtmxin,_jl", max_size=30))
def test_any_text_has_a_value_or_an_error_without_a_warning(text: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(ToolError):
            assert isinstance(calculate(text), str)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" 2 ** 10 ", "1024"),
        ("-3 - -4", "1"),
        ("7 // 2 + 7 % 2", "4"),
        ("10 / 2", "5"),
        ("sqrt(2)", "1.41421356237310"),
        ("max(1, 2.5, -3) + abs(-2)", "4.5"),
        ("round(2.567, 1)", "2.6"),
        ("round(2.5)", "2"),
        ("round(1250, -2)", "1200"),
        ("2**4095", str(2**4095)),
        ("1/3", "0.333333333333333"),
    ],
)
def test_values(expression: str, value: str):
    assert calculate(expression) == value or math.isclose(float(calculate(expression)), float(value), rel_tol=1e-14)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("2 ** 99999", "the power is too large"),
        ("10.0 ** 999", "the result is too large"),
        ("1e308 * 10", "not a real number"),
        ("(-8) ** 0.5", "not a real number"),
        ("*".join(["9" * 60] * 6) + "*2**3000", "the result is too large"),
        ("9" * 401, "401 characters; at most 400"),
        ("(" * 190 + "1" + ")" * 189, "not a valid expression"),
        ("-" * 100 + "1", "more than 60 levels"),
        ("", "may hold numbers"),
        (" ", "not a valid expression"),
        ("1 +", "not a valid expression"),
        ("2 ^ 3", "powers are"),
        ("__import__('os')", "may hold numbers"),
        ("open", "'open' is not known; functions are abs, max"),
        ("exec(1)", "'exec' is not known"),
        ("sqrt(-1)", "cannot compute sqrt"),
        ("sqrt(1, 2)", "cannot compute sqrt"),
        ("round(1, -10 ** 9)", "cannot compute round: .* at most 4096"),
        ("round(0.5, 10 ** 1000)", "cannot compute round: .* at most 4096"),
        ("round(2.5, 0.5)", "cannot compute round"),
        ("(1, 2)", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("max(*(1, 2))", "only numbers"),
    ],
)
def test_invalid_expressions(expression: str, message: str):
    with pytest.raises(ToolError, match=message):
        calculate(expression)


@pytest.mark.parametrize("unit", ["11+", "1.1 ", "11e11 ", "1 ", "a ", "1.", ".1", "(", "aa+11*"])
def test_the_check_of_the_characters_takes_linear_time(unit: str):
    # A pattern that matches digits in two ways would try them all for each number, and never end.
    with pytest.raises(ToolError):
        calculate((unit * MAX_LENGTH)[: MAX_LENGTH - 1] + "!")
