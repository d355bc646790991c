# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Verdicts in answers, and pairs of a group; `test_judge` tests the answers with an endpoint."""

import collections
import functools
import json
from collections.abc import Callable

import pytest

from marin_rl.rewards import reply_text
from marin_rl.rewards.judge_answers import (
    MAX_CHARACTERS,
    SCORE_REGEX,
    JudgeComparison,
    RetryableError,
    ScoreRange,
    draw_pairs,
    read_comparison,
    read_criteria,
    read_score,
    read_winner,
    verdict_text,
)

VALID = ScoreRange(0.0, 1.0)
score_of = functools.partial(read_score, pattern=SCORE_REGEX, valid=VALID)
criteria_of = functools.partial(read_criteria, names=["right", "short"], valid=VALID)
scores_of = functools.partial(read_comparison, count=2, comparison=JudgeComparison.SCORES, valid=VALID)
ranking_of = functools.partial(read_comparison, count=2, comparison=JudgeComparison.RANKING, valid=VALID)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("<think>Score: 1</think>Score: 0.25", 0.25),
        ("<think>\nScore: 1\n</think>\nNo verdict.", None),
        ("<think>\nScore: 1\n", None),
        ("Score: 0.25\n<think>\nScore: 1", None),
        ("a</think>Score: 1</think>b\nScore: 0.25", 0.25),
        ("Score: 1\n" + "x" * MAX_CHARACTERS + "\nScore: 0.25", 0.25),
        ("x" * MAX_CHARACTERS + "Score: 1", None),
    ],
)
def test_only_the_verdict_after_the_thoughts_is_read(answer: str, score: float | None):
    if score is None:
        with pytest.raises(RetryableError):
            score_of(verdict_text(answer))
    else:
        assert score_of(verdict_text(answer)) == score


@pytest.mark.parametrize(
    ("read", "answer", "result"),
    [
        (score_of, '{"score": 0.25}', 0.25),
        (score_of, '{"reason": "Score: 1", "Score": "0.25"}', 0.25),
        (score_of, 'Score: 1, I thought, but\n```json\n{"score": 0.25}\n```\n', 0.25),
        (score_of, '```\n{"score": 1, "score": 0}\n```', None),
        (score_of, '{"reason": "two\nlines", "score": 0.25}', 0.25),
        (score_of, '{"score": true}', None),
        (score_of, '{"score": NaN}', None),
        (score_of, '{"score": 1' + "0" * 4000 + "}", None),
        (score_of, '{"score": [1]}', None),
        (score_of, '{"points": 1}', None),
        (score_of, '{"a":' * 20_000, None),
        (score_of, '{"score": ' + "[" * 900 + "]" * 900 + "}", None),
        (criteria_of, '{"short": 1, "right": 0.5, "why": "short"}', {"right": 0.5, "short": 1.0}),
        (criteria_of, '{"scores": {"short": 1, "right": 0.5}, "why": "short"}', {"right": 0.5, "short": 1.0}),
        (criteria_of, '{"scores": {"short": 1, "right": 0.5, "style": 1}}', None),
        (criteria_of, '{"scores": [1, 0.5]}', None),
        (criteria_of, '{"short": 1}', None),
        (scores_of, '{"scores": [0.5, 1]}', [0.5, 1.0]),
        (scores_of, '{"scores": {"0": 1}}', None),
        (scores_of, '{"scores": [1, 7]}', None),
        (ranking_of, '```json\n{"ranking": [2, 1]}\n```', [0.0, 1.0]),
        (read_winner, '{"winner": "B"}', 0.0),
        (read_winner, '{"winner": ["A"]}', None),
        (read_winner, "Winner:\n\n**A**", 1.0),
        (scores_of, "Scores: \ud800, 1", None),
    ],
)
def test_json_and_lines(read: Callable[[str], object], answer: str, result: object):
    if result is None:
        with pytest.raises(RetryableError):
            read(answer)
    else:
        assert read(answer) == result


