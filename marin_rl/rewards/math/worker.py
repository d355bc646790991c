# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mathematical equality of a reply and an answer, which grading processes check."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from marin_rl.rewards.grading_process import GroundTruthError
from marin_rl.rewards.math.answers import find_answer
from marin_rl.rewards.math.text import word_set
from marin_rl.rewards.math.values import Answer, AnyOf, Bracket, Scalar, Value, Words, number


def math_match(reply: str, answer: str) -> bool:
    r"""Return whether the final answer of a reply equals the ground truth.

    `answers` defines the final answer; the whole of it is compared. Numbers are compared exactly, expressions by
    their values at several points, lists without order, tuples, intervals and matrices element by element, words by
    their letters. `5%` equals `5` and `0.05`. A sum or product is not a number: `12+34` is wrong if the truth is `46`.

    This function works in any thread but has no time limit; `MathGraderConfig` runs it in a process that is killed at a
    limit.

    Args:
        reply: the model's text.
        answer: the ground truth, in LaTeX or plain: `42`, `\frac{1}{2}`, `(1, 2)`.

    Returns:
        True if both are equal; False otherwise, or if the reply has no final answer.

    Raises:
        GroundTruthError: if the answer cannot be parsed.
    """
    truth = parse_answer(answer)
    if reply.strip() == answer.strip():
        return True
    found = find_answer(reply)
    return found is not None and (_same_text(truth, found) or _equal(truth.value, found.value))


@functools.lru_cache(maxsize=4096)
def parse_answer(answer: str) -> Answer:
    """Parse the ground truth; if the grammar cannot read it, a reply has to contain the same text.

    Raises:
        GroundTruthError: if it is empty, or its brackets are not balanced.
    """
    found = find_answer(answer, is_truth=True)
    if found is None or not (found.value or re.search(r"\w", found.text)) or not _has_closed_braces(answer):
        raise GroundTruthError(
            f"the grader math cannot parse the ground truth {answer!r}; correct the answer column, set `answer_regex` "
            "to extract the result, or use `grader: {type: exact}`"
        )
    return found


def _has_closed_braces(text: str) -> bool:
    braces = re.findall(r"(?<!\\)[{}]", text)
    return braces.count("{") == braces.count("}")


def _same_text(truth: Answer, found: Answer) -> bool:
    return truth.text == found.text and (found.value is not None or truth.value is None)


def _equal(truth: Value | None, reply: Value | None) -> bool:
    if isinstance(truth, AnyOf) and isinstance(reply, AnyOf):
        return truth.label == reply.label and _equal(truth.value, reply.value)
    if isinstance(truth, AnyOf):
        return _equal(truth.label, reply) or _equal(truth.value, reply)
    if isinstance(reply, AnyOf):
        return _equal(truth, reply.label) or _equal(truth, reply.value)
    if isinstance(truth, Words) and isinstance(reply, Words):
        return truth.text == reply.text
    if isinstance(truth, Bracket) and isinstance(reply, Bracket):
        return _equal_groups(truth, reply)
    if isinstance(truth, Scalar) and isinstance(reply, Scalar):
        return _equal_scalars(truth, reply)
    return False


