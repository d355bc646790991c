# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Assert statements as tests of untrusted code: converted to a call with arguments and an expected result.

Only statements with an exact meaning as data are converted. Nothing of them is evaluated.
"""

import ast
import contextlib
import math
from typing import Any, TypeGuard

from marin_rl.rewards.code_values import DEFAULT_TOLERANCE, CallTest, Comparison, Tolerance


class CodeTestsError(ValueError):
    """The tests of a task are invalid; the message names them and the remedy."""


_FORMS = (
    "`assert f(1, [2]) == 3`, `assert f(1)`, `assert not f(1)`, `assert abs(f(1) - 0.5) < 1e-6` or "
    "`assert math.isclose(f(1), 0.5)`"
)


def convert_assert(line: str, tolerance: Tolerance = DEFAULT_TOLERANCE) -> CallTest:
    """Convert an assert statement.

    Args:
        line: the statement.
        tolerance: maximum difference of floats, unless the statement has its own.

    Raises:
        CodeTestsError: if it is not of one of the forms that can be converted.

    >>> convert_assert("assert add(2, 3) == 5").expected
    5
    """
    try:
        body = ast.parse(line.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeTestsError(f"the test {line[:200]!r} is not valid Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise CodeTestsError(f"the test {line[:200]!r} is not one assert statement; write one of {_FORMS}")
    try:
        return _convert(body[0].test, tolerance)
    except (_FormError, TypeError, ValueError, RecursionError) as error:
        raise CodeTestsError(
            f"the test {line[:200]!r} cannot be converted to data: {error}; write one of {_FORMS}, with literals, or "
            "store the task's tests as `calls` or `cases`"
        ) from error


class _FormError(ValueError):
    """A part of a statement cannot be converted."""


def _convert(test: ast.expr, tolerance: Tolerance) -> CallTest:
    match test:
        case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [left, right], keywords):
            call, expected = _sides(left, right)
            return _call(call, _float(expected), tolerance=_isclose_tolerance(keywords))
        case ast.Compare(ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)], []), [operator], [bound]):
            return _absolute(left, right, operator, bound)
        case ast.Compare(left, [ast.Eq()], [right]):
            call, expected = _sides(left, right)
            return _call(call, _value(expected), tolerance=tolerance)
        case ast.Compare(call, [ast.Is()], [ast.Constant(None | bool() as expected)]):
            return _call(call, expected)
        case ast.UnaryOp(ast.Not(), call):
            return _call(call, False, Comparison.TRUTH)
    return _call(test, True, Comparison.TRUTH)


def _absolute(left: ast.expr, right: ast.expr, operator: ast.cmpop, bound: ast.expr) -> CallTest:
    call, expected = _sides(left, right)
    limit = _float(bound)
    if isinstance(operator, ast.Lt):
        limit = math.nextafter(limit, -math.inf)
    elif not isinstance(operator, ast.LtE):
        raise _FormError("abs(…) can only be compared with < or <=")
    if limit < 0:
        raise _FormError(f"the bound {ast.unparse(bound)} is not positive")
    return _call(call, _float(expected), tolerance=Tolerance(0.0, limit))


def _isclose_tolerance(keywords: list[ast.keyword]) -> Tolerance:
    given = {keyword.arg: _float(keyword.value) for keyword in keywords}
    relative, absolute = given.pop("rel_tol", 1e-9), given.pop("abs_tol", 0.0)
    if given or not (relative >= 0 and absolute >= 0):
        raise _FormError("math.isclose takes rel_tol and abs_tol of at least 0")
    return Tolerance(relative, absolute)


def _call(
    node: ast.expr, expected: Any, comparison: Comparison = Comparison.LITERAL, tolerance: Tolerance = DEFAULT_TOLERANCE
) -> CallTest:
    if not _is_call(node):
        raise _FormError(f"{ast.unparse(node)[:100]} is not a call of a function of the program")
    args = tuple(_value(argument) for argument in node.args)
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _FormError(f"{ast.unparse(keyword.value)[:100]} is unpacked")
        kwargs[keyword.arg] = _value(keyword.value)
    return CallTest(_path(node.func), args, kwargs, expected, comparison, tolerance)


def _sides(left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
    """Return the call and the expected result, which can be on either side."""
    return (right, left) if _is_call(right) and not _is_call(left) else (left, right)


def _is_call(node: ast.expr) -> TypeGuard[ast.Call]:
    """Return whether an expression is a call of a function of the program, and not of a constructor."""
    return isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _CONSTRUCTORS)


def _path(node: ast.expr) -> str:
    """Return the path of a function: names, and classes that are called without arguments."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{_path(value)}.{name}"
        case ast.Call(function, [], []):
            return f"{_path(function)}()"
    raise _FormError(f"{ast.unparse(node)[:100]} is not the name of a function")


_CONSTRUCTORS = {"set": set, "frozenset": frozenset, "float": float}
"""Values without literals: `set()`, `frozenset([1])` and `float("inf")`."""


def _value(node: ast.expr) -> Any:
    """Return the value of a literal."""
    match node:
        case ast.Constant(value) if value is not Ellipsis:
            return value
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return kind(_value(item) for item in items)
        case ast.Dict(keys, values):
            if None not in keys:
                return {_value(key): _value(item) for key, item in zip(keys, values, strict=True) if key is not None}
        case ast.Call(ast.Name(name), arguments, []) if name in _CONSTRUCTORS and len(arguments) <= 1:
            return _CONSTRUCTORS[name](*map(_value, arguments))
        case ast.UnaryOp() | ast.BinOp():
            # Numbers with a sign and complex numbers; other operations raise an error.
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node)
    raise _FormError(f"{ast.unparse(node)[:100]} is not a literal")


def _float(node: ast.expr) -> float:
    value = _value(node)
    if isinstance(value, bool) or not isinstance(value, int | float) or float(value) != value:
        raise _FormError(f"{ast.unparse(node)[:100]} is not a number that a float can hold")
    return float(value)
