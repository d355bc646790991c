# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Groups have the requested staleness, and otherwise equal those of an ordinary run."""

from collections.abc import Callable
from typing import Any

import pytest

from experiments.lab.staleness import train_with_lag
from marin_rl.config.command_line import parse_config
from marin_rl.config.train_config import TrainConfig
from tests.tiny_run import TinyRun, without_timings

STEPS = 6


def trained_with_lag(run: TinyRun, lag: int) -> list[dict[str, Any]]:
    train_with_lag(parse_config(TrainConfig, run.argv).config, lag)
    return [without_timings(record) for record in run.records()[1:]]


@pytest.fixture
def lagging_run(finished_run: TinyRun, new_run: Callable[..., TinyRun]) -> Callable[..., TinyRun]:
    """Makes runs from the weights of a finished one."""

    def make(**changes: Any) -> TinyRun:
        start = {"initialize_from": str(finished_run.path), "warm_start__max_steps": 0}
        return new_run(num_steps=STEPS, evaluation__tasks=2, policy_loss__type="ppo_clip", **start, **changes)

    return make


@pytest.mark.medium
def test_without_a_lag_it_is_the_ordinary_run(lagging_run: Callable[..., TinyRun]) -> None:
    ordinary = lagging_run()
    assert ordinary.train() == 0
    assert trained_with_lag(lagging_run(), 0) == [without_timings(record) for record in ordinary.records()[1:]]


@pytest.mark.medium
def test_every_group_is_as_old_as_its_bound_allows(lagging_run: Callable[..., TinyRun]) -> None:
    records = trained_with_lag(lagging_run(), 2)
    for name in ("staleness/min", "staleness/mean", "staleness/max"):
        assert [record[name] for record in records] == [0, 1, 2, 2, 2, 2]
    assert [record["mismatch/k3"] > 1e-6 for record in records] == [False, *[True] * 5]


@pytest.mark.medium
def test_groups_that_are_as_old_as_the_run_know_nothing_of_its_training(lagging_run: Callable[..., TinyRun]) -> None:
    trained = trained_with_lag(lagging_run(), STEPS)
    still = trained_with_lag(lagging_run(optimizer__learning_rate=0.0), 0)
    assert len(trained) == len(still) == STEPS
    for name in ("objective/scores", "train/correct_rewards", "train/output_length"):
        assert [record[name] for record in trained] == [record[name] for record in still]