def _equal_groups(truth: Bracket, reply: Bracket) -> bool:
    truth, reply = _as_tuple(truth, reply.kind), _as_tuple(reply, truth.kind)
    if truth.kind != reply.kind or len(truth.items) != len(reply.items):
        return False
    if reply.is_relation and not truth.is_relation and truth.kind == "()" and "\\infty" not in str(truth.items):
        # (1, 2) may be a point.
        return False
    names = [item.name for item in truth.items if isinstance(item, Scalar) and item.name]
    is_ordered = truth.kind != "{}" or (
        len(set(names)) == len(truth.items) > 1
        and not any(isinstance(item, Scalar) and item.name for item in reply.items)
    )
    if is_ordered:
        return all(map(_equal, truth.items, reply.items))
    rest: list[Value] = list(reply.items)
    for item in truth.items:
        match = next((other for other in rest if _equal(item, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _as_tuple(group: Bracket, kind: str) -> Bracket:
    """Convert `y = 2, x = 1` to (1, 2) if it is compared with a tuple."""
    names = {item.name: item for item in group.items if isinstance(item, Scalar) and item.name}
    if (group.kind, kind) != ("{}", "()") or len(names) != len(group.items):
        return group
    return Bracket("()", tuple(dataclasses.replace(item, name="") for _, item in sorted(names.items())))


def _equal_scalars(truth: Scalar, reply: Scalar) -> bool:
    # "12 dollars" equals "12 dollars per hour".
    units = zip(truth.unit.split("/"), reply.unit.split("/"), strict=False)
    if truth.unit and reply.unit and any(one != other for one, other in units):
        return False
    # An approximation of an integer leaves its value open: "about 46".
    exact = number(truth.text) if reply.is_rounded and not truth.is_rounded else None
    if exact is not None and exact.denominator == 1:
        return False
    sides = _sides(truth), _sides(reply)
    if sides[0] is not None or (truth.name and sides[1] is not None):
        left = truth.name if sides[0] is None else sides[0]
        right = reply.name if sides[1] is None else sides[1]
        one, other = f"{left}-({truth.text})", f"{right}-({reply.text})"
        return bool(left and right) and (one == other or _equal_expressions(one, other, is_equation=True))
    if truth.name and reply.name and truth.name != reply.name:
        return False
    expected, given = _amounts(truth, reply.unit), _amounts(reply, truth.unit)
    return any(_equal_texts(one, other) for one in expected for other in given) and all(
        any(_equal_texts(other, part, True) for other in _amounts(reply, ""))
        for part in reply.equal_to
        if _NOT_COMPUTED.isdisjoint(_COMMAND.findall(part))
    )


def _amounts(scalar: Scalar, other_unit: str) -> list[str]:
    """Return the text of a value; compared with one without `%`, that of 40% is 40 or 2/5, and of 0.5% only 1/200."""
    value = number(scalar.text) if scalar.unit == "%" != other_unit else None
    if value is None:
        return [scalar.text]
    return [scalar.text, str(value / 100)] if abs(value) >= 1 else [str(value / 100)]


_VARIABLE = re.compile(r"(?<!\\)\b[a-df-hj-zA-Z]|[0-9)}_][a-df-hj-zA-Z]")
_SUM = re.compile(r"[A-Za-z0-9)}][-+]")


def _sides(scalar: Scalar) -> str | None:
    """Return the left side of an equation such as `2x + 3y = 5`; None for a value."""
    left = scalar.equal_to[0] if len(scalar.equal_to) == 1 else scalar.name
    is_equation = _VARIABLE.search(left) and (scalar.equal_to or _SUM.search(left))
    return left if is_equation else None


# Numbers in other bases, dates and ranges equal only themselves.
_LITERAL = re.compile(r"[0-9]_|:|^[0-9]+(?:-[0-9]+)+$|^[0-9.]+/[0-9]+/[0-9]|^[0-9]+\.[0-9]+\.[0-9]")
_COMPUTED = re.compile(r"(?<=[^{(^])[-+*/]|(?<=[0-9)])\(|\\(?:times|cdot|div|int|sum|prod|lim)(?![A-Za-z])")
_DIGITS_OF_ROUNDED = 10


def _equal_texts(truth: str, reply: str, computed: bool = False) -> bool:
    """Compare two expressions; `computed` says whether a sum or a product may equal a number."""
    if truth == reply:
        return True
    if _LITERAL.search(truth) or _LITERAL.search(reply):
        return False
    exact, given = number(truth), number(reply)
    if exact is not None and given is not None:
        return exact == given or _is_rounded(truth, given) or _is_rounded(reply, exact)
    if exact is not None and not computed and _COMPUTED.search(reply.lstrip("+-")):
        return False
    return _is_small(truth) and _is_small(reply) and _equal_expressions(truth, reply)


def _is_rounded(text: str, exact: Any) -> bool:
    """Whether a text is a decimal number of at least 10 digits, and an exact value rounded or truncated."""
    whole, _, decimals = text.partition(".")
    has_digits = len(f"{whole}{decimals}".lstrip("-0")) >= _DIGITS_OF_ROUNDED
    value = number(text)
    return (
        value is not None
        and decimals.isdigit()
        and has_digits
        and abs(exact - value) < Fraction(1, 10 ** len(decimals))
    )


_COMMANDS = word_set(
    """frac sqrt binom pi infty cdot times div pm sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp
    lfloor rfloor lceil rceil alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma
    tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega"""
)
"""Commands of expressions that are computed; others, such as `phantom` and `max`, are compared as text."""
_NOT_COMPUTED = word_set("sum prod int lim gcd max min cdots ldots dots")
"""Commands of left sides that are not compared with their right side, as in `\\gcd(12, 18) = 6`."""
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_LARGE = re.compile(r"[0-9]{31}|\^ ?\{?[-+(]*[0-9]{4}|!!|[0-9]{4}!|\)!|\}!|\\binom\{[0-9]{4}")


def _is_small(text: str) -> bool:
    """Whether sympy can evaluate an expression, and quickly: no large exponents, nested powers or factorials."""
    commands = _COMMAND.findall(text)
    if len(text) > 200 or _LARGE.search(text) or not text.isascii() or not _COMMANDS.issuperset(commands):
        return False
    for power in re.finditer(r"\^", text):
        exponent = text[power.end() :]
        depth = 0
        for index, sign in enumerate(exponent):
            depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(sign, 0)
            if sign == "^" and (depth > 0 or index < 3):
                return False
            if depth < 0 or (depth == 0 and index > 2):
                break
    return True


def _equal_expressions(one: str, other: str, is_equation: bool = False) -> bool:
    """Compare the values of two expressions at several points; sides of an equation may have a common factor."""
    parsed = [_parse(text) for text in (one, other)]
    if any(value is None for value in parsed):
        return False
    left, right = parsed
    variables = sorted(left.free_symbols, key=str)
    if variables != sorted(right.free_symbols, key=str):
        return False
    if left == right:
        return True
    if not variables:
        return _equal_constants(_evaluate(left, {}), one, _evaluate(right, {}), other)
    pairs = [(_evaluate(left, point), _evaluate(right, point)) for point in _points(variables)]
    real = [(a, b) for a, b in pairs if a is not None and b is not None and a.is_real and b.is_real]
    # Without real values (logarithms of negative numbers, powers of -1) complex ones are compared.
    known = real if len(real) >= 3 else [(a, b) for a, b in pairs[:3] if a is not None and b is not None]
    scale = known[0] if is_equation and known else (1, 1)
    return len(known) >= 3 and 0 not in scale and all(_close(a * scale[1], b * scale[0]) for a, b in known)


def _equal_constants(one: Any, text: str, other: Any, other_text: str) -> bool:
    if one is None or other is None:
        return False
    if _close(one, other):
        return True
    if not (one.is_real and other.is_real):
        return False
    return _is_rounded(text, Fraction(str(other))) or _is_rounded(other_text, Fraction(str(one)))


_DECIMALS = re.compile(r"[0-9]*\.[0-9]+")


def _as_fraction(decimal: re.Match[str]) -> str:
    """Write a decimal number as a fraction, because sympy would round it."""
    value = Fraction(decimal[0])
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Any:
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    try:
        value = latex2sympy(
            _DECIMALS.sub(_as_fraction, text.replace("%", r"\%")),
            is_real=None,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # the parser raises plain Exceptions, and errors of sympy, for text that it cannot parse
        return None
    from sympy import Expr

    return value if isinstance(value, Expr) else None


_PRECISION = 40


def _points(variables: Sequence[Any]) -> list[dict[Any, Any]]:
    from sympy import Integer, Rational

    signs = [(1, 1), (1, 1), (1, 1), (-1, 1), (1, -1), (-1, -1)]
    return [
        {
            variable: Integer(signs[row][index % 2])
            * Rational(7919 * (row + 2) + 613 * (index + 1) ** 2, 6007 + 97 * row * index)
            for index, variable in enumerate(variables)
        }
        for row in range(len(signs))
    ]


def _evaluate(expression: Any, point: dict[Any, Any]) -> Any:
    """Return the value as a number, or None if it is not finite."""
    try:
        value = expression.subs(point).doit().evalf(_PRECISION)
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return None
    return value if value.is_number and value.is_finite else None


def _close(one: Any, other: Any) -> bool:
    difference, size = abs(one - other), abs(one) + abs(other)
    return bool(size == 0 or difference <= size * 10 ** (10 - _PRECISION))


def open_grader() -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Import the parser, whose import must not count towards a reply, and return `answer`."""
    import latex2sympy2_extended.latex2sympy2  # noqa: F401

    return answer


def answer(request: Mapping[str, str]) -> dict[str, Any]:
    """Answer a request of [`MathGraderConfig`][marin_rl.rewards.grading.MathGraderConfig].

    Args:
        request: the `reply`, and the `answer` that it is compared with. Without a reply only the answer is checked;
            without an answer the reply is only read.

    Returns:
        `match`, whether they are equal; or `ground_truth_error` with the reason why the answer is not usable; or
        `found`, the reply's final answer, null if it has none.
    """
    if "answer" not in request:
        found = find_answer(request["reply"])
        return {"found": None if found is None else found.text or None}
    try:
        if "reply" in request:
            return {"match": math_match(request["reply"], request["answer"])}
        parse_answer(request["answer"])
        return {"match": True}
    except GroundTruthError as error:
        return {"ground_truth_error": str(error)}
