# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives.importance import LogRatioStatistics, log_ratio_statistics


def oracle(differences):
    """Every statistic, from the list of weights."""
    n = len(differences)
    weights = [math.exp(max(-20.0, min(20.0, d))) for d in differences]
    mean = sum(weights) / n
    return {
        "mean_absolute": sum(map(abs, differences)) / n,
        "maximum": max(map(abs, differences)),
        "approximate_kl": sum(d * d for d in differences) / n / 2,
        "mean_k3": sum(w - 1 - max(-20.0, min(20.0, d)) for w, d in zip(weights, differences, strict=True)) / n,
        "mean_ratio": mean,
        "ratio_variance": sum((w - mean) ** 2 for w in weights) / n,
        "effective_sample_size": sum(weights) ** 2 / (n * sum(w * w for w in weights)),
    }


def check(statistics, differences, rtol, atol=0.0):
    for name, expected in oracle(differences).items():
        np.testing.assert_allclose(getattr(statistics, name), expected, rtol=rtol, atol=atol, err_msg=name)


def statistics_of(differences):
    logprobs = jnp.array(differences)
    return log_ratio_statistics(logprobs, jnp.zeros_like(logprobs), jnp.ones(logprobs.shape, bool))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_matches_the_definitions(differences):
    with jax.enable_x64(True):
        check(statistics_of(differences), differences, rtol=1e-9, atol=1e-12)


def test_microbatches_merge_to_the_whole():
    rng = np.random.default_rng(0)
    logprobs, old = rng.uniform(-3, 0, (6, 5)), rng.uniform(-3, 0, (6, 5))
    mask = rng.random((6, 5)) < 0.6
    with jax.enable_x64(True):
        parts = [
            log_ratio_statistics(jnp.array(logprobs[rows]), jnp.array(old[rows]), jnp.array(mask[rows]))
            for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
        ]
        check(functools.reduce(LogRatioStatistics.merge, parts), (logprobs - old)[mask].tolist(), rtol=1e-9)


def test_masked_tokens_may_hold_anything():
    logprobs = jnp.array([-1.0, jnp.nan, jnp.inf, -2.0])
    mask = jnp.array([True, False, False, True])
    statistics = log_ratio_statistics(logprobs, jnp.array([-1.5, 0.0, -jnp.inf, -1.0]), mask)
    check(statistics, [0.5, -1.0], rtol=1e-5)


def test_equal_policies():
    statistics = statistics_of([0.0, 0.0, 0.0])
    assert float(statistics.effective_sample_size) == 1.0
    assert float(statistics.mean_ratio) == 1.0
    assert float(statistics.ratio_variance) == float(statistics.mean_k3) == float(statistics.maximum) == 0.0


def test_one_dominating_token_leaves_one_sample():
    assert float(statistics_of([15.0] + [-15.0] * 9).effective_sample_size) == pytest.approx(0.1, rel=1e-4)


def test_variance_near_one_is_not_rounding_in_float32():
    # Σw² - (Σw)²/n would give 0 or noise of 1e-7; the variance is 1e-10.
    assert float(statistics_of([1e-5, -1e-5] * 50).ratio_variance) == pytest.approx(1e-10, rel=1e-3)


def test_no_tokens_give_finite_neutral_values():
    statistics = log_ratio_statistics(jnp.ones((2, 2)), jnp.zeros((2, 2)), jnp.zeros((2, 2), bool))
    assert float(statistics.num_tokens) == float(statistics.mean_absolute) == float(statistics.maximum) == 0.0
    assert float(statistics.mean_ratio) == float(statistics.effective_sample_size) == 1.0


def test_extreme_differences_stay_finite_and_are_reported_unclamped():
    statistics = statistics_of([500.0, -500.0])
    assert float(statistics.maximum) == float(statistics.mean_absolute) == 500.0
    assert all(math.isfinite(value) for value in statistics)
    assert float(statistics.mean_ratio) == pytest.approx(math.exp(20) / 2, rel=1e-5)


def test_is_a_pytree_and_runs_under_jit():
    jitted = jax.jit(log_ratio_statistics)(jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([True]))
    assert isinstance(jitted, LogRatioStatistics)
    check(jitted, [1.0], rtol=1e-5)
