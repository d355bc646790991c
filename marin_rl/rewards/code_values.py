# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Comparison of a program's answers with the expected results of its tests.

Answers are untrusted data, as `code_harness.encode` encodes them. They are compared as they are, and no object is built
from them. The work is limited by the size of the expected value; that for sets and keys is n·log(n) in the answer's.
"""

import cmath
import dataclasses
import enum
import math
import re
from collections.abc import Sequence, Set, Sized
from typing import Any

from marin_rl.rewards.code_harness import MAX_DEPTH, encode


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Maximum difference of floats, as in `math.isclose`: the larger of both bounds counts."""

    relative: float = 1e-9
    """Relative to the larger magnitude."""
    absolute: float | None = None
    """Absolute. None is 1e-12 where 0 is expected, which has no relative error, and else 0: results can be tiny."""

    def holds(self, expected: complex, answer: complex) -> bool:
        """Return whether an answer differs from the expected number by at most this."""
        absolute = self.absolute
        if absolute is None:
            absolute = 1e-12 if expected == 0 else 0.0
        return cmath.isclose(expected, answer, rel_tol=self.relative, abs_tol=absolute)


DEFAULT_TOLERANCE = Tolerance()


class Comparison(enum.Enum):
    """Meaning of the expected result of a call."""

    LITERAL = enum.auto()
    """A Python value: a list differs from a tuple."""
    JSON = enum.auto()
    """A JSON value: a list equals a list or a tuple."""
    TRUTH = enum.auto()
    """True or False: whether `if value:` would hold for the answer."""


@dataclasses.dataclass(frozen=True)
class CallTest:
    """A call of a function of the program, and its expected result."""

    function: str
    """Path of the function, such as `add` or `Solution().add`."""
    args: tuple[Any, ...]
    """Arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    expected: Any
    """The expected result; never sent to the program."""
    comparison: Comparison = Comparison.LITERAL
    """Meaning of the expected result."""
    tolerance: Tolerance = DEFAULT_TOLERANCE
    """Maximum difference where the expected result is a float."""

    def __post_init__(self) -> None:
        # Raises a ValueError if a value is nested too deeply.
        encode([self.args, self.kwargs, self.expected])

    def passes(self, answer: Any) -> bool:
        """Return whether an answer is the expected result.

        Args:
            answer: the untrusted answer, as decoded JSON.
        """
        try:
            if self.comparison is Comparison.TRUTH:
                return _is_true(answer) is self.expected
            return _equal(self.expected, answer, self)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
            # The answer is not of the protocol, or not comparable.
            return False


def _equal(expected: Any, answer: Any, test: CallTest) -> bool:
    if expected is None or isinstance(expected, bool):
        return answer is expected
    if isinstance(expected, str):
        return isinstance(answer, str) and answer == expected
    if isinstance(expected, int | float):
        return _equal_numbers(expected, _number(answer), test.tolerance)
    if isinstance(expected, complex):
        match _content(answer, "complex"):
            case [float(real), float(imag)]:
                return test.tolerance.holds(expected, complex(real, imag))
        return False
    if isinstance(expected, bytes):
        return _content(answer, "bytes") == expected.hex()
    if isinstance(expected, list):
        is_exact = isinstance(answer, list) or test.comparison is Comparison.LITERAL
        return _all_equal(expected, answer if is_exact else _content(answer, "tuple"), test)
    if isinstance(expected, tuple):
        return _all_equal(expected, _content(answer, "tuple"), test)
    if isinstance(expected, dict):
        return _equal_items(expected, _content(answer, "dict"), test)
    return _equal_sets(expected, _content(answer, "set", "frozenset"), test)


def _content(answer: Any, *kinds: str) -> Any:
    """Return the content of an answer of one of the kinds; None if it is of another."""
    if isinstance(answer, dict) and len(answer) == 1:
        return next((answer[kind] for kind in kinds if kind in answer), None)
    return None


def _all_equal(expected: Sequence[Any], answers: Any, test: CallTest) -> bool:
    return _has_length(answers, expected) and all(_equal(*pair, test) for pair in zip(expected, answers, strict=True))


def _has_length(answers: Any, expected: Sized) -> bool:
    return isinstance(answers, list) and len(answers) == len(expected)


def _equal_items(expected: dict[Any, Any], answers: Any, test: CallTest) -> bool:
    """Compare dictionaries: sorted by their keys, both must have equal keys and values."""
    if not _has_length(answers, expected):
        return False
    pairs = sorted(expected.items(), key=lambda pair: _order(encode(pair[0])))
    answers = sorted(answers, key=lambda pair: _order(pair[0]))
    return all(_all_equal(pair, answer, test) for pair, answer in zip(pairs, answers, strict=True))


def _equal_sets(expected: Set[Any], answers: Any, test: CallTest) -> bool:
    if not _has_length(answers, expected):
        return False
    items = sorted(expected, key=lambda item: _order(encode(item)))
    return _all_equal(items, sorted(answers, key=_order), test)


def _order(data: Any, depth: int = 0) -> tuple[Any, ...]:
    """Return a sort key of an encoded value: its kind, then its value. Numbers of any type are one kind."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    number = _number(data)
    if number is not None:
        return ("", 1) if math.isnan(number) else ("", 0, number)
    if data is None or isinstance(data, bool | str):
        return type(data).__name__, str(data)
    if isinstance(data, list):
        return "list", *(_order(item, depth + 1) for item in data)
    [(kind, content)] = data.items()
    if kind in ("set", "frozenset"):
        return "set", *sorted(_order(item, depth + 1) for item in content)
    return kind, _order(content, depth + 1)


