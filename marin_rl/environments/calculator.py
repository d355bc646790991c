# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The calculator: a tool that evaluates arithmetic expressions of bounded size."""

import ast
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from marin_rl.environments.tools import Tool, ToolConfig, ToolError, text_parameter


class CalculatorTool:
    """Evaluates arithmetic expressions."""

    name: str = "calculator"
    description: str = (
        "Works out an arithmetic expression, such as (3 + 4) * 2 ** 5. It knows + - * / // % ** and abs, max, min, "
        "round, sqrt."
    )
    parameters: Mapping[str, Any] = text_parameter("expression", "The expression.")

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the value of the expression."""
        return calculate(arguments["expression"])


@ToolConfig.register_subclass("calculator")
@dataclasses.dataclass(frozen=True)
class CalculatorConfig(ToolConfig):
    """Calculator with bounded arithmetic."""

    def build(self) -> Tool:
        """Build the calculator."""
        return CalculatorTool()


MAX_LENGTH = 400
"""Maximum number of characters of an expression."""
MAX_DEPTH = 60
"""Maximum nesting depth of an expression."""
MAX_BITS = 4096
"""Maximum number of bits of an integer, about 1,200 digits."""

Number = int | float


def calculate(expression: str) -> str:
    """Evaluate an expression.

    Args:
        expression: numbers, brackets, `+ - * / // % **`, and `abs`, `max`, `min`, `round`, `sqrt`.

    Returns:
        The value: integers exactly, other numbers to 15 digits.

    Raises:
        ToolError: if the expression is invalid, has no value, or is too large.

    >>> calculate("(3 + 4) * 2 ** 5")
    '224'
    >>> calculate("1 / 3")
    '0.333333333333333'
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are allowed")
    if _WORDS.fullmatch(expression) is None:
        raise ToolError("the expression may hold numbers, brackets, + - * / // % ** and functions; powers are **")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"not a valid expression: {error}") from error
    try:
        value = _value(tree.body, 0)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error
    return str(value) if isinstance(value, int) else format(value, ".15g")


# Python accepts a letter directly after a number in some places, with a warning.
# The digits match in one way only; otherwise the time would be exponential in the number of numbers.
_WORDS = re.compile(r"(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|[a-z]+(?!\w)|[-+*/%(),\s])++")


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression has more than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return _SIGNS[type(op)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_value(argument, depth + 1) for argument in arguments])
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ToolError(f"{name!r} is not known; functions are {', '.join(_FUNCTIONS)}")
    raise ToolError("only numbers, + - * / // % ** and the listed functions are supported")


def _bounded(value: object) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ToolError("the result is too large")
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise ToolError("the result is not a real number")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * math.log2(max(abs(base), 1)) > MAX_BITS:
        raise ToolError("the power is too large")
    return _bounded(base**exponent)


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return _bounded(_FUNCTIONS[name](*arguments))
    except (TypeError, ValueError) as error:
        raise ToolError(f"cannot compute {name}: {error}") from error


def _round(number: Number, digits: Number | None = None) -> Number:
    if digits is None:
        return round(number)
    # Python computes the power of ten for rounding an integer.
    if not isinstance(digits, int) or abs(digits) > MAX_BITS:
        raise ValueError(f"the number of digits must be a whole one and at most {MAX_BITS}")
    return round(number, digits)


_SIGNS: Mapping[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATIONS: Mapping[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": _round,
    "sqrt": math.sqrt,
}
