# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import draccus
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives import AdvantageConfig
from marin_rl.objectives.gae import GaeConfig, gae_advantages, token_rewards, whitened
from tests.objectives.advantage_cases import batches, make_inputs, shuffled, to_inputs

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
def test_lambda_zero_and_one(pairs, gamma):
    rewards, values = np.array(pairs).T
    n = len(pairs)
    # λ = 1: Monte Carlo return minus value.
    monte_carlo = [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) - values[t] for t in range(n)]
    np.testing.assert_allclose(gae_advantages(rewards, values, gamma, 1.0), monte_carlo, atol=1e-9)
    # λ = 0: one-step TD error.
    one_step = rewards + gamma * np.append(values[1:], 0.0) - values
    np.testing.assert_allclose(gae_advantages(rewards, values, gamma, 0.0), one_step, atol=1e-12)


def test_worked_example():
    actual = gae_advantages(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 3.0]), gamma=1.0, lam=0.0)
    assert actual.tolist() == [1.0, 1.0, 2.0]
    config = GaeConfig(gamma=1.0, lam=0.0, whiten=False)
    ((result,),) = config.compute([[make_inputs(5.0, tokens=[3], values=[1.0, 2.0, 3.0])]])
    assert result.advantages.tolist() == [1.0, 1.0, 2.0]
    assert result.value_targets.tolist() == [2.0, 3.0, 5.0]


def rewards_of(score, penalties, turn_rewards=(0.0,), turns=None):
    turn_ids = np.zeros(len(penalties), np.int32) if turns is None else np.array(turns, np.int32)
    return token_rewards(score, np.array(penalties, np.float64), np.array(turn_rewards), turn_ids).tolist()


def test_score_is_at_the_last_token_and_penalties_at_every_token():
    assert rewards_of(5.0, [0.5, -1.0, 2.0]) == [-0.5, 1.0, 3.0]
    assert rewards_of(5.0, [0.5]) == [4.5]
    assert rewards_of(5.0, []) == []


@pytest.mark.parametrize(
    ("score", "turn_rewards", "turns", "expected"),
    [
        # The score is the sum of the turn rewards.
        (3.5, [1.0, 0.5, 2.0], [0, 0, 1, 2, 2], [0.0, 1.0, 0.5, 0.0, 2.0]),
        # A score in addition to turn rewards, or shaping: the remainder is at the end.
        (5.0, [1.0, 0.5, 0.0], [0, 0, 1, 2, 2], [0.0, 1.0, 0.5, 0.0, 3.5]),
        # The reward of a turn without tokens is at the end.
        (5.0, [1.0, 2.0, 1.0], [0, 2, 2], [1.0, 0.0, 4.0]),
        (5.0, [1.0, 2.0, 1.0], [0, 1], [1.0, 4.0]),
    ],
)
def test_turn_rewards_are_at_the_last_token_of_each_turn(score, turn_rewards, turns, expected):
    assert rewards_of(score, [0.0] * len(turns), turn_rewards, turns) == expected
    penalties = [0.25 * (index + 1) for index in range(len(turns))]
    taken = [reward - penalty for reward, penalty in zip(expected, penalties, strict=True)]
    assert rewards_of(score, penalties, turn_rewards, turns) == taken


@pytest.mark.parametrize("score", [0.1 + 0.2, 1e-17, -1 / 3, 1e30])
@pytest.mark.parametrize("turn_rewards", [[0.1], [0.0, 0.0, 0.7]])
def test_a_single_score_is_at_the_last_token_bit_for_bit(score, turn_rewards):
    turns = list(range(len(turn_rewards)))
    assert rewards_of(score, [0.0] * len(turns), turn_rewards, turns) == [*[0.0] * (len(turns) - 1), score]


def test_token_rewards_does_not_modify_its_arguments():
    penalties, turn_rewards = np.array([0.5, 1.0]), np.array([1.0, 2.0])
    token_rewards(5.0, penalties, turn_rewards, np.array([0, 1], np.int32))
    assert (penalties.tolist(), turn_rewards.tolist()) == ([0.5, 1.0], [1.0, 2.0])


def oracle_rewards(inputs):
    """Loop over tokens: a turn's reward at its last token, the rest of the score at the end."""
    rewards, rest = [], inputs.score
    for at, turn in enumerate(inputs.turn_ids):
        is_last = at + 1 == len(inputs.turn_ids)
        reward = -inputs.penalties[at]
        if is_last:
            reward += rest
        elif inputs.turn_ids[at + 1] != turn:
            reward += inputs.turn_rewards[turn]
            rest -= inputs.turn_rewards[turn]
        rewards.append(reward)
    return rewards