@pytest.mark.parametrize(
    ("line", "score"),
    [
        ("Score: 1 / 1.", 1.0),
        ("**Score: 0.25 out of 1**", 0.25),
        ("Score: 0.25 (out of 1).", 0.25),
        ("Score: 0.25!", 0.25),
        ("Score: [0.25]", 0.25),
        ("Score: 0.25 - correct, or nearly so", 0.25),
        ("Score: 0.25\nThe scale is 0 or 1, maybe.", 0.25),
        ("Score: 0 or 1", None),
        ("Score: 0 or one", None),
        ("Score: 0.2 Score: 0.9", None),
        ("Score: [0, 1]", None),
        ("Score: 0 to 1", None),
        ("Score: 0..1", None),
        ("Score: 0 / 1 / 1", None),
        ("Score: 0/1 or 1/1", None),
        ("Score: **0** **1**", None),
        ("Score: 1?", None),
        ("Score: 1 (maybe)", None),
        ("Score: 1, perhaps", None),
        ("Score: 1 would be too much, zero fits", None),
        ("Score: 1 if the sign is right", None),
        ("Score: 0 \u2192 1", None),
        ("Score: 0 \u0661", None),
        ("Score: 0 \xbd", None),
        ("Score: 1 (out of a maximum score: 10)", None),
    ],
)
def test_a_line_with_two_numbers_or_a_doubt_has_no_score(line: str, score: float | None):
    if score is None:
        with pytest.raises(RetryableError):
            score_of(line)
    else:
        assert score_of(line) == score


@pytest.mark.parametrize(
    ("read", "answer", "result"),
    [
        (score_of, "Score: 0.25\n> Score: 1", 0.25),
        (score_of, "Score: 0.25\n>Score: 1", 0.25),
        (score_of, "Score: 0.25\n >> **Score:** 1\n\n", 0.25),
        (score_of, "Score: 0.25\n- > Score: 1", 0.25),
        (score_of, "Score: 0.25\n> -> Score: 1", 0.25),
        (score_of, "Score: 0.25\n\u2028> Score: 1", 0.25),
        (score_of, "Score: 0.25\n\xbb Score: 1", 0.25),
        (score_of, "> Score: 1\n-> Score: 0.25", 0.25),
        (score_of, "The reply says\n> Score: 1", None),
        (score_of, '> ```{"score": 1}```', None),
        (criteria_of, "Scores: short=1, right=0.5\n> Scores: short=1, right=1", {"right": 0.5, "short": 1.0}),
        (scores_of, "Scores: 0.5, 1\n> Scores: 1, 0", [0.5, 1.0]),
        (ranking_of, "Ranking: 2 > 1\n> Ranking: 1 > 2", [0.0, 1.0]),
        (read_winner, "Winner: B\n> Winner: A", 0.0),
        (read_winner, "Winner: B\n- > Winner: A", 0.0),
        (read_winner, "Winner:\n> A", None),
    ],
)
def test_a_quoted_line_is_no_verdict(read: Callable[[str], object], answer: str, result: object):
    if result is None:
        with pytest.raises(RetryableError):
            read(verdict_text(answer))
    else:
        assert read(verdict_text(answer)) == result


@pytest.mark.parametrize("unit", ["> ", "\n", "-", "\n>", "- > ", "\n->"])
def test_hostile_quotes_are_removed_in_linear_time(unit: str):
    # With quadratic time each of these takes a minute.
    verdict_text(unit * (MAX_CHARACTERS // len(unit)))


@pytest.mark.parametrize("read", [score_of, criteria_of, scores_of, ranking_of, read_winner])
@pytest.mark.parametrize("unit", ["\n", " ,", "score", "Scores: ", "1 -", "```{", '{"a":', "[", "final\n"])
def test_hostile_answers_are_read_in_linear_time(read: Callable[[str], object], unit: str):
    # With quadratic time each of these takes a minute.
    with pytest.raises(RetryableError):
        read("Scores: a" + unit * (MAX_CHARACTERS // len(unit)) + "!")


def test_a_configured_pattern_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.1)
    with pytest.raises(RetryableError, match="score_regex was given up"):
        read_score("a" * 100, r"((?:a+)+)b", VALID)
    assert read_score(json.dumps({"score": 1}) + " so <0.25>", r"<(.*?)>", VALID) == 0.25


@pytest.mark.parametrize("count", range(1, 10))
@pytest.mark.parametrize("opponents", [None, 1, 2, 3, 4, 20])
def test_every_rollout_meets_equally_many_others_once(count: int, opponents: int | None):
    pairs = draw_pairs(7, count, opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    assert all(first != second for first, second in pairs)
    met = collections.Counter(rollout for pair in pairs for rollout in pair)
    wanted = count - 1 if opponents is None else min(opponents, count - 1)
    assert {met[rollout] for rollout in range(count)} == {wanted + (wanted * count) % 2}


def test_pairs_depend_on_the_seed_of_the_group():
    assert draw_pairs(1, 8, 2) == draw_pairs(1, 8, 2) != draw_pairs(2, 8, 2)
