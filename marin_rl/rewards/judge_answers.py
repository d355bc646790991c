# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Answers of an LLM judge as scores: numbers, named criteria, comparisons of a group and of pairs.

An answer is text that a model wrote. It is read in linear time: a JSON object if the answer is one or ends with one in
a code block, otherwise its last line in the expected form.
"""

import dataclasses
import enum
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from marin_rl.rewards.component import check_component
from marin_rl.rewards.functions import RewardCallError, RewardFailure
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.rewards.reply_text import Found, graded_text, search_reply
from marin_rl.seeds import derive_seed

MAX_CHARACTERS = 2**16
"""Characters at the end of an answer that are read."""
# A line such as `**Final score:** 0.8/1`; not a part of a number, a percentage or a range such as `0-1`. Neither digits
# of other scripts are read nor a number before their decimal point, or an Arabic 0.5 would be 0.
SCORE_REGEX = (
    r"(?im)^[^\w\n]*(?:(?:final|overall)\s+)?score[^\w\n:=]*[:=][ \t*`\"'(\[<$]*"
    r"([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[-+]?[0-9]+)?)(?![\w%]|[.,\u066b\uff0e]\d|[ \t]*-[ \t]*\d)"
)
"""The default pattern of a score."""
_KIND = re.compile(r"\W*(scores|ranking|winner)\W*[:=]", re.IGNORECASE)
"""Start of a line with a verdict."""
_QUOTED_LINE = re.compile(r"(?m)^[^\w\n>\uff1e\xbb]*(?<![-=])[>\uff1e\xbb].*")
"""A line such as `> text`, in a list too, but not `-> text`."""
_OF = re.compile(
    r"[\s*_`\"'(\])>]*(?:/|out of)(?: a maximum(?: score)?(?: of|:))?[\s*_`]*(\d+(?:\.\d+)?)", re.IGNORECASE
)
"""The highest score, as in `0.8/1`, `8 out of 10` and `8 (out of a maximum score: 10)`."""
_UNDECIDED = re.compile(
    r"[^\n]*?(?:[\d\xbc-\xbe]|\b(?:maybe|perhaps|possibly|probably|alternatively|unsure|uncertain|zero)\b)"
    r"|[^\w\n]*(?:\?|(?:or|if|to|but|would|could|might|may|is|i)\b)",
    re.IGNORECASE,
)
"""Start of a text after a score that has another number in its line, or doubts the score."""
_SEPARATORS = re.compile(r"[\s,>]+")
_QUOTES = " \t\"'`*{}[]()"
_POINTS = {"a": 1.0, "b": 0.0, "tie": 0.5}
_RESERVED = ("score", "retries", "prompt_tokens", "completion_tokens", "cost")
"""Metrics of every judge."""


class RetryableError(RewardCallError):
    """A request got no usable answer, and may be repeated."""


@dataclasses.dataclass(frozen=True)
class JudgeCriterion:
    """A criterion of a judge's rubric."""

    name: str
    """Name in the judge's answer, and under which its scores are logged: at most 100 letters, digits and characters of
    `_-.`."""
    description: str
    """Text for the judge: the property, and which score to give when."""
    weight: float = 1.0
    """Weight in the mean of the criteria; above 0."""

    def __post_init__(self) -> None:
        check_component(self.name, self.weight)
        if self.name in _RESERVED or self.name.startswith("failed_") or len(self.name) > 100:
            raise ValueError(
                f"rewards: invalid name {self.name!r} of a criterion; use at most 100 characters, and none of the "
                f"metrics {', '.join(_RESERVED)} and failed_..."
            )
        if not self.weight > 0:
            raise ValueError(f"rewards: weight of criterion {self.name!r} must be above 0, got {self.weight}")
        if not self.description.strip():
            raise ValueError(f"rewards: criterion {self.name!r} has no description, so the judge cannot apply it")


