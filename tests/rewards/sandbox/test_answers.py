# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parsing of answers that hostile processes may have written."""

import pytest

from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardFailure
from marin_rl.rewards.sandbox.answers import shared_results, validated

GOOD = '{"results": [{"score": 1}]}'
RAISED = '{"raised": "ValueError: no"}'
MEMORY = '{"memory": true}'
ENDED = '{"own_process": "it is slow"}'
ONE = EvaluateResult(score=1.0)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([GOOD, GOOD, GOOD], ([ONE, ONE, ONE], None)),
        ([GOOD, RAISED, GOOD], ([ONE, None, ONE], None)),
        ([MEMORY, GOOD, GOOD], ([None, ONE, ONE], None)),
        ([GOOD, "nonsense", GOOD], ([ONE, None, ONE], None)),
        ([GOOD, '{"results": [{"score": 1}, {"score": 1}]}', GOOD], ([ONE, None, ONE], None)),
        ([GOOD, '{"results": [{"score": 1e31}]}', GOOD], ([ONE, None, ONE], None)),
        ([GOOD, ENDED], ([ONE, None, None], "it is slow")),
        ([ENDED], ([None, None, None], "it is slow")),
        ([GOOD, GOOD, GOOD, ENDED], ([ONE, ONE, ONE], "it is slow")),
        ([], ([None, None, None], None)),
        # Lines are missing, or were added.
        ([GOOD, GOOD], ([None, None, None], None)),
        ([GOOD, GOOD, GOOD, GOOD], ([None, None, None], None)),
        ([GOOD, GOOD, GOOD, GOOD, ENDED], ([None, None, None], None)),
        ([GOOD, ENDED, GOOD], ([ONE, None, ONE], None)),
    ],
)
def test_lines_of_several_calls(lines: list[str], expected: object):
    assert shared_results("".join(f"{line}\n" for line in lines), 3) == expected


@pytest.mark.parametrize("text", [f"{GOOD}\n{GOOD}\n{GOOD}", f"{GOOD}\n{GOOD}\n{GOOD}\nmore", "\n\n", "more"])
def test_incomplete_lines(text: str):
    assert shared_results(text, 3) == ([None, None, None], None)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ("", RewardFailure.EXITED),
        ("nonsense", RewardFailure.INVALID_ANSWER),
        (RAISED, RewardFailure.RAISED),
        (MEMORY, RewardFailure.MEMORY),
        (ENDED, RewardFailure.INVALID_ANSWER),
        (f"{GOOD}\n{GOOD}", RewardFailure.INVALID_ANSWER),
    ],
)
def test_answer_of_a_call(answer: str, cause: RewardFailure):
    with pytest.raises(RewardCallError) as raised:
        validated(answer, 1)
    assert raised.value.cause is cause


def test_valid_answer_of_a_call():
    assert validated(GOOD, 1) == [ONE]
