# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import statistics
from collections.abc import Mapping

import pytest

from marin_rl.metrics import Reduction, merge_all
from marin_rl.rollouts.rollout_metrics import is_correct, rollout_metrics, staleness_metrics
from marin_rl.types import Generation, RewardResult, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn

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
    found = status or (RolloutStatus.COMPLETED if rewards else RolloutStatus.FAILED)
    return Rollout("r", "g", TASK, turns, found, rewards, None if rewards else "ValueError: no")


def metrics(*groups: list[Rollout], version: int = 5) -> dict[str, float]:
    whole = [RolloutGroup("g", group) for group in groups]
    made = rollout_metrics(whole) | staleness_metrics(whole, version)
    return {name: metric.value for name, metric in made.items()}


GOOD, BAD, FAILED = rollout({"correct": 1.0}), rollout({"correct": 0.0}), rollout({})


def test_scores_are_means_over_rollouts_not_over_groups():
    found = metrics([GOOD], [BAD, BAD, BAD])
    assert found["objective/scores"] == found["train/rewards"] == found["train/correct_rewards"] == 0.25


def test_components_have_mean_and_unbiased_standard_deviation():
    rewards = [{"correct": 1.0, "format": 0.5}, {"correct": 0.0, "format": 0.5}, {"correct": 0.5, "format": 0.0}]
    found = metrics([rollout(reward) for reward in rewards])
    assert found["reward/correct/mean"] == 0.5
    assert found["reward/correct/std"] == statistics.stdev([1.0, 0.0, 0.5])
    assert found["reward/format/mean"] == found["train/format_rewards"] == pytest.approx(1 / 3)
    assert found["objective/scores"] == pytest.approx(2.5 / 3)


def test_a_component_counts_where_it_is_given():
    found = metrics([rollout({"correct": 1.0, "style": 3.0}), BAD])
    assert (found["reward/style/mean"], found["reward/style/std"]) == (3.0, 0.0)
    assert "train/style_rewards" not in found


def test_shares_of_groups():
    mixed, all_good, all_bad = [GOOD, BAD], [GOOD, GOOD], [BAD, BAD]
    found = metrics(mixed, all_good, all_bad, all_bad)
    assert found["groups/zero_spread_share"] == 0.75
    assert found["groups/all_good_share"] == 0.25
    assert found["groups/all_bad_share"] == 0.5


def test_spread_is_about_returns_and_goodness_about_correctness():
    found = metrics([rollout({"correct": 1.0, "format": 0.5}), rollout({"correct": 1.0, "format": 0.0})])
    assert (found["groups/zero_spread_share"], found["groups/all_good_share"]) == (0.0, 1.0)


def test_failed_rollouts_count_as_failed_and_nowhere_else():
    with_failed = metrics([GOOD, FAILED, BAD], [rollout({}, lengths=(), version=0)])
    without = metrics([GOOD, BAD])
    assert with_failed.pop("rollouts/failed") == 2.0
    assert without.pop("rollouts/failed") == 0.0
    assert with_failed.pop("rollouts/truncated_share") == 0.0
    without.pop("rollouts/truncated_share")
    assert with_failed == without


def test_truncated_share_is_of_all_rollouts():
    cut = rollout({"correct": 0.0}, status=RolloutStatus.TRUNCATED, stop=StopReason.LENGTH)
    found = metrics([GOOD, cut, FAILED, FAILED])
    assert found["rollouts/truncated_share"] == 0.25
    assert found["val/num_eos_tokens"] == 1.0


def test_lengths_and_turns():
    found = metrics([rollout({"correct": 1.0}, lengths=(1, 2, 3)), rollout({"correct": 0.0}, lengths=(4,))])
    assert found["train/output_length"] == 5.0
    assert found["rollouts/turns"] == 2.0
    assert found["val/num_eos_tokens"] == 4.0


def test_staleness_counts_updates_since_the_first_token():
    old, new = rollout({"correct": 1.0}, version=3), rollout({"correct": 1.0}, lengths=(1, 1), version=6)
    found = metrics([old, new], version=7)
    assert (found["staleness/min"], found["staleness/max"]) == (1.0, 4.0)
    assert found["staleness/mean"] == 2.0


def test_staleness_needs_a_graded_rollout():
    assert staleness_metrics([], 5) == staleness_metrics([RolloutGroup("g", [FAILED])], 5) == {}


def test_generations_of_several_versions_are_counted():
    made = rollout({"correct": 1.0}, lengths=(1, 1, 1), version=3)
    generation = dataclasses.replace(made.turns[1].generation, last_version=5)
    turns = (made.turns[0], dataclasses.replace(made.turns[1], generation=generation), made.turns[2])
    found = metrics([dataclasses.replace(made, turns=turns), rollout({"correct": 1.0}, version=6)], version=7)
    assert found["staleness/mixed_share"] == 0.25
    assert (found["staleness/min"], found["staleness/max"]) == (1.0, 4.0)


def test_metrics_of_two_halves_merge_into_those_of_the_whole():
    halves = [[GOOD, BAD, BAD], [GOOD, rollout({"correct": 1.0}, lengths=(7,), version=2)]]
    groups = [RolloutGroup("g", half) for half in halves]
    whole = rollout_metrics(groups) | staleness_metrics(groups, 5)
    merged = merge_all(rollout_metrics([group]) | staleness_metrics([group], 5) for group in groups)
    for name, metric in whole.items():
        if not name.endswith("/std"):
            assert merged[name].value == pytest.approx(metric.value), name
    assert whole["staleness/max"].reduction is Reduction.MAX
    assert whole["val/num_eos_tokens"].reduction is Reduction.SUM


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({"correct": 1.0}, True),
        ({"correct": 0.9}, False),
        ({"correct": 0.0, "format": 5.0}, False),
        ({"correct": 1.0, "format": -5.0}, True),
        ({"won": 0.1}, True),
        ({"won": 1.0, "cost": -1.0}, False),
        ({}, False),
    ],
)
def test_what_counts_as_correct(rewards: dict[str, float], expected: bool):
    assert is_correct(rollout(rewards)) is expected


@pytest.mark.parametrize(
    ("rewards", "measured", "expected"),
    [
        ({"game": -20.0}, {"success": 1.0}, True),
        ({"game": 3.0}, {"success": 0.0}, False),
        ({"correct": 1.0}, {"success": 0.0}, True),
        ({"game": 3.0}, {"moves": 0.0}, True),
        ({}, {"success": 1.0}, False),
    ],
)
def test_an_environment_may_measure_success(rewards: dict[str, float], measured: dict[str, float], expected: bool):
    assert is_correct(dataclasses.replace(rollout(rewards), metrics=measured)) is expected


def test_each_way_to_end_without_a_reward_is_counted_on_its_own():
    late = rollout({}, status=RolloutStatus.TIMED_OUT)
    aborted = rollout({}, status=RolloutStatus.ABORTED)
    found = metrics([GOOD, FAILED, late, late, *[aborted] * 3])
    assert [found[f"rollouts/{name}"] for name in ("failed", "timed_out", "aborted")] == [1.0, 2.0, 3.0]
    assert found["objective/scores"] == 1.0


@pytest.mark.parametrize(("weight", "score", "expected"), [(0.5, 1.0, True), (2.0, 0.5, False), (-1.0, 1.0, True)])
def test_the_weight_of_a_function_called_correct_changes_nothing_about_what_is(
    weight: float, score: float, expected: bool
):
    judged = RewardResult("correct", weight=weight, score=score)
    assert is_correct(dataclasses.replace(rollout({"correct": weight * score}), evaluations=(judged,))) is expected
