# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mathematical equality of a reply and an answer, which grading processes check."""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any


class GroundTruthError(ValueError):
    """An answer is not usable as ground truth; the message names the answer."""


def math_verify_match(reply: str, answer: str) -> bool:
    r"""Return whether the last expression of a reply equals the answer, according to math-verify.

    The reply can contain any text. math-verify searches it for these forms, in this order: `final answer is X. I hope`;
    `\boxed{X}` or `final answer is X`; `answer: X`; `answer X`; any number or LaTeX. The first form that occurs counts,
    and of several expressions of that form the last. Dollar signs written as `\$` are ignored. Expressions are
    simplified, so the text `12+34` equals 46. For tasks with an expression as the answer use `exact_match`.

    math-verify's time limit uses signals, which work only in the main thread and cannot interrupt a single large power,
    so it is disabled. This function works in any thread but has no time limit; `MathVerifyGrader` runs it in a process
    that is killed at a limit.

    Args:
        reply: the model's text.
        answer: the ground truth, in LaTeX or plain: `42`, `\frac{1}{2}`, `(1, 2)`.

    Returns:
        True if both are equal; False otherwise, or if the reply contains no expression.

    Raises:
        GroundTruthError: if the answer cannot be parsed.

    References:
        Kydlíček, math-verify 0.9.0, `parser.parse` and `grader.verify`.
    """
    from math_verify import parse, verify

    gold = parse_answer(answer)
    if reply.strip() == answer.strip():
        # math-verify does not parse words, even if they are the answer.
        return True
    text = _with_last_box(_ESCAPED_DOLLAR.sub("", reply))
    # Without dollar signs math-verify finds only the numbers of an extracted `\sqrt{8}`, as in a ground truth.
    texts = [text, f"${text.strip()}$"] if _is_bare_expression(text) else [text]
    return any(
        verify(list(gold), parse(text, parsing_timeout=_NO_TIMEOUT), timeout_seconds=_NO_TIMEOUT) for text in texts
    )


_COMMAND = re.compile(r"\\[A-Za-z]+")
_PROSE = re.compile(r"[^\W\d_]{3}|[$\n]|\\[()\[\]]")


def _is_bare_expression(text: str) -> bool:
    r"""Return whether a text is one expression without words or LaTeX delimiters, such as one that a regex extracted.

    >>> _is_bare_expression(r"2\sqrt{2}"), _is_bare_expression("so 7, not 8")
    (True, False)
    """
    text = text.strip()
    return _PROSE.search(_COMMAND.sub("", text)) is None and "\\boxed" not in text


# A dollar sign as a currency, which math-verify does not remove outside of LaTeX; `\\$` is a line break and a dollar.
_ESCAPED_DOLLAR = re.compile(r"(?<!\\)\\\$")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _with_last_box(text: str) -> str:
    r"""Remove all `\boxed{...}` except the last that is not empty: math-verify would combine them to a set.

    >>> _with_last_box(r"\boxed{6}? No, \boxed{\sqrt{49}}.")
    '? No, \\boxed{\\sqrt{49}}.'
    """
    spans: list[tuple[int, int]] = []
    kept: tuple[int, int] | None = None
    position = 0
    while (box := _BOX.search(text, position)) is not None:
        position = _closing_brace(text, box.end())
        spans.append((box.start(), position))
        if text[box.end() : position].strip("} \n"):
            kept = spans[-1]
    for start, end in reversed(spans):
        if kept not in (None, (start, end)):
            text = text[:start] + text[end:]
    return text


def _closing_brace(text: str, position: int) -> int:
    """Return the position after the brace that closes the one before `position`; the end of the text if none does."""
    depth = 1
    for brace in _BRACE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    return len(text)


# 0 disables math-verify's timeout like None does, and matches the declared type.
_NO_TIMEOUT = 0


@functools.lru_cache(maxsize=4096)
def parse_answer(answer: str) -> tuple[Any, ...]:
    """Parse the ground truth into math-verify's expressions, at least one of which is not a plain string.

    Raises:
        GroundTruthError: if it cannot be parsed.
    """
    from math_verify import parse

    # math-verify warns about the disabled timeout, and about every reply that it cannot parse.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = _ESCAPED_DOLLAR.sub("", answer)
    # Without an anchor math-verify parses only plain numbers; a bare `\sqrt{2}` needs dollar signs.
    anchored = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    expressions = parse(anchored, parsing_timeout=_NO_TIMEOUT)
    if all(isinstance(value, str) for value in expressions):
        raise GroundTruthError(
            f"math_verify cannot parse the ground truth {answer!r}; correct the answer column, set `answer_regex` to "
            "extract the result, or use `grader: {type: exact}`"
        )
    return tuple(expressions)


def open_grader() -> Callable[[Mapping[str, str]], dict[str, Any]]:
    """Import math-verify, whose import must not count towards a reply, and return `answer`."""
    import math_verify  # noqa: F401

    return answer


def answer(request: Mapping[str, str]) -> dict[str, Any]:
    """Answer a request of [`MathVerifyGrader`][marin_rl.rewards.math_grader.MathVerifyGrader].

    Args:
        request: the `reply`, and the `answer` that it is compared with. Without a reply only the answer is checked.

    Returns:
        `match`, whether they are equal; or `ground_truth_error` with the reason why the answer is not usable.
    """
    try:
        if "reply" in request:
            return {"match": math_verify_match(request["reply"], request["answer"])}
        parse_answer(request["answer"])
        return {"match": True}
    except GroundTruthError as error:
        return {"ground_truth_error": str(error)}