@pytest.mark.medium
@settings(max_examples=50)
@given(batches, st.floats(0, 1), st.floats(0, 1))
def test_a_batch_matches_the_oracle(groups, gamma, lam):
    groups = to_inputs(groups)
    raw = GaeConfig(gamma, lam, whiten=False).compute(groups)
    white = GaeConfig(gamma, lam, whiten=True).compute(groups)
    pooled = []
    for group, results in zip(groups, raw, strict=True):
        for inputs, result in zip(group, results, strict=True):
            if inputs.score is None:
                continue
            expected = oracle(oracle_rewards(inputs), inputs.values.tolist(), gamma, lam)
            np.testing.assert_allclose(result.advantages, expected, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(result.value_targets, np.add(expected, inputs.values), rtol=1e-9, atol=1e-9)
            pooled += expected
    n = len(pooled)
    mean = sum(pooled) / max(n, 1)
    variance = sum((a - mean) ** 2 for a in pooled) / max(n - 1, 1)
    for group, before, after in zip(groups, raw, white, strict=True):
        for inputs, plain, result in zip(group, before, after, strict=True):
            # Targets are computed before whitening, bit for bit.
            assert result.value_targets.tolist() == plain.value_targets.tolist()
            if inputs.score is None:
                assert result.advantages.tolist() == result.value_targets.tolist() == [0.0] * len(inputs.turn_ids)
            else:
                expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in plain.advantages]
                np.testing.assert_allclose(result.advantages, expected, rtol=1e-7, atol=1e-7)


def test_observations_between_turns_are_not_discounted():
    values = [0.3, -0.2, 0.9, 0.4]
    one = make_inputs(2.0, [2.0], tokens=[4], values=values)
    several = make_inputs(2.0, [0.0, 0.0, 2.0], tokens=[1, 2, 1], values=values)
    config = GaeConfig(gamma=0.9, lam=0.7, whiten=False)
    ((first, second),) = config.compute([[one, several]])
    assert first.advantages.tolist() == second.advantages.tolist()


def test_turn_rewards_affect_only_earlier_tokens():
    """λ = 1, γ = 1: the advantage of a token is its return-to-go minus its value."""
    values = [0.3, -0.2, 0.9, 0.4]
    inputs = make_inputs(3.0, [1.0, -0.5, 2.0], tokens=[1, 2, 1], values=values)
    ((result,),) = GaeConfig(gamma=1.0, lam=1.0, whiten=False).compute([[inputs]])
    returns = np.array([2.5, 1.5, 1.5, 2.0])
    # The score exceeds the turn rewards by 0.5, which is added at the end.
    np.testing.assert_allclose(result.advantages, returns + 0.5 - values, atol=1e-12)
    np.testing.assert_allclose(result.value_targets, returns + 0.5, atol=1e-12)


def test_whitened_tokens_have_mean_zero_and_variance_one():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(3, 5, size) for size in (4, 0, 9, 1)]
    result = whitened(arrays)
    assert [array.size for array in result] == [4, 0, 9, 1]
    together = np.concatenate(result)
    assert together.mean() == pytest.approx(0, abs=1e-12)
    assert together.var(ddof=1) == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("arrays", [[], [np.zeros(0)], [np.array([3.0])], [np.full(3, 0.1), np.full(4, 0.1)]])
def test_whitening_of_zero_one_or_equal_tokens_is_exactly_zero(arrays):
    assert [array.tolist() for array in whitened(arrays)] == [[0.0] * array.size for array in arrays]


def test_failed_and_fully_masked_rollouts():
    failed = make_inputs(None, [0.0], values=[3.0], penalties=[1.0])
    masked = make_inputs(1.0, tokens=[0])
    ((first, second), ()) = GaeConfig().compute([[failed, masked], []])
    assert first.advantages.tolist() == first.value_targets.tolist() == [0.0]
    assert second.advantages.size == second.value_targets.size == 0


@settings(max_examples=30)
@given(batches, st.integers(0, 99))
def test_results_are_bit_identical_for_any_rollout_order(groups, seed):
    config = GaeConfig()
    groups = to_inputs(groups)
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