_HEXADECIMAL = re.compile("-?0x[0-9a-f]+")


def _number(data: Any) -> int | float | None:
    """Return the number that an answer is, or None. The time is linear in its length."""
    if isinstance(data, int | float):
        return None if isinstance(data, bool) else data
    digits = _content(data, "int")
    return int(digits, 16) if isinstance(digits, str) and _HEXADECIMAL.fullmatch(digits) else None


def _equal_numbers(expected: int | float, answer: int | float | None, tolerance: Tolerance) -> bool:
    if answer is None or isinstance(expected, int):
        return answer == expected
    if math.isnan(expected):
        return answer != answer
    return tolerance.holds(expected, answer)


def _is_true(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return bool(answer)
    [(kind, content)] = answer.items()
    return any(content) if kind == "complex" else bool(content)


MAX_DIGITS = 64
"""Maximum length of printed numbers that are compared with a tolerance."""

_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


def same_output(expected: str, printed: str, tolerance: float | None = None) -> bool:
    r"""Return whether a program printed the expected output, as programming contests compare it.

    Args:
        expected: the expected output.
        printed: the untrusted output.
        tolerance: maximum relative or absolute error of numbers with a decimal point or exponent; the outputs are then
            compared word by word. None compares lines, ignoring white space at their ends and empty lines at the end.

    >>> same_output("0.5\n", "0.5 \n\n"), same_output("0.5", "0.50"), same_output("0.5", "0.50", tolerance=1e-6)
    (True, False, True)
    """
    if tolerance is None:
        lines, printed_lines = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, printed))
        return lines == printed_lines
    words, printed_words = expected.split(), printed.split()
    return len(words) == len(printed_words) and all(
        _same_word(*pair, tolerance) for pair in zip(words, printed_words, strict=True)
    )


def _same_word(expected: str, printed: str, tolerance: float) -> bool:
    if expected == printed:
        return True
    texts = expected, printed
    if not all(len(text) <= MAX_DIGITS and _DECIMAL.fullmatch(text) for text in texts):
        return False
    if all(text.lstrip("+-").isdigit() for text in texts):
        return int(expected) == int(printed)
    return math.isclose(float(expected), float(printed), rel_tol=tolerance, abs_tol=tolerance)
