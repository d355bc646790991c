# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import draccus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives.advantages import AdvantageConfig
from marin_rl.objectives.gae import GaeConfig, gae_advantages, token_rewards, whitened
from tests.objectives.signal_cases import batches, make_signal, shuffled, signals

pair = st.tuples(st.floats(-10, 10), st.floats(-10, 10))


def oracle(rewards, values, gamma, lam):
    """The definition as a double sum: A_t = Σ_l (γλ)^l δ_{t+l}."""
    n = len(rewards)
    deltas = [rewards[t] + (gamma * values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@given(st.lists(pair, max_size=7), st.floats(0, 1), st.floats(0, 1))
def test_matches_the_double_sum(pairs, gamma, lam):
    rewards, values = np.array(pairs).reshape(-1, 2).T
    actual = gae_advantages(rewards, values, gamma, lam)
    np.testing.assert_allclose(actual, oracle(rewards, values, gamma, lam), rtol=1e-10, atol=1e-9)


@given(st.lists(pair, min_size=1, max_size=7), st.floats(0, 1))
def test_the_ends_of_lambda(pairs, gamma):
    rewards, values = np.array(pairs).T
    n = len(pairs)
    # λ = 1: what was earned less what was expected.
    monte_carlo = [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) - values[t] for t in range(n)]
    np.testing.assert_allclose(gae_advantages(rewards, values, gamma, 1.0), monte_carlo, atol=1e-9)
    # λ = 0: one step.
    one_step = rewards + gamma * np.append(values[1:], 0.0) - values
    np.testing.assert_allclose(gae_advantages(rewards, values, gamma, 0.0), one_step, atol=1e-12)


def test_worked_example():
    actual = gae_advantages(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 3.0]), gamma=1.0, lam=0.0)
    assert actual.tolist() == [1.0, 1.0, 2.0]
    config = GaeConfig(gamma=1.0, lam=0.0, whiten=False)
    ((credit,),) = config.compute([[make_signal(5.0, tokens=[3], values=[1.0, 2.0, 3.0])]])
    assert credit.advantages.tolist() == [1.0, 1.0, 2.0]
    assert credit.value_targets.tolist() == [2.0, 3.0, 5.0]


def test_score_is_at_the_last_token_and_penalties_everywhere():
    assert token_rewards(5.0, np.array([0.5, -1.0, 2.0])).tolist() == [-0.5, 1.0, 3.0]
    assert token_rewards(5.0, np.array([0.5])).tolist() == [4.5]
    assert token_rewards(5.0, np.zeros(0)).tolist() == []


def test_penalties_are_not_changed():
    penalties = np.array([0.5, 1.0])
    token_rewards(5.0, penalties)
    assert penalties.tolist() == [0.5, 1.0]


@settings(max_examples=50)
@given(batches, st.floats(0, 1), st.floats(0, 1))
def test_a_batch_matches_the_oracle(groups, gamma, lam):
    groups = signals(groups)
    raw = GaeConfig(gamma, lam, whiten=False).compute(groups)
    white = GaeConfig(gamma, lam, whiten=True).compute(groups)
    pooled = []
    for group, credits in zip(groups, raw, strict=True):
        for signal, credit in zip(group, credits, strict=True):
            if signal.score is None:
                continue
            rewards = [-p for p in signal.penalties]
            if rewards:
                rewards[-1] += signal.score
            expected = oracle(rewards, signal.values.tolist(), gamma, lam)
            np.testing.assert_allclose(credit.advantages, expected, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(credit.value_targets, np.add(expected, signal.values), rtol=1e-9, atol=1e-9)
            pooled += expected
    n = len(pooled)
    mean = sum(pooled) / max(n, 1)
    variance = sum((a - mean) ** 2 for a in pooled) / max(n - 1, 1)
    for group, before, after in zip(groups, raw, white, strict=True):
        for signal, plain, credit in zip(group, before, after, strict=True):
            # Targets are those from before the whitening, to the last bit.
            assert credit.value_targets.tolist() == plain.value_targets.tolist()
            if signal.score is None:
                assert credit.advantages.tolist() == credit.value_targets.tolist() == [0.0] * len(signal.turn_ids)
            else:
                expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in plain.advantages]
                np.testing.assert_allclose(credit.advantages, expected, rtol=1e-7, atol=1e-7)


def test_observations_between_turns_discount_nothing():
    values = [0.3, -0.2, 0.9, 0.4]
    one = make_signal(2.0, [2.0], tokens=[4], values=values)
    several = make_signal(2.0, [0.0, 0.0, 2.0], tokens=[1, 2, 1], values=values)
    config = GaeConfig(gamma=0.9, lam=0.7, whiten=False)
    ((first, second),) = config.compute([[one, several]])
    assert first.advantages.tolist() == second.advantages.tolist()


def test_whitened_tokens_have_mean_zero_and_variance_one():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(3, 5, size) for size in (4, 0, 9, 1)]
    result = whitened(arrays)
    assert [array.size for array in result] == [4, 0, 9, 1]
    together = np.concatenate(result)
    assert together.mean() == pytest.approx(0, abs=1e-12)
    assert together.var(ddof=1) == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("arrays", [[], [np.zeros(0)], [np.array([3.0])], [np.full(3, 0.1), np.full(4, 0.1)]])
def test_whitening_nothing_one_or_equal_tokens_is_exactly_zero(arrays):
    assert [array.tolist() for array in whitened(arrays)] == [[0.0] * array.size for array in arrays]


def test_all_failed_and_fully_masked():
    failed = make_signal(None, [0.0], values=[3.0], penalties=[1.0])
    masked = make_signal(1.0, tokens=[0])
    ((first, second), ()) = GaeConfig().compute([[failed, masked], []])
    assert first.advantages.tolist() == first.value_targets.tolist() == [0.0]
    assert second.advantages.size == second.value_targets.size == 0


@settings(max_examples=30)
@given(batches, st.integers(0, 99))
def test_order_of_the_rollouts_changes_no_bit(groups, seed):
    config = GaeConfig()
    groups = signals(groups)
    moved, orders = shuffled(groups, seed)
    expected = config.compute(groups)
    for original, actual, order in zip(expected, config.compute(moved), orders, strict=True):
        for place, source in enumerate(order):
            assert actual[place].advantages.tolist() == original[source].advantages.tolist()
            assert actual[place].value_targets.tolist() == original[source].value_targets.tolist()


def test_config():
    config = draccus.decode(AdvantageConfig, {"type": "gae", "gamma": 0.99, "lam": 0.9, "whiten": False})
    assert config == GaeConfig(0.99, 0.9, False)
    assert config.needs_critic
    assert not config.needs_turns
    assert config.minimum_group_size == 1


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_impossible_settings_are_named(name, value):
    with pytest.raises(ValueError, match=rf"advantage\.{name} is {value}"):
        GaeConfig(**{name: value})
