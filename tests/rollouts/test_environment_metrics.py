# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.environments.base import Split
from marin_rl.rollouts.environment_metrics import environment_metrics
from marin_rl.types import RolloutGroup, Task
from tests.environments.fake_environments import Cards, group, rollout


def task(name: str) -> Task:
    return Cards(name).tasks(Split.TRAIN)[0]


def values(groups: list[RolloutGroup], *parts: str) -> dict[str, float]:
    return {name: metric.value for name, metric in environment_metrics(groups, parts).items()}


def test_parts_are_measured_apart():
    games = RolloutGroup("g", (rollout(task("a"), turns=3, correct=1.0, game=0.5), rollout(task("a"), correct=0.0)))
    found = values([games, group(task("b"), 1.0), RolloutGroup("g", (rollout(task("b")),))], "a", "b", "c")
    assert found == pytest.approx(
        {
            "environments/a/share": 0.5,
            "environments/a/reward": 0.75,
            "environments/a/correct": 0.5,
            "environments/a/turns": 2.0,
            # One of its two failed, and counts in the share alone.
            "environments/b/share": 0.5,
            "environments/b/reward": 1.0,
            "environments/b/correct": 1.0,
            "environments/b/turns": 1.0,
            "environments/c/share": 0.0,
        }
    )


def test_what_the_environment_measured_is_averaged_over_those_that_have_it():
    played = (
        rollout(task("a"), measured={"steps": 4.0, "success": 1.0}, correct=1.0),
        rollout(task("a"), measured={"steps": 2.0}, correct=0.0),
        rollout(task("a"), measured={"steps": 90.0}),
    )
    assert values([RolloutGroup("g", played)]) == {"measured/a/steps": 3.0, "measured/a/success": 1.0}


def test_one_environment_that_measures_nothing_adds_nothing():
    assert values([group(task("a"), 1.0)]) == {}
