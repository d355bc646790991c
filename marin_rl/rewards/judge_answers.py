# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Answers of an LLM judge as scores: numbers, named criteria, comparisons of a group and of pairs."""

import dataclasses
import enum
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from marin_rl.rewards.component import check_component
from marin_rl.rewards.functions import RewardCallError, RewardFailure
from marin_rl.seeds import derive_seed

_LINE = re.compile(r"^\W*(scores|ranking|winner)\W*[:=]\s*(.*?)\W*$", re.IGNORECASE | re.MULTILINE)
_OF = re.compile(r"[\s*_`\"')\]]*(?:/|out of)[\s*_`]*(\d+(?:\.\d+)?)", re.IGNORECASE)
"""The highest score, as in `0.8/1` and `8 out of 10`."""
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


def read_score(answer: str, pattern: str, valid: ScoreRange) -> float:
    """Read the score of one rollout: group 1 of the last match of a pattern.

    Raises:
        RetryableError: if there is no match, it is not a number in the range, or `/` follows with another number than
            the highest score.

    >>> read_score("Score: 0.8/1", r"Score: ([0-9.]+)", ScoreRange(0.0, 1.0))
    0.8
    """
    match = deque(re.finditer(pattern, answer), 1)
    score = _number(match[0][1]) if match else None
    if score is None:
        raise _unreadable(f"no score in {answer[-200:]!r}")
    if (of := _OF.match(answer, match[0].end(1))) and float(of[1]) != valid.highest:
        raise _unreadable(f"score {score} is one of {of[1]}, but the highest score is {valid.highest}")
    valid.check(score)
    return score


def read_criteria(answer: str, names: Sequence[str], valid: ScoreRange) -> dict[str, float]:
    r"""Read one score per criterion from the last line `Scores: NAME=0.5, NAME=1`, also as a JSON object.

    Args:
        answer: the judge's answer.
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
    line = _last_line(answer, "scores")
    scores: dict[str, float] = {}
    for part in line.split(","):
        name, _, text = (piece.strip(_QUOTES) for piece in part.replace(":", "=").partition("="))
        score = _number(text)
        if score is None:
            raise _unreadable(f"{part.strip()[:100]!r} is not `criterion=score`")
        if name not in names:
            raise _unreadable(f"{name[:100]!r} is not a criterion; the criteria are {', '.join(names)}")
        if name in scores:
            raise _unreadable(f"criterion {name!r} is repeated")
        valid.check(score, f"score of {name!r}")
        scores[name] = score
    if missing := [name for name in names if name not in scores]:
        raise _unreadable(f"no score for {', '.join(missing)} in {line[:200]!r}")
    return {name: scores[name] for name in names}


def read_comparison(answer: str, count: int, comparison: JudgeComparison, valid: ScoreRange) -> list[float]:
    """Read the scores of a group from the last line `Scores: ...` or `Ranking: ...`.

    Args:
        answer: the judge's answer.
        count: number of rollouts shown.
        comparison: `SCORES` or `RANKING`.
        valid: the valid scores.

    Returns:
        One score per rollout, in the order shown.

    Raises:
        RetryableError: if there is no such line, it does not have `count` numbers, a score is out of range, or the
            ranking is not a permutation.
    """
    line = _last_line(answer, comparison.value)
    numbers = [_number(part) for part in _SEPARATORS.split(line.lstrip("[(*` \t"))]
    values = [number for number in numbers if number is not None]
    if len(values) != len(numbers) or len(values) != count:
        raise _unreadable(f"{line[:200]!r} is not {count} numbers")
    if comparison is JudgeComparison.SCORES:
        for score in values:
            valid.check(score)
        return values
    if sorted(values) != list(range(1, count + 1)):
        raise _unreadable(f"{line[:200]!r} does not rank each of 1 to {count} once")
    ranks = {int(number): rank for rank, number in enumerate(values)}
    step = (valid.highest - valid.lowest) / max(count - 1, 1)
    return [valid.highest - ranks[number] * step for number in range(1, count + 1)]


def read_winner(answer: str) -> float:
    """Read the points of rollout A from the last line `Winner: A`, `Winner: B` or `Winner: tie`.

    Returns:
        1 if A wins, 0 if B wins, 0.5 for a tie.

    Raises:
        RetryableError: if there is no such line, or it names something else.
    """
    line = _last_line(answer, "winner")
    points = _POINTS.get(line.strip(_QUOTES).lower())
    if points is None:
        raise _unreadable(f"the winner is {line[:100]!r}, expected A, B or tie")
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


def _last_line(answer: str, kind: str) -> str:
    """Return the text after the last `Kind:`."""
    lines = [match[2] for match in _LINE.finditer(answer) if match[1].lower() == kind]
    if not lines:
        raise _unreadable(f"no line `{kind.capitalize()}: ...` in {answer[-200:]!r}")
    return lines[-1]


def _unreadable(problem: str) -> RetryableError:
    return RetryableError(RewardFailure.INVALID_ANSWER, problem)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
