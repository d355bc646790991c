# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parsing of answers that hostile processes may have written."""

from typing import Any

import pytest

from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardFailure
from marin_rl.rewards.sandbox.answers import shared_results, validated

GOOD = '{"results": [{"score": 1}]}'
RAISED = '{"raised": "ValueError: no"}'
PAIR = '{"results": [{"score": 1}, {"score": 1}]}'
MEMORY = '{"memory": true}'


def ended(answers: int) -> str:
    return f'{{"own_process": "it is slow", "answers": {answers}}}'


def stopped(answers: int) -> str:
    return f'{{"stopped": true, "answers": {answers}}}'


ONE = EvaluateResult(score=1.0)


@pytest.mark.parametrize(
    ("lines", "results", "failure", "reason"),
    [
        ([GOOD, GOOD, GOOD], [ONE, ONE, ONE], None, None),
        ([GOOD, RAISED, MEMORY], [ONE, None, None], RewardFailure.RAISED, None),
        ([MEMORY, GOOD, GOOD], [None, ONE, ONE], RewardFailure.MEMORY, None),
        ([GOOD, "nonsense", GOOD], [ONE, None, ONE], RewardFailure.INVALID_ANSWER, None),
        ([GOOD, PAIR, GOOD], [ONE, None, ONE], RewardFailure.INVALID_ANSWER, None),
        ([GOOD, '{"results": [{"score": 1e31}]}', GOOD], [ONE, None, ONE], RewardFailure.INVALID_ANSWER, None),
        ([GOOD, ended(1), GOOD], [ONE, None, ONE], RewardFailure.INVALID_ANSWER, None),
        ([GOOD, ended(1)], [ONE, None, None], None, "it is slow"),
        ([GOOD, stopped(1)], [ONE, None, None], None, None),
        ([ended(0)], [None, None, None], None, "it is slow"),
        ([GOOD, GOOD, GOOD, ended(3)], [ONE, ONE, ONE], None, "it is slow"),
    ],
)
def test_lines_of_several_calls(
    lines: list[str], results: list[Any], failure: RewardFailure | None, reason: str | None
):
    found = shared_results("".join(f"{line}\n" for line in lines), 3)
    assert (found.results, found.failure and found.failure.cause, found.own_process) == (results, failure, reason)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "more",
        f"{GOOD}\n",
        f"{GOOD}\n{GOOD}\n",
        f"{GOOD}\n{GOOD}\n{GOOD}",
        f"{GOOD}\n{GOOD}\n{GOOD}\nmore",
        f"{GOOD}\n{GOOD}\n{GOOD}\n{GOOD}\n",
        f"{GOOD}\n{GOOD}\n{GOOD}\n{GOOD}\n{ended(4)}\n",
        # A call wrote a line, or a part of the lines is missing.
        f"{GOOD}\n{GOOD}\n{ended(1)}\n",
        f"{GOOD}\n{GOOD}\n{stopped(1)}\n",
        f"{GOOD}\n{ended(2)}\n",
        f"{ended(-1)}\n",
    ],
)
def test_lines_that_do_not_identify_their_calls(text: str):
    with pytest.raises(RewardCallError, match=r"invalid_answer: \d answers of 3 calls"):
        shared_results(text, 3)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("", RewardFailure.EXITED),
        ("nonsense", RewardFailure.INVALID_ANSWER),
        (RAISED, RewardFailure.RAISED),
        (MEMORY, RewardFailure.MEMORY),
        (ended(0), RewardFailure.INVALID_ANSWER),
        (stopped(0), RewardFailure.INVALID_ANSWER),
        (f"{GOOD}\n{GOOD}", RewardFailure.INVALID_ANSWER),
    ],
)
def test_answer_of_a_call(answer: str, cause: RewardFailure):
    with pytest.raises(RewardCallError) as raised:
        validated(answer, 1)
    assert raised.value.cause is cause


def test_valid_answer_of_a_call():
    assert validated(GOOD, 1) == [ONE]
