# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Comparison of a program's results with the expected ones of its tests.

Results are untrusted data: decoded JSON, and text. The work is limited by the size of the expected result.
"""

import math
import re
from typing import Any


def same_value(expected: Any, answer: Any, tolerance: float | None = None) -> bool:
    """Return whether a JSON value that a program returned is the expected one.

    Args:
        expected: the expected value.
        answer: the untrusted value, as decoded JSON.
        tolerance: maximum relative or absolute error where a float is expected. None is a relative error of 1e-9, or an
            absolute one of 1e-12 where 0 is expected, which has no relative error.

    >>> same_value([0.3, 1], [0.1 + 0.2, 1.0]), same_value(1, True), same_value(1.0, 1.1, tolerance=0.1)
    (True, False, True)
    """
    if expected is None or isinstance(expected, bool):
        return answer is expected
    if isinstance(expected, str):
        return isinstance(answer, str) and answer == expected
    if isinstance(expected, int | float):
        is_number = isinstance(answer, int | float) and not isinstance(answer, bool)
        return is_number and _same_number(expected, answer, tolerance)
    if isinstance(expected, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(expected)
            and all(same_value(*pair, tolerance) for pair in zip(expected, answer, strict=True))
        )
    return (
        isinstance(answer, dict)
        and answer.keys() == expected.keys()
        and all(same_value(item, answer[key], tolerance) for key, item in expected.items())
    )


def _same_number(expected: int | float, answer: int | float, tolerance: float | None) -> bool:
    if isinstance(expected, int):
        return answer == expected
    if math.isnan(expected):
        return answer != answer
    # Results can be tiny, so the default has no absolute error.
    relative, absolute = (1e-9, 0.0 if expected else 1e-12) if tolerance is None else (tolerance, tolerance)
    try:
        return math.isclose(expected, answer, rel_tol=relative, abs_tol=absolute)
    except OverflowError:
        # The answer is an integer beyond the floats.
        return False


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