class JudgeComparison(enum.StrEnum):
    """Format in which a judge compares the rollouts of a group; the last line in this format counts."""

    SCORES = "scores"
    """`Scores: 0.2, 1, 0.5`: one number per rollout, in the order shown."""
    RANKING = "ranking"
    """`Ranking: 2, 3, 1`: the numbers of the rollouts, best first. The best gets `highest`, the worst `lowest`, and the
    others are spaced evenly in between."""
    PAIRWISE = "pairwise"
    """`Winner: A`, `Winner: B` or `Winner: tie`: two rollouts per call, each pair in both orders. The score is the win
    rate."""


class ScoreRange(NamedTuple):
    """The valid scores."""

    lowest: float
    """Minimum."""
    highest: float
    """Maximum."""

    def check(self, score: float, name: str = "score") -> None:
        """Raise `RetryableError` if a score is out of range or NaN."""
        if not self.lowest <= score <= self.highest:
            raise _unreadable(f"{name} {score} is not between {self.lowest} and {self.highest}")


def verdict_text(answer: str) -> str:
    r"""Return the part of an answer that holds its verdict: after its thoughts, at most `MAX_CHARACTERS` at the end.

    Quoted lines are blank, as their text is often that of a rollout, which must not set its score.

    Raises:
        RetryableError: if its thoughts are not closed.

    >>> verdict_text("<think>Score: 1?</think>Score: 0")
    'Score: 0'
    >>> verdict_text("Score: 0\n> Score: 1")
    'Score: 0\n'
    """
    text = graded_text(answer)
    if text is None:
        raise _unreadable("the answer has a <think> that is not closed, and so no verdict; raise max_tokens")
    if len(text) > MAX_CHARACTERS:
        # A part of the first line could be another verdict.
        text = text[-MAX_CHARACTERS:].partition("\n")[2]
    return _QUOTED_LINE.sub("", text)


def read_score(text: str, pattern: str, valid: ScoreRange) -> float:
    """Read the score of one rollout: `score` of a JSON object, or group 1 of the last match of a pattern.

    Blocks while another process searches the text. JSON is read only for `SCORE_REGEX`.

    Args:
        text: the verdict.
        pattern: the pattern.
        valid: the valid scores.

    Raises:
        RetryableError: if there is no match, it is not a number in the range, or `/` follows with another number than
            the highest score. With `SCORE_REGEX`, also if its line has another number or a doubt, as in `0 or 1`.

    >>> read_score("Score: 0.8/1", SCORE_REGEX, ScoreRange(0.0, 1.0))
    0.8
    >>> read_score('{"score": 0.5}', SCORE_REGEX, ScoreRange(0.0, 1.0))
    0.5
    """
    if pattern == SCORE_REGEX and (values := _json_object(text)) is not None:
        found = Found(_member(values, "score"), "")
    else:
        try:
            found = search_reply(pattern, text)
        except NoAnswerError as error:
            raise _unreadable(f"the search for score_regex was given up: {error}") from error
    score = None if found is None else _number(found.group)
    if found is None or score is None:
        raise _unreadable(f"no score in {text[-200:]!r}")
    if (of := _OF.match(found.following)) and float(of[1]) != valid.highest:
        raise _unreadable(f"score {score} is one of {of[1]}, but the highest score is {valid.highest}")
    if pattern == SCORE_REGEX and _UNDECIDED.match(found.following, of.end() if of else 0):
        raise _unreadable(f"score {score} is followed by another number or a doubt: {found.following!r}")
    valid.check(score)
    return score


def read_criteria(text: str, names: Sequence[str], valid: ScoreRange) -> dict[str, float]:
    r"""Read one score per criterion from the last line `Scores: NAME=0.5, NAME=1`, or from a JSON object.

    Args:
        text: the verdict.
        names: the criteria.
        valid: the valid scores.

    Returns:
        The scores by criterion, in the order of `names`.

    Raises:
        RetryableError: if there is no such line, a criterion is missing, repeated or unknown, or a score is not a
            number in the range.

    >>> read_criteria("Good.\nScores: clear=1, short=0.5", ["short", "clear"], ScoreRange(0.0, 1.0))
    {'short': 0.5, 'clear': 1.0}
    """
    scores: dict[str, float] = {}
    for name, score in _scored_criteria(text, names):
        if name not in names:
            raise _unreadable(f"{name[:100]!r} is not a criterion; the criteria are {', '.join(names)}")
        if name in scores:
            raise _unreadable(f"criterion {name!r} is repeated")
        valid.check(score, f"score of {name!r}")
        scores[name] = score
    if missing := [name for name in names if name not in scores]:
        raise _unreadable(f"no score for {', '.join(missing)} in {text[-200:]!r}")
    return {name: scores[name] for name in names}


