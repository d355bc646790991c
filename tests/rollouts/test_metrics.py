# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import logging
import statistics
from collections.abc import Mapping

import pytest

from marin_rl.environments.base import Split
from marin_rl.rollouts.metrics import (
    FailureReports,
    environment_metrics,
    is_correct,
    reward_metrics,
    rollout_metrics,
    staleness_metrics,
)
from marin_rl.types import (
    Generation,
    RewardResult,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    TurnReward,
)
from tests.environments.fake_environments import Cards
from tests.environments.fake_environments import group as group_of
from tests.environments.fake_environments import rollout as rollout_of
from tests.rollouts.rollout_cases import turn_of

TASK = Task("t", "sums", ({"role": "user", "content": "2+3="},), "5")


def rollout(
    rewards: Mapping[str, float],
    *,
    lengths: tuple[int, ...] = (2,),
    status: RolloutStatus | None = None,
    stop: StopReason = StopReason.STOP,
    version: int = 5,
) -> Rollout:
    turns = tuple(
        Turn(
            (1, 2),
            Generation((3,) * length, (-1.0,) * length, stop, version, version),
            (),
            {"correct": 0.0},
            starts_sequence=index == 0,
        )
        for index, length in enumerate(lengths)
    )
    final_status = status or (RolloutStatus.COMPLETED if rewards else RolloutStatus.FAILED)
    return Rollout("r", "g", TASK, turns, final_status, rewards, None if rewards else "ValueError: no")


def metrics(*groups: list[Rollout], version: int = 5) -> dict[str, float]:
    whole = [RolloutGroup("g", group) for group in groups]
    return rollout_metrics(whole) | staleness_metrics(whole, version)


GOOD, BAD, FAILED = rollout({"correct": 1.0}), rollout({"correct": 0.0}), rollout({})


def test_components_have_mean_and_unbiased_standard_deviation():
    rewards = [{"correct": 1.0, "format": 0.5}, {"correct": 0.0, "format": 0.5}, {"correct": 0.5, "format": 0.0}]
    values = metrics([rollout(reward) for reward in rewards])
    assert values["reward/correct/mean"] == 0.5
    assert values["reward/correct/std"] == statistics.stdev([1.0, 0.0, 0.5])
    assert values["reward/format/mean"] == values["train/format_rewards"] == pytest.approx(1 / 3)
    assert values["objective/scores"] == pytest.approx(2.5 / 3)


def test_shares_of_groups():
    mixed, all_good, all_bad = [GOOD, BAD], [GOOD, GOOD], [BAD, BAD]
    values = metrics(mixed, all_good, all_bad, all_bad)
    assert values["objective/scores"] == values["train/rewards"] == values["train/correct_rewards"] == 0.375
    assert values["groups/zero_spread_share"] == 0.75
    assert values["groups/all_good_share"] == 0.25
    assert values["groups/all_bad_share"] == 0.5


def test_spread_uses_returns_and_good_uses_correctness():
    values = metrics([rollout({"correct": 1.0, "format": 0.5}), rollout({"correct": 1.0, "format": 0.0})])
    assert (values["groups/zero_spread_share"], values["groups/all_good_share"]) == (0.0, 1.0)


def test_failed_rollouts_count_only_as_failed():
    with_failed = metrics([GOOD, FAILED, BAD], [rollout({}, lengths=(), version=0)])
    without = metrics([GOOD, BAD])
    assert with_failed.pop("rollouts/failed") == 2.0
    assert without.pop("rollouts/failed") == 0.0
    assert with_failed.pop("rollouts/truncated_share") == 0.0
    without.pop("rollouts/truncated_share")
    assert with_failed == without


def test_truncated_share_is_of_all_rollouts():
    cut = rollout({"correct": 0.0}, status=RolloutStatus.TRUNCATED, stop=StopReason.LENGTH)
    values = metrics([GOOD, cut, FAILED, FAILED])
    assert values["rollouts/truncated_share"] == 0.25
    assert values["val/num_eos_tokens"] == 1.0
    values = metrics([rollout({"correct": 1.0, "style": 3.0}, lengths=(1, 2, 3)), rollout(BAD.rewards, lengths=(4,))])
    assert (values["train/output_length"], values["rollouts/turns"], values["val/num_eos_tokens"]) == (5.0, 2.0, 4.0)
    assert (values["reward/style/mean"], values["reward/style/std"]) == (3.0, 0.0)


def test_generations_of_several_versions_are_counted():
    mixed = rollout({"correct": 1.0}, lengths=(1, 1, 1), version=3)
    generation = dataclasses.replace(mixed.turns[1].generation, last_version=5)
    turns = (mixed.turns[0], dataclasses.replace(mixed.turns[1], generation=generation), mixed.turns[2])
    values = metrics([dataclasses.replace(mixed, turns=turns), rollout({"correct": 1.0}, version=6)], version=7)
    assert values["staleness/mixed_share"] == 0.25
    assert (values["staleness/min"], values["staleness/mean"], values["staleness/max"]) == (1.0, 3.25, 4.0)
    assert staleness_metrics([RolloutGroup("g", [FAILED])], 5) == {}


