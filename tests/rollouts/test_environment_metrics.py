# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.environments.base import Split
from marin_rl.rollouts.metrics import environment_metrics
from marin_rl.types import RolloutGroup, Task
from tests.environments.fake_environments import Cards, group, rollout


def task(name: str) -> Task:
    return Cards(name).tasks(Split.TRAIN)[0]


def values(groups: list[RolloutGroup], *parts: str) -> dict[str, float]:
    return {name: metric.value for name, metric in environment_metrics(groups, parts).items()}


def test_parts_have_separate_metrics():
    games = RolloutGroup("g", (rollout(task("a"), turns=3, correct=1.0, game=0.5), rollout(task("a"), correct=0.0)))
    metrics = values([games, group(task("b"), 1.0), RolloutGroup("g", (rollout(task("b")),))], "a", "b", "c")
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
        rollout(task("a"), measured={"steps": 4.0, "success": 1.0}, correct=1.0),
        rollout(task("a"), measured={"steps": 2.0}, correct=0.0),
        rollout(task("a"), measured={"steps": 90.0}),
    )
    assert values([RolloutGroup("g", rollouts)]) == {"measured/a/steps": 3.0, "measured/a/success": 1.0}


def test_a_single_environment_without_metrics_adds_nothing():
    assert values([group(task("a"), 1.0)]) == {}
