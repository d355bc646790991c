# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marin_rl.objectives.importance import (
    IcepopConfig,
    LogRatioStatistics,
    MaskMismatchConfig,
    NoCorrectionConfig,
    OffPolicyCorrectionConfig,
    TisConfig,
    log_ratio_statistics,
    log_weight_statistics,
    mismatch_metrics,
)


def oracle(differences):
    """Compute every statistic from the list of weights."""
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


@jax.jit
def jitted_statistics(logprobs, policy_logprobs, loss_mask):
    return log_ratio_statistics(logprobs - policy_logprobs, loss_mask)


def statistics_of(differences):
    logprobs = np.array(differences, np.float64 if jax.config.jax_enable_x64 else np.float32)
    return jitted_statistics(logprobs, np.zeros_like(logprobs), np.ones(logprobs.shape, bool))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-3, 3), min_size=6, max_size=6))
def test_matches_the_definitions(differences):
    with jax.enable_x64(True):
        check(statistics_of(differences), differences, rtol=1e-9, atol=1e-12)


def test_merged_microbatches_equal_the_whole_batch():
    rng = np.random.default_rng(0)
    logprobs, old = rng.uniform(-3, 0, (6, 5)), rng.uniform(-3, 0, (6, 5))
    mask = rng.random((6, 5)) < 0.6
    with jax.enable_x64(True):
        parts = [
            jitted_statistics(logprobs[rows], old[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
        ]
        sums = LogRatioStatistics(*map(sum, zip(*parts, strict=True)))
        merged = sums._replace(maximum=max(part.maximum for part in parts))
        check(merged, (logprobs - old)[mask].tolist(), rtol=1e-9)


def test_masked_tokens_may_be_nan_or_infinite():
    logprobs = jnp.array([-1.0, jnp.nan, jnp.inf, -2.0])
    mask = jnp.array([True, False, False, True])
    statistics = jitted_statistics(logprobs, jnp.array([-1.5, 0.0, -jnp.inf, -1.0]), mask)
    check(statistics, [0.5, -1.0], rtol=1e-5)


def test_equal_policies():
    statistics = statistics_of([0.0, 0.0, 0.0])
    assert float(statistics.effective_sample_size) == 1.0
    assert float(statistics.mean_ratio) == 1.0
    assert float(statistics.ratio_variance) == float(statistics.mean_k3) == float(statistics.maximum) == 0.0


def test_one_dominating_token_gives_an_effective_sample_size_of_one():
    assert float(statistics_of([15.0] + [-15.0] * 9).effective_sample_size) == pytest.approx(0.1, rel=1e-4)


def test_variance_of_weights_near_one_is_accurate_in_float32():
    # Σw² - (Σw)²/n gives 0 or noise of 1e-7 in float32; the variance is 1e-10.
    assert float(statistics_of([1e-5, -1e-5] * 50).ratio_variance) == pytest.approx(1e-10, rel=1e-3)


def test_statistics_of_no_tokens_are_neutral():
    statistics = jitted_statistics(np.ones(3, np.float32), np.zeros(3, np.float32), np.zeros(3, bool))
    assert float(statistics.num_tokens) == float(statistics.mean_absolute) == float(statistics.maximum) == 0.0
    assert float(statistics.mean_ratio) == float(statistics.effective_sample_size) == 1.0


def test_extreme_differences_are_finite_and_reported_unclamped():
    statistics = statistics_of([500.0, -500.0])
    assert float(statistics.maximum) == float(statistics.mean_absolute) == 500.0
    assert all(math.isfinite(value) for value in statistics)
    assert float(statistics.mean_ratio) == pytest.approx(math.exp(20) / 2, rel=1e-5)


def test_statistics_are_a_pytree_under_jit():
    jitted = jitted_statistics(jnp.array([-1.0]), jnp.array([-2.0]), jnp.array([True]))
    assert isinstance(jitted, LogRatioStatistics)
    check(jitted, [1.0], rtol=1e-5)


CORRECTIONS = [
    NoCorrectionConfig(),
    TisConfig(),
    TisConfig(0.7),
    MaskMismatchConfig(),
    MaskMismatchConfig(0.7),
    IcepopConfig(),
    IcepopConfig(0.8, 1.2),
]
ragged = st.lists(st.lists(st.floats(-3, 3) | st.floats(-90, 90), max_size=5), max_size=5)


def joined(log_weights):
    return np.array([d for of_rollout in log_weights for d in of_rollout], np.float64)


def weight_oracle(config, log_weights):
    """Compute the weight of each token of one rollout from the definitions."""
    weights = [math.exp(max(-20.0, min(20.0, d))) for d in log_weights]
    match config:
        case NoCorrectionConfig():
            return [1.0] * len(weights)
        case TisConfig(cap=cap):
            return [min(w, cap) for w in weights]
        case MaskMismatchConfig(cap=cap):
            return [0.0 if math.exp(min(sum(log_weights), 700)) > cap else 1.0] * len(weights)
        case IcepopConfig(low=low, high=high):
            return [w if low <= w <= high else 0.0 for w in weights]


class TestCorrections:
    @pytest.mark.parametrize("config", CORRECTIONS)
    @settings(max_examples=50)
    @given(log_weights=ragged)
    def test_matches_the_definitions(self, config, log_weights):
        actual = config.weights(joined(log_weights), [*map(len, log_weights)])
        assert actual.dtype == np.float64
        expected = [weight for of_rollout in log_weights for weight in weight_oracle(config, of_rollout)]
        np.testing.assert_allclose(actual, expected, rtol=1e-9)

    @pytest.mark.parametrize("config", CORRECTIONS)
    def test_weights_of_equal_policies_are_one_if_within_bounds(self, config):
        expected = weight_oracle(config, [0.0, 0.0])
        assert config.weights(np.zeros(2), [2, 0]).tolist() == expected
        assert expected == [1.0, 1.0] or config in (TisConfig(0.7), MaskMismatchConfig(0.7))

    def test_bounds_are_inclusive(self):
        assert IcepopConfig(0.5, 4.0).weights(np.log(np.array([0.5, 4.0])), [2]).tolist() == pytest.approx([0.5, 4.0])
        at_bound = np.array([math.log(2.0), math.log(2.0) + 1e-9])
        assert MaskMismatchConfig(2.0).weights(at_bound, [1, 1]).tolist() == [1.0, 0.0]

    def test_only_rollouts_more_probable_under_the_learner_are_masked(self):
        weights = MaskMismatchConfig().weights(np.repeat([-5.0, 0.3], 3), [3, 3])
        assert weights.tolist() == [1.0] * 3 + [0.0] * 3

    def test_long_rollouts_do_not_overflow(self):
        for config in CORRECTIONS:
            for log_weights in (np.full(5000, 15.0), np.full(5000, -15.0), np.array([1e30, -1e30])):
                assert np.isfinite(config.weights(log_weights, [log_weights.size])).all()

    def test_float32_is_summed_in_float64(self):
        log_weights = np.full(1000, 0.1, np.float32)
        for margin, weight in ((1e-6, 1.0), (-1e-6, 0.0)):
            config = MaskMismatchConfig(math.exp(1000 * float(np.float32(0.1)) + margin))
            assert config.weights(log_weights, [1000])[0] == weight

    def test_configs_are_selected_by_type(self):
        assert draccus.decode(OffPolicyCorrectionConfig, {"type": "none"}) == NoCorrectionConfig()
        assert draccus.decode(OffPolicyCorrectionConfig, {"type": "tis"}) == TisConfig(2.0)
        assert draccus.decode(OffPolicyCorrectionConfig, {"type": "mask", "cap": 3.0}) == MaskMismatchConfig(3.0)
        assert draccus.decode(OffPolicyCorrectionConfig, {"type": "icepop"}) == IcepopConfig(0.5, 5.0)
        assert set(OffPolicyCorrectionConfig.get_known_choices()) == {"none", "tis", "mask", "icepop"}

    def test_declared_requirements(self):
        configs = [OffPolicyCorrectionConfig.get_choice_class(name)() for name in ("none", "tis", "mask", "icepop")]
        assert [config.needs_sampling_logprobs for config in configs] == [False, True, True, True]
        assert [config.is_token_level for config in configs] == [False, True, False, True]


class TestMismatchMetrics:
    @example([[-8.0, -12.0]])
    @example([[-20.0, -20.0, -19.0]])
    @given(ragged)
    def test_metrics_match_the_raw_weights(self, log_weights):
        together = [d for own in log_weights for d in own] or [0.0]
        expected = oracle(together)
        with jax.enable_x64(True):
            actual = mismatch_metrics(log_weight_statistics(joined(log_weights)), joined(log_weights))
        largest = max(math.exp(max(-20.0, min(20.0, d))) for d in together)
        # There is no maximum without tokens.
        assert actual.pop("mismatch/weight_max", 1.0) == pytest.approx(largest, rel=1e-9)
        assert actual == {
            "mismatch/weight_mean": pytest.approx(expected["mean_ratio"], rel=1e-9),
            "mismatch/k3": pytest.approx(expected["mean_k3"], rel=1e-9, abs=1e-12),
            "mismatch/effective_sample_size": pytest.approx(expected["effective_sample_size"], rel=1e-9),
            "mismatch/logprob_difference_mean": pytest.approx(expected["mean_absolute"], rel=1e-9),
            "mismatch/logprob_difference_max": pytest.approx(expected["maximum"], rel=1e-9),
        }

    def test_host_and_device_agree(self):
        rng = np.random.default_rng(0)
        log_weights = rng.normal(scale=0.5, size=10)
        with jax.enable_x64(True):
            host = mismatch_metrics(log_weight_statistics(log_weights))
            device = mismatch_metrics(statistics_of(log_weights.tolist()))
        assert host == pytest.approx(device, rel=1e-9)

    def test_metrics_of_no_tokens_equal_those_of_equal_policies(self):
        neutral = mismatch_metrics(log_weight_statistics(np.zeros(4)))
        assert mismatch_metrics(log_weight_statistics(np.zeros(0))) == neutral
        assert mismatch_metrics(log_weight_statistics(np.zeros(0)), np.zeros(0)) == neutral
