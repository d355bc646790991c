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
from tests.objectives.advantage_cases import batches, make_signal, shuffled, signals

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
    ((token_advantages,),) = config.compute([[make_signal(5.0, tokens=[3], values=[1.0, 2.0, 3.0])]])
    assert token_advantages.advantages.tolist() == [1.0, 1.0, 2.0]
    assert token_advantages.value_targets.tolist() == [2.0, 3.0, 5.0]


def rewards_of(score, penalties, turn_rewards=(0.0,), turns=None):
    turn_ids = np.zeros(len(penalties), np.int32) if turns is None else np.array(turns, np.int32)
    return token_rewards(score, np.array(penalties, np.float64), np.array(turn_rewards), turn_ids).tolist()


def test_score_is_at_the_last_token_and_penalties_everywhere():
    assert rewards_of(5.0, [0.5, -1.0, 2.0]) == [-0.5, 1.0, 3.0]
    assert rewards_of(5.0, [0.5]) == [4.5]
    assert rewards_of(5.0, []) == []


@pytest.mark.parametrize(
    ("score", "turn_rewards", "turns", "expected"),
    [
        # The turns' rewards are all there is.
        (3.5, [1.0, 0.5, 2.0], [0, 0, 1, 2, 2], [0.0, 1.0, 0.5, 0.0, 2.0]),
        # A score beside step rewards, or shaping: what they leave of it is at the end.
        (5.0, [1.0, 0.5, 0.0], [0, 0, 1, 2, 2], [0.0, 1.0, 0.5, 0.0, 3.5]),
        # A turn without tokens has no place of its own.
        (5.0, [1.0, 2.0, 1.0], [0, 2, 2], [1.0, 0.0, 4.0]),
        (5.0, [1.0, 2.0, 1.0], [0, 1], [1.0, 4.0]),
    ],
)
def test_rewards_of_turns_are_at_their_last_tokens(score, turn_rewards, turns, expected):
    assert rewards_of(score, [0.0] * len(turns), turn_rewards, turns) == expected
    penalties = [0.25 * (index + 1) for index in range(len(turns))]
    taken = [reward - penalty for reward, penalty in zip(expected, penalties, strict=True)]
    assert rewards_of(score, penalties, turn_rewards, turns) == taken


@pytest.mark.parametrize("score", [0.1 + 0.2, 1e-17, -1 / 3, 1e30])
@pytest.mark.parametrize("turn_rewards", [[0.1], [0.0, 0.0, 0.7]])
def test_a_single_score_is_at_the_end_to_the_last_bit(score, turn_rewards):
    turns = list(range(len(turn_rewards)))
    assert rewards_of(score, [0.0] * len(turns), turn_rewards, turns) == [*[0.0] * (len(turns) - 1), score]


def test_penalties_and_turn_rewards_are_not_changed():
    penalties, turn_rewards = np.array([0.5, 1.0]), np.array([1.0, 2.0])
    token_rewards(5.0, penalties, turn_rewards, np.array([0, 1], np.int32))
    assert (penalties.tolist(), turn_rewards.tolist()) == ([0.5, 1.0], [1.0, 2.0])


def oracle_rewards(signal):
    """Token by token: a turn's reward where the next token is of another turn, the rest of the score at the end."""
    rewards, rest = [], signal.score
    for at, turn in enumerate(signal.turn_ids):
        is_last = at + 1 == len(signal.turn_ids)
        reward = -signal.penalties[at]
        if is_last:
            reward += rest
        elif signal.turn_ids[at + 1] != turn:
            reward += signal.turn_rewards[turn]
            rest -= signal.turn_rewards[turn]
        rewards.append(reward)
    return rewards


@settings(max_examples=50)
@given(batches, st.floats(0, 1), st.floats(0, 1))
def test_a_batch_matches_the_oracle(groups, gamma, lam):
    groups = signals(groups)
    raw = GaeConfig(gamma, lam, whiten=False).compute(groups)
    white = GaeConfig(gamma, lam, whiten=True).compute(groups)
    pooled = []
    for group, token_advantages_list in zip(groups, raw, strict=True):
        for signal, token_advantages in zip(group, token_advantages_list, strict=True):
            if signal.score is None:
                continue
            expected = oracle(oracle_rewards(signal), signal.values.tolist(), gamma, lam)
            np.testing.assert_allclose(token_advantages.advantages, expected, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(
                token_advantages.value_targets, np.add(expected, signal.values), rtol=1e-9, atol=1e-9
            )
            pooled += expected
    n = len(pooled)
    mean = sum(pooled) / max(n, 1)
    variance = sum((a - mean) ** 2 for a in pooled) / max(n - 1, 1)
    for group, before, after in zip(groups, raw, white, strict=True):
        for signal, plain, token_advantages in zip(group, before, after, strict=True):
            # Targets are those from before the whitening, to the last bit.
            assert token_advantages.value_targets.tolist() == plain.value_targets.tolist()
            if signal.score is None:
                assert (
                    token_advantages.advantages.tolist()
                    == token_advantages.value_targets.tolist()
                    == [0.0] * len(signal.turn_ids)
                )
            else:
                expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in plain.advantages]
                np.testing.assert_allclose(token_advantages.advantages, expected, rtol=1e-7, atol=1e-7)


def test_observations_between_turns_discount_nothing():
    values = [0.3, -0.2, 0.9, 0.4]
    one = make_signal(2.0, [2.0], tokens=[4], values=values)
    several = make_signal(2.0, [0.0, 0.0, 2.0], tokens=[1, 2, 1], values=values)
    config = GaeConfig(gamma=0.9, lam=0.7, whiten=False)
    ((first, second),) = config.compute([[one, several]])
    assert first.advantages.tolist() == second.advantages.tolist()


def test_rewards_of_turns_reach_back_to_the_tokens_before_them_alone():
    """λ = 1, γ = 1: the advantage of a token is what is earned from it on, less its value."""
    values = [0.3, -0.2, 0.9, 0.4]
    signal = make_signal(3.0, [1.0, -0.5, 2.0], tokens=[1, 2, 1], values=values)
    ((token_advantages,),) = GaeConfig(gamma=1.0, lam=1.0, whiten=False).compute([[signal]])
    to_come = np.array([2.5, 1.5, 1.5, 2.0])
    # The score has 0.5 more than the turns, which is earned at the end.
    np.testing.assert_allclose(token_advantages.advantages, to_come + 0.5 - values, atol=1e-12)
    np.testing.assert_allclose(token_advantages.value_targets, to_come + 0.5, atol=1e-12)


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