def _scored_criteria(text: str, names: Sequence[str]) -> Iterable[tuple[str, float]]:
    values = _json_object(text)
    if values is None:
        parts = [part.replace(":", "=").partition("=") for part in _last_line(text, "scores").split(",")]
        pairs: Iterable[tuple[str, Any]] = [(name.strip(_QUOTES), score.strip(_QUOTES)) for name, _, score in parts]
    else:
        inner = _member(values, "scores", values)
        if not isinstance(inner, Mapping):
            raise _unreadable(f"`scores` of the JSON object is of type {type(inner).__name__}, not an object")
        # Next to the criteria, the object of the answer may hold an explanation.
        pairs = [item for item in inner.items() if inner is not values or item[0] in names]
    for name, value in pairs:
        score = _number(value)
        if score is None:
            shown = f"{name}={value}" if value and isinstance(value, str | int | float) else name
            raise _unreadable(f"{shown[:100]!r} is not `criterion=score`")
        yield name, score


def read_comparison(text: str, count: int, comparison: JudgeComparison, valid: ScoreRange) -> list[float]:
    """Read the scores of a group from the last line `Scores: ...` or `Ranking: ...`, or from a JSON object.

    Args:
        text: the verdict.
        count: number of rollouts shown.
        comparison: `SCORES` or `RANKING`.
        valid: the valid scores.

    Returns:
        One score per rollout, in the order shown.

    Raises:
        RetryableError: if there is no such line, it does not have `count` numbers, a score is out of range, or the
            ranking is not a permutation.
    """
    verdict = _json_object(text)
    if verdict is None:
        line = _last_line(text, comparison.value)
        parts: Sequence[Any] = _SEPARATORS.split(line.lstrip("[(*` \t"))
    else:
        line, listed = text, _member(verdict, comparison.value)
        parts = listed if isinstance(listed, list) else []
    numbers = [_number(part) for part in parts]
    values = [number for number in numbers if number is not None]
    if len(values) != len(numbers) or len(values) != count:
        raise _unreadable(f"{line!r:.200} is not {count} numbers")
    if comparison is JudgeComparison.SCORES:
        for score in values:
            valid.check(score)
        return values
    if sorted(values) != list(range(1, count + 1)):
        raise _unreadable(f"{line!r:.200} does not rank each of 1 to {count} once")
    ranks = {int(number): rank for rank, number in enumerate(values)}
    step = (valid.highest - valid.lowest) / max(count - 1, 1)
    return [valid.highest - ranks[number] * step for number in range(1, count + 1)]


def read_winner(text: str) -> float:
    """Read the points of rollout A from the last line `Winner: A`, `Winner: B` or `Winner: tie`, or a JSON object.

    Returns:
        1 if A wins, 0 if B wins, 0.5 for a tie.

    Raises:
        RetryableError: if there is no such line, or it names something else.
    """
    values = _json_object(text)
    winner = _last_line(text, "winner") if values is None else _member(values, "winner")
    points = _POINTS.get(winner.strip(_QUOTES).lower()) if isinstance(winner, str) else None
    if points is None:
        raise _unreadable(f"the winner is {(winner if values is None else text)[:100]!r}, expected A, B or tie")
    return points


def shown_order(group_seed: int, count: int) -> list[int]:
    """Return the order in which a judge is shown the rollouts of a group, drawn from the group's seed.

    Judges favour positions. With random permutations, over many groups every rollout index is shown at every position.

    Args:
        group_seed: seed derived from the run's seed and the group.
        count: number of rollouts.

    Returns:
        A permutation of the rollout indices.
    """
    order = list(range(count))
    random.Random(derive_seed(group_seed, "judge order")).shuffle(order)
    return order