@pytest.mark.parametrize(
    ("rewards", "measured", "expected"),
    [
        ({"game": -20.0}, {"success": 1.0}, True),
        ({"game": 3.0}, {"success": 0.0}, False),
        ({"correct": 1.0}, {"success": 0.0}, True),
        ({}, {"success": 1.0}, False),
        ({"correct": 1.0}, {}, True),
        ({"correct": 0.9}, {}, False),
        ({"correct": 0.0, "format": 5.0}, {}, False),
        ({"won": 0.1}, {}, True),
        ({"won": 1.0, "cost": -1.0}, {"moves": 0.0}, False),
    ],
)
def test_is_correct(rewards: dict[str, float], measured: dict[str, float], expected: bool):
    assert is_correct(dataclasses.replace(rollout(rewards), metrics=measured)) is expected
    # The score counts, not its product with the weight.
    result = RewardResult("correct", weight=0.5, score=1.0)
    assert is_correct(dataclasses.replace(rollout({"correct": 0.5}), evaluations=(result,)))


def test_each_ungraded_status_is_counted_separately():
    late = rollout({}, status=RolloutStatus.TIMED_OUT)
    aborted = rollout({}, status=RolloutStatus.ABORTED)
    values = metrics([GOOD, FAILED, late, late, *[aborted] * 3])
    assert [values[f"rollouts/{name}"] for name in ("failed", "timed_out", "aborted")] == [1.0, 2.0, 3.0]
    assert values["objective/scores"] == 1.0


# --- metrics per environment ---


def task(name: str) -> Task:
    return Cards(name).tasks(Split.TRAIN)[0]


def per_environment(groups: list[RolloutGroup], *parts: str) -> dict[str, float]:
    return environment_metrics(groups, parts)


def test_parts_have_separate_metrics():
    games = RolloutGroup(
        "g", (rollout_of(task("a"), turns=3, correct=1.0, game=0.5), rollout_of(task("a"), correct=0.0))
    )
    metrics = per_environment(
        [games, group_of(task("b"), 1.0), RolloutGroup("g", (rollout_of(task("b")),))], "a", "b", "c"
    )
    assert metrics == pytest.approx(
        {
            "environments/a/share": 0.5,
            "environments/a/reward": 0.75,
            "environments/a/correct": 0.5,
            "environments/a/turns": 2.0,
            # One of its two rollouts failed and counts only in the share.
            "environments/b/share": 0.5,
            "environments/b/reward": 1.0,
            "environments/b/correct": 1.0,
            "environments/b/turns": 1.0,
            "environments/c/share": 0.0,
        }
    )


def test_environment_metrics_are_averaged_over_rollouts_that_have_them():
    rollouts = (
        rollout_of(task("a"), measured={"steps": 4.0, "success": 1.0}, correct=1.0),
        rollout_of(task("a"), measured={"steps": 2.0}, correct=0.0),
        rollout_of(task("a"), measured={"steps": 90.0}),
    )
    assert per_environment([RolloutGroup("g", rollouts)]) == {"measured/a/steps": 3.0, "measured/a/success": 1.0}


# --- failures ---


def failed(number: int, error: str | None = None, failure: str | None = None) -> Rollout:
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


def group(good: int, *others: Rollout) -> RolloutGroup:
    return RolloutGroup("g", [*others, *(failed(index) for index in range(good))])


def raised(number: int) -> Rollout:
    return failed(number, f"reward 'correct': 'f' of f.py raised ValueError: {number}\n  f.py:{number}: x", "raised")


def test_each_kind_of_failure_is_reported_once_and_then_only_counted(caplog: pytest.LogCaptureFixture):
    reported: list[str] = []
    reports = FailureReports(reported.append)
    with caplog.at_level(logging.INFO):
        reports.add("step 1", [group(4)])
        assert (reported, caplog.messages) == ([], [])
        reports.add("step 2", [group(6, raised(7)), group(5, raised(8), failed(9, "OSError: no board"))])
        reports.add("step 3", [group(6, failed(1, "OSError: no dice"), raised(2))])
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


def test_metrics_are_means_over_rollouts_and_steps():
    steps = (TurnReward(0, 0.5, metrics={"moves": 1.0}), TurnReward(2, 0.0, metrics={"moves": 4.0}))
    reserved = {"length": 3.0, "score": 99.0, "failed_timeout": 99.0}
    correct = RewardResult("correct", weight=2.0, score=1.0, steps=steps, metrics=reserved)
    judge = RewardResult("judge", weight=1.0, score=None, error="no answer", failure="timeout")
    other = RewardResult("correct", weight=2.0, score=0.0, metrics={"length": 6.0})
    lost = RewardResult("correct", weight=2.0, score=None, error="no answer", failure="timeout")
    assert reward_metrics([correct, other, judge, lost]) == {
        "rewards/correct/score": 0.5,
        "rewards/correct/length": 4.5,
        "rewards/correct/moves": 2.5,
        "rewards/correct/failed_timeout": 1.0,
        "rewards/judge/failed_timeout": 1.0,
    }
