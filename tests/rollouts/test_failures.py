# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import logging

import pytest

from marin_rl.rollouts.failures import FailureReports
from marin_rl.types import RewardResult, Rollout, RolloutGroup, RolloutStatus
from tests.rollouts.rollout_cases import TASK, turn_of


def rollout(number: int, error: str | None = None, failure: str | None = None) -> Rollout:
    evaluations = (RewardResult("correct", 1.0, score=None, error=error, failure=failure),) if failure else ()
    return Rollout(
        id=f"r{number}",
        group_id="g",
        task=TASK,
        turns=() if error else (turn_of("2+3", "5"),),
        status=RolloutStatus.FAILED if error else RolloutStatus.COMPLETED,
        rewards={} if error else {"correct": 1.0},
        error=error,
        evaluations=evaluations,
    )


def group(good: int, *failed: Rollout) -> RolloutGroup:
    return RolloutGroup("g", [*failed, *(rollout(index) for index in range(good))])


def raised(number: int) -> Rollout:
    return rollout(number, f"reward 'correct': 'f' of f.py raised ValueError: {number}\n  f.py:{number}: x", "raised")


def test_each_kind_of_failure_is_reported_once_and_then_only_counted(caplog: pytest.LogCaptureFixture):
    reported: list[str] = []
    reports = FailureReports(reported.append)
    with caplog.at_level(logging.INFO):
        reports.add("step 1", [group(4)])
        assert (reported, caplog.messages) == ([], [])
        reports.add("step 2", [group(6, raised(7)), group(5, raised(8), rollout(9, "OSError: no board"))])
        reports.add("step 3", [group(6, rollout(1, "OSError: no dice"), raised(2))])
    assert reported == [
        "step 2: 2 of 14 rollouts failed and are not trained on, such as r7 of environment 'sums': reward 'correct': "
        "'f' of f.py raised ValueError: 7\n  f.py:7: x",
        "step 2: 1 of 14 rollouts failed and are not trained on, such as r9 of environment 'sums': OSError: no board",
    ]
    assert caplog.messages == [
        "step 3: 1 of 8 rollouts failed (environment 'sums': OSError)",
        "step 3: 1 of 8 rollouts failed (reward 'correct': raised)",
    ]


def test_a_known_kind_is_reported_again_when_most_rollouts_fail():
    reported: list[str] = []
    reports = FailureReports(reported.append)
    for step, good in enumerate([9, 8, 1, 1]):
        reports.add(f"step {step}", [group(good, raised(1), raised(2))])
    assert [message.split(",")[0] for message in reported] == [
        "step 0: 2 of 11 rollouts failed and are not trained on",
        "step 2: 2 of 3 rollouts failed and are not trained on",
    ]
