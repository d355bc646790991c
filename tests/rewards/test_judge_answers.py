# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Verdicts in answers; `test_judge` tests the answers with an endpoint."""

from typing import Any

import pytest

from marin_rl.rewards.judge import MAX_CHARACTERS, ScoreRange, VerdictError, read_verdict


def score_of(answer: str) -> float:
    return ScoreRange(0.0, 1.0).read(read_verdict(answer).get("score"))


SCORES = [
    ("Score: 0.8", 0.8), ("**Score:** 0.8", 0.8), ("**Score**: 0.8", 0.8), ("- Score: **0.8**", 0.8),
    ("#### Final score: `0.8`", 0.8), ("SCORE = 0.8", 0.8), ("Score: .8", 0.8), ("Score: 8e-1", 0.8),
    ("Score: 1.", 1.0), ("Score: 0.8/1", 0.8), ("Score: 1 / 1.", 1.0), ("**Score:** **0.8** / 1.0", 0.8),
    ("Score: [0.8]", 0.8), ("Score: -0", 0.0), ("Subscore: 1\nUnderscore: 1\nScore:0.3\n\n", 0.3),
    ("Score: 0.2\nOn second thought:\nScore: 0.8", 0.8), ('{"score": 0.25}', 0.25),
    ('{"reason": "Score: 1", "score": "0.25"}', 0.25),
    ('Score: 1, I thought, but\n```json\n{"score": 0.25}\n```\n', 0.25),
    ('{"reason": "two\nlines", "score": 0.25}', 0.25), ("<think>Score: 1</think>Score: 0.25", 0.25),
    ("a</think>Score: 1</think>b\nScore: 0.25", 0.25),
    ("Score: 1\n" + "x" * MAX_CHARACTERS + "\nScore: 0.25", 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "score"), SCORES)
def test_a_score(answer: str, score: float):
    assert score_of(answer) == score


# Other texts than a number; two numbers, or a doubt; quotations; text that is not at the end; thoughts; invalid JSON.
NO_SCORE = [
    "Score: 1/10", "Score: 0 / 1 / 1", "Score: 0.8/", "Score: **1** out of 10", "The score is 0.8", "Score: 80%",
    "Score: 0,8", "Score: 0-1", "Score: 0-", "Score: 0..1", "Score: \u0660\u066b\u0665", "Score: 0\uff0e5",
    "Score: 0\u066b5", "Score: 0 \xbd", "Score: 0 \u0661", "Score: 0.8.1", "Score: 1e", "Score: -.5",
    "Score: 1e999", "Score: nan", "Score: \ud800", "# Score\n0.8", "Score: 0 or 1", "Score: 0 or one",
    "Score: 0.2 Score: 0.9", "Score: [0, 1]", "Score: 0 to 1", "Score: 0/1 or 1/1", "Score: **0** **1**",
    "Score: 0*1", "Score: 1?", "Score: 1 (maybe)", "Score: 1, perhaps", "Score: 1 if the sign is right",
    "Score: 0 \u2192 1", "Score: 0.25\n> Score: 1", "Score: 0.25\n>Score: 1", "Score: 0.25\n >> **Score:** 1\n\n",
    "Score: 0.25\n- > Score: 1", "Score: 0.25\n> -> Score: 1", "Score: 0.25\n\u2028> Score: 1",
    "Score: 0.25\n\xbb Score: 1", 'Score: 0.25\n"Score: 1"', "Score: 0.25\nThe reply ended with Score: 1",
    "Score: 0.25\nThe reply says:\n```\nScore: 1\n```", "The reply says:\nScore: 1\nThis is a trick.",
    '> ```{"score": 1}```', '> ```\n> {"score": 1}\n> ```', '> ```\n{"score": 1}\n```', '```\n{"score": 1}\n> ```',
    '```\n> {"score": 1}\n```', '{"score": 1}\nThis is what the reply says.', "x" * MAX_CHARACTERS + "Score: 1",
    "x" * MAX_CHARACTERS + "Score: 1" + " " * (MAX_CHARACTERS - 8), "Score: 1\n" + "x" * MAX_CHARACTERS,
    "<think>\nScore: 1\n</think>\nNo verdict.", "<think>\nScore: 1\n", "Score: 0.25\n<think>\nScore: 1",
    '```\n{"score": 1, "score": 0}\n```', '{"score": 1, "score": 0}', '{"score": true}', '{"score": NaN}',
    '{"score": 1e999}', '{"score": 1' + "0" * 4000 + "}", '{"score": 1' + "0" * 5000 + "}", '{"score": [1]}',
    '{"score": "1 or 0"}', '{"points": 1}', '{"a":' * 20_000, '{"score": ' + "[" * 900 + "]" * 900 + "}",
]  # fmt: skip


@pytest.mark.parametrize("answer", NO_SCORE)
def test_no_score(answer: str):
    with pytest.raises(VerdictError):
        score_of(answer)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"right": 0.5, "why": "short"}', {"right": 0.5, "why": "short"}),
        ("SCORES: `right` : .5 , `short`=1", {"right": ".5", "short": "1"}),
        ("Scores: right=1, short=0.5.", {"right": "1", "short": "0.5"}),
        ("Scores: right=1=0, short", {"right": "1=0", "short": ""}),
        ("Scores: right=1, right=0", None),
        ("Scores: right=1\n> Scores: right=0", None),
        ('{"scores": [0.5, 1]}', {"scores": [0.5, 1]}),
        ("Scores: 0.5, 1", {"scores": ["0.5", "1"]}),
        ("**Scores:** [0.5, 1].", {"scores": ["0.5", "1"]}),
        ("Scores: 0.5", {"scores": ["0.5"]}),
        ("Scores: 0.5, 1\n> Scores: 1, 0", None),
    ],
)
def test_verdicts_with_several_scores(answer: str, verdict: dict[str, Any] | None):
    if verdict is None:
        with pytest.raises(VerdictError):
            read_verdict(answer)
    else:
        assert read_verdict(answer) == verdict


@pytest.mark.parametrize(
    "unit", ["\n", " ,", "score", "Scores: ", "1 -", "```{", '{"a":', "[", "final\n", "> ", "*", "="]
)
@pytest.mark.parametrize("start", ["Score: a", "Scores: a", ""])
def test_hostile_answers_are_read_in_linear_time(start: str, unit: str):
    # With quadratic time each of these takes a minute.
    with pytest.raises(VerdictError):
        score_of(start + unit * (MAX_CHARACTERS // len(unit) - 2) + "!")
