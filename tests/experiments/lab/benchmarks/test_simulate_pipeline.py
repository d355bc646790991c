# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The simulated pipeline, compared with closed-form results."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.lab.benchmarks.simulate_pipeline import Pipeline, Simulation


def simulate(**settings: float | str) -> dict[str, float]:
    return Simulation(Pipeline(**settings)).run()


@pytest.mark.medium
@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_step_time_is_that_of_the_slower_side(workers: int) -> None:
    # Eight groups of 1 s each, against 2 s of training: four workers are enough.
    found = simulate(workers=workers, step_seconds=2.0, group_seconds=1.0, groups_per_step=8, max_staleness=2, steps=60)
    assert found["seconds_per_step"] == pytest.approx(max(2.0, 8 / workers), rel=0.02)
    busy = min(1.0, (8 / workers) / 2.0)
    assert 1 - found["worker_idle_share"] == pytest.approx(busy, abs=0.05)
    assert found["trainer_idle_share"] == pytest.approx(max(0.0, 1 - 2.0 / max(2.0, 8 / workers)), abs=0.03)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_without_staleness_sampling_and_training_alternate(workers: int) -> None:
    found = simulate(workers=workers, step_seconds=2.0, group_seconds=1.0, groups_per_step=8, max_staleness=0)
    assert found["seconds_per_step"] == pytest.approx(2.0 + 8 / workers)
    assert found["staleness_max"] == 0


@pytest.mark.medium
@settings(max_examples=25)
@given(
    workers=st.integers(1, 30),
    staleness=st.integers(0, 4),
    spread=st.sampled_from([0.0, 0.7]),
    failures=st.sampled_from([0.0, 60.0]),
    refresh=st.sampled_from(["between_groups", "in_flight"]),
    seed=st.integers(0, 1000),
)
def test_bounds_hold_for_all_durations(
    workers: int, staleness: int, spread: float, failures: float, refresh: str, seed: int
) -> None:
    found = simulate(
        workers=workers,
        step_seconds=1.0,
        group_seconds=2.0,
        spread=spread,
        groups_per_step=6,
        groups_together=2,
        max_staleness=staleness,
        fetch_seconds=0.1,
        publish_seconds=0.2,
        failures_per_hour=failures,
        heartbeat_timeout=5.0,
        refresh=refresh,
        steps=20,
        seed=seed,
    )
    assert found["staleness_max"] <= staleness
    assert found["seconds_per_step"] >= 1.0 - 1e-9
    assert -1e-9 <= found["trainer_idle_share"] <= 1
    assert found["worker_idle_share"] <= 1
    assert math.isfinite(found["staleness_mean"])
    assert found["groups_handed_again"] == 0 or failures > 0
