# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Answers of an LLM judge as scores.

An answer is text that a model wrote, and may repeat text of the rollouts that it judges. It is read in linear time:

- JSON: the answer is a JSON object, or ends with one in a code block. `{"score": 0.8}` for one score,
  `{"correct": 1, "short": 0.5}` for the criteria of a rubric, `{"scores": [0.2, 1]}` for the rollouts of a group. Other
  keys, such as an explanation, are ignored.
- Text: otherwise the last line is `Score: 0.8`, `Scores: correct=1, short=0.5` or `Scores: 0.2, 1`, which means the
  same as the JSON above. Emphasis and backticks in it are ignored.

Any other answer has no verdict: a number in another line, or followed by other words, is never a score.
"""

import json
import re
from typing import Any, NamedTuple

from marin_rl.rewards.reply_text import graded_text

MAX_CHARACTERS = 2**16
"""Characters at the end of an answer that are read."""
_LINE = re.compile(r"(?:final )?(scores?)\s*[:=](.*)", re.IGNORECASE | re.DOTALL)
_NAME_END = re.compile("[=:]")


class VerdictError(Exception):
    """An answer has no valid verdict."""


class ScoreRange(NamedTuple):
    """The valid scores."""

    lowest: float
    """Minimum."""
    highest: float
    """Maximum."""

    def read(self, value: object, name: str = "score") -> float:
        """Return a score of a verdict: a number, or a text such as `0.8` or `0.8/1`.

        Args:
            value: the value in the verdict; None if it is missing.
            name: its name, for the message.

        Raises:
            VerdictError: if it is no number in the range, or `/` follows with another number than the highest score.

        >>> ScoreRange(0.0, 1.0).read("0.8 / 1")
        0.8
        """
        text, slash, of = value.partition("/") if isinstance(value, str) else (value, "", "")
        score = _number(text)
        if score is None:
            raise VerdictError(f"no number for {name}")
        if slash and _number(of) != self.highest:
            raise VerdictError(f"{name} {score} is one of {of.strip()[:20]!r}, but the highest score is {self.highest}")
        if not self.lowest <= score <= self.highest:
            raise VerdictError(f"{name} {score} is not between {self.lowest} and {self.highest}")
        return score


def read_verdict(answer: str) -> dict[str, Any]:
    r"""Return the verdict of an answer in its JSON form. Thoughts of the judge are not read.

    Raises:
        VerdictError: if it has no verdict.

    >>> read_verdict("<think>Score: 1?</think>Too long.\n**Score:** 0.5")
    {'score': '0.5'}
    >>> read_verdict("Scores: correct=1, short=0.5"), read_verdict("Scores: 0.2, 1")
    ({'correct': '1', 'short': '0.5'}, {'scores': ['0.2', '1']})
    """
    text = graded_text(answer)
    if text is None:
        raise VerdictError("the answer has a <think> that is not closed, and so no verdict; raise max_tokens")
    text = text.rstrip()
    if len(text) > MAX_CHARACTERS:
        # A part of the first line could be another verdict.
        text = text[-MAX_CHARACTERS:].partition("\n")[2]
    verdict = _json_object(text)
    if verdict is None:
        verdict = _last_line(text)
    if verdict is None:
        raise VerdictError("the answer is no JSON object, and its last line is not `Score: ...` or `Scores: ...`")
    return verdict


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that an answer is, or with which it ends in a code block; None if there is none."""
    if text.endswith("\n```"):
        # Both fences begin a line; in a quotation they do not.
        text = f"\n{text[:-4]}".rpartition("\n```")[2].partition("\n")[2]
    if not text.lstrip().startswith("{"):
        return None
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, strict=False)
    except (ValueError, RecursionError):
        return None


def _last_line(text: str) -> dict[str, Any] | None:
    line = text.rpartition("\n")[2]
    match = _LINE.fullmatch(line.replace("*", " ").replace("`", " ").lstrip(" \t#-"))
    if match is None:
        return None
    value = match[2].rstrip(" \t.").strip(" \t[]")
    if match[1].lower() == "score":
        return {"score": value}
    parts = [part.strip() for part in value.split(",")]
    if _NAME_END.search(value) is None:
        return {"scores": parts}
    named = (_NAME_END.split(part, maxsplit=1) for part in parts)
    return _without_repeats([(name.strip(), "".join(score).strip()) for name, *score in named])


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise VerdictError("the verdict repeats a name")
    return values


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