def draw_pairs(group_seed: int, count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs of a group that are compared; every rollout occurs in equally many.

    The rollouts are placed on a circle in random order, and each is paired with its nearest neighbours.

    Args:
        group_seed: seed derived from the run's seed and the group.
        count: number of rollouts.
        opponents: pairs per rollout; None for all pairs. If both numbers are odd, every rollout gets one more.

    Returns:
        `count * opponents / 2` pairs of rollout indices.

    >>> len(draw_pairs(0, 8, None)), len(draw_pairs(0, 8, 2)), len(draw_pairs(0, 5, 3)), draw_pairs(0, 1, None)
    (28, 8, 10, [])
    """
    wanted = count - 1 if opponents is None else min(opponents, count - 1)
    wanted += wanted * count % 2
    order = shown_order(group_seed, count)
    pairs = [
        (order[place], order[(place + distance) % count])
        for distance in range(1, wanted // 2 + 1)
        for place in range(count)
    ]
    if wanted % 2:
        pairs += [(order[place], order[place + count // 2]) for place in range(count // 2)]
    return pairs


class PairResults(NamedTuple):
    """Results of the pairs of one rollout."""

    points: dict[int, float]
    """Per opponent, 1 for a win, 0 for a loss: the mean of both orders."""
    consistency: float
    """Share of its pairs with the same result in both orders; 1 without a pair."""

    @property
    def win_rate(self) -> float:
        """Mean of the points, from 0 to 1; 0.5 without a pair."""
        return sum(self.points.values()) / len(self.points) if self.points else 0.5


def pair_results(count: int, points: Mapping[tuple[int, int], tuple[float, float]]) -> list[PairResults]:
    """Combine the results of pairs that were shown in both orders.

    A judge who prefers a position gives both rollouts of a pair 0.5.

    Args:
        count: number of rollouts.
        points: per pair, the points of its first rollout when shown first, and when shown second.

    Returns:
        One entry per rollout.

    >>> results = pair_results(3, {(0, 1): (1.0, 1.0), (1, 2): (1.0, 0.0), (2, 0): (0.0, 0.5)})
    >>> [result.win_rate for result in results]
    [0.875, 0.25, 0.375]
    """
    means: list[dict[int, float]] = [{} for _ in range(count)]
    consistent = [0] * count
    for (first, second), (shown_first, shown_second) in points.items():
        means[first][second] = (shown_first + shown_second) / 2
        means[second][first] = 1 - means[first][second]
        consistent[first] += shown_first == shown_second
        consistent[second] += shown_first == shown_second
    return [
        PairResults(by_opponent, equal / len(by_opponent) if by_opponent else 1.0)
        for by_opponent, equal in zip(means, consistent, strict=True)
    ]


def _last_line(text: str, kind: str) -> str:
    """Return the text after the last `Kind:` at the start of a line, without punctuation at its end."""
    following = ""
    for line in reversed(text.split("\n")):
        match = _KIND.match(line)
        if match is not None and match[1].lower() == kind:
            value = line[match.end() :].strip() or following
            # Not `re.sub(r"\W*$")`, whose time is quadratic.
            end = next((place for place in range(len(value), 0, -1) if _is_word(value[place - 1])), 0)
            return value[:end]
        following = line.strip() or following
    raise _unreadable(f"no line `{kind.capitalize()}: ...` in {text[-200:]!r}")


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a verdict is, or with which it ends in a code block; None if there is none."""
    text = text.strip()
    if text.endswith("```") and (start := text.rfind("```", 0, -3)) >= 0:
        block = text[start + 3 : -3]
        text = block[max(block.find("{"), 0) :].strip()
    if not text.startswith("{"):
        return None
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, strict=False)
    except (ValueError, RecursionError):
        return None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _unreadable("the JSON object repeats a key")
    return values


def _member(values: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a key in any case."""
    return next((value for key, value in values.items() if key.lower() == name), default)


def _unreadable(problem: str) -> RetryableError:
    return RetryableError(RewardFailure.INVALID_ANSWER, problem)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
