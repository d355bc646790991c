# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parsing of answers that hostile processes may have written."""

import json

import pytest

from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardFailure
from marin_rl.rewards.sandbox.answers import answers_of_calls, validated

GOOD = '{"results": [{"score": 1}]}'
RAISED = '{"raised": "ValueError: no"}'
INVALID = '{"invalid": "returned nan"}'
MEMORY = '{"memory": true}'
ONE = EvaluateResult(score=1.0)


@pytest.mark.parametrize("answers", [[], [GOOD], [GOOD, RAISED, "nonsense"]])
def test_answers_of_calls(answers: list[str]):
    assert answers_of_calls(json.dumps(answers), 3) == answers


@pytest.mark.parametrize("text", ["", "nonsense", GOOD, "[1]", "[null]", '["a", ["b"]]', '["a"] ["b"]', "[" * 10**5])
def test_invalid_answers_of_calls(text: str):
    with pytest.raises(RewardCallError, match="instead of a list of answers") as raised:
        answers_of_calls(text, 3)
    assert raised.value.cause is RewardFailure.INVALID_ANSWER


def test_more_answers_than_calls():
    with pytest.raises(RewardCallError, match="invalid_answer: sent 4 answers of 3 calls"):
        answers_of_calls(json.dumps([GOOD] * 4), 3)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("", RewardFailure.EXITED),
        ("nonsense", RewardFailure.INVALID_ANSWER),
        (RAISED, RewardFailure.RAISED),
        (INVALID, RewardFailure.INVALID_ANSWER),
        (MEMORY, RewardFailure.MEMORY),
        (f"{GOOD}\n{GOOD}", RewardFailure.INVALID_ANSWER),
    ],
)
def test_answer_of_a_call(answer: str, cause: RewardFailure):
    with pytest.raises(RewardCallError) as raised:
        validated(answer, 1)
    assert raised.value.cause is cause


def test_valid_answer_of_a_call():
    assert validated(GOOD, 1) == [ONE]
