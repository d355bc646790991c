# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.objectives import DrGrpoConfig, GaeConfig, GigpoConfig, ReinforceConfig, RlooConfig
from marin_rl.objectives.aggregation import SequenceSumConfig
from marin_rl.objectives.policy_loss import (
    CispoLossConfig,
    GspoLossConfig,
    ImportanceLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    RlooSequenceLossConfig,
    TokenBatch,
)
from tests.objectives.advantage_cases import make_inputs

TOKEN_LEVEL = [
    ReinforceLossConfig(),
    ImportanceLossConfig(),
    PpoClipLossConfig(),
    PpoClipLossConfig(dual_clip=3.0),
    CispoLossConfig(),
]
SEQUENCE_LEVEL = [GspoLossConfig(), RlooSequenceLossConfig()]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


class Bandit:
    """Two choices; the first option leads to two further choices. Three outcomes, of 2, 2 and 1 one-token turns.

    Expectations are exact sums over all groups of three rollouts, and the policy gradient has a closed form.
    """

    first = np.array([0.3, -0.4])
    second = np.array([0.2, 0.9])
    turn_rewards = ([0.5, 2.0], [0.5, -1.0], [1.0])
    group = 3

    def chances(self, first, second):
        p, q = softmax(first), softmax(second)
        return np.array([p[0] * q[0], p[0] * q[1], p[1]])

    def gradient(self, first, second):
        """∂E[R]/∂logits: π_a(Q_a - V) at the first choice; at the second also times the probability of reaching it."""
        p, q = softmax(first), softmax(second)
        later = np.array([2.0, -1.0])
        values = np.array([0.5 + q @ later, 1.0])
        return p * (values - p @ values), p[0] * q * (later - q @ later)

    def values(self):
        """V at each choice of the current policy: the expected sum of later rewards."""
        later = softmax(self.second) @ np.array([2.0, -1.0])
        return softmax(self.first) @ np.array([0.5 + later, 1.0]), later

    def inputs(self, outcomes, values):
        return [
            make_inputs(sum(rewards), rewards, anchors=["s0", "s1"][: len(rewards)], values=values[: len(rewards)])
            for rewards in (self.turn_rewards[outcome] for outcome in outcomes)
        ]

    @functools.cached_property
    def groups(self):
        return np.array(list(itertools.product(range(3), repeat=self.group)))

    @functools.cache  # noqa: B019 (there is a single instance)
    def advantages(self, estimator, values):
        """`[groups, rollouts, tokens]`, 0 after the end of a rollout."""
        array = np.zeros((*self.groups.shape, 2))
        for group, outcomes in enumerate(self.groups):
            (results,) = estimator.compute([self.inputs(outcomes, values)])
            for member, result in enumerate(results):
                array[group, member, : result.advantages.size] = result.advantages
        return array

    def expected_gradient(self, config, estimator, *, values=(0.0, 0.0), old=None):
        """Expected gradient of the negative loss at the current policy, over all groups sampled by the old policy."""
        old = (self.first, self.second) if old is None else old
        chances = self.chances(*old)[self.groups].prod(axis=1)
        mask = np.array([[True, True], [True, True], [True, False]])[self.groups]
        weights = np.stack([SequenceSumConfig().loss_weights(m.sum(axis=1))[:, None] * m for m in mask])
        with jax.enable_x64(True):
            arguments = (weights.astype(np.float64) * chances[:, None, None], mask, self.advantages(estimator, values))
            batch = [jnp.array(array) for array in (*arguments, self.groups)]
            policies = [tuple(jnp.array(logits) for logits in policy) for policy in ((self.first, self.second), old)]
            gradients = negative_gradient(config, *policies, *batch)
            return tuple(-np.array(part) for part in gradients)


@functools.partial(jax.jit, static_argnums=0)
def negative_gradient(config, policy, old, weights, mask, advantages, groups):
    def logprobs(logits):
        first, second = (jax.nn.log_softmax(part) for part in logits)
        outcomes = jnp.array([[first[0], second[0]], [first[0], second[1]], [first[1], 0.0]])
        return outcomes[groups]

    def loss(logits):
        ids = jnp.broadcast_to(jnp.arange(mask.shape[1])[:, None], mask.shape[1:])
        terms = jax.vmap(lambda new, was, a, m: config.per_token(TokenBatch(new, was, a, m, ids)).terms)
        return jnp.sum(weights * terms(logprobs(logits), jax.lax.stop_gradient(logprobs(old)), advantages, mask))

    return jax.grad(loss)(policy)


BANDIT = Bandit()
SHARE = 1 - 1 / Bandit.group
EXACT_VALUES = BANDIT.values()
UNIFORM = {"rloo": (RlooConfig(), 1.0), "dr_grpo": (DrGrpoConfig(), SHARE), "reinforce": (ReinforceConfig(), 1.0)}
PER_TOKEN = {
    **UNIFORM,
    "reinforce_from_turn": (ReinforceConfig(gamma=1.0), 1.0),
    # With λ = 1 any values are a valid baseline; with λ < 1 the values must be exact.
    "gae_any_critic": (GaeConfig(lam=1.0, whiten=False), 1.0),
    "gae_exact_critic": (GaeConfig(lam=0.4, whiten=False), 1.0),
    "gae_exact_critic_one_step": (GaeConfig(lam=0.0, whiten=False), 1.0),
}
PAIRS = [(config, name) for config in TOKEN_LEVEL for name in PER_TOKEN]
PAIRS += [(config, name) for config in SEQUENCE_LEVEL for name in UNIFORM]


@pytest.mark.medium
@pytest.mark.parametrize(("config", "name"), PAIRS)
def test_the_expected_gradient_is_the_policy_gradient(config, name):
    """Up to the share of a rollout in its own baseline."""
    estimator, factor = PER_TOKEN[name]
    values = EXACT_VALUES if "exact" in name else (0.7, -1.3)
    actual = BANDIT.expected_gradient(config, estimator, values=values)
    for part, expected in zip(actual, BANDIT.gradient(BANDIT.first, BANDIT.second), strict=True):
        np.testing.assert_allclose(part, factor * expected, rtol=1e-6, atol=1e-8)


def test_a_wrong_critic_biases_the_gradient_with_lambda_zero():
    """Shows that the tests above can fail: not all estimators have the same gradient."""
    actual = BANDIT.expected_gradient(ReinforceLossConfig(), GaeConfig(lam=0.0, whiten=False), values=(0.7, -1.3))
    assert np.abs(actual[0] - BANDIT.gradient(BANDIT.first, BANDIT.second)[0]).max() > 0.05


@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("config", TOKEN_LEVEL)
def test_gigpo_gradient_is_scaled_by_the_share_of_each_visit_in_its_baseline(config, omega):
    actual = BANDIT.expected_gradient(config, GigpoConfig(omega=omega, gamma=1.0))
    first, second = BANDIT.gradient(BANDIT.first, BANDIT.second)
    # All rollouts visit the first state; n of G visit the second: the share is E[(n - 1)+]/E[n].
    p, size = softmax(BANDIT.first)[0], BANDIT.group
    visits = 1 - (1 - (1 - p) ** size) / (size * p)
    np.testing.assert_allclose(actual[0], SHARE * (1 + omega) * first, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(actual[1], (SHARE + omega * visits) * second, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gamma", [0.0, 0.6])
def test_discounted_reinforce_has_the_gradient_of_the_discounted_return(gamma):
    actual = BANDIT.expected_gradient(ReinforceLossConfig(), ReinforceConfig(gamma=gamma))
    p, q = softmax(BANDIT.first), softmax(BANDIT.second)
    later = q @ np.array([2.0, -1.0])
    values = np.array([0.5 + gamma * later, 1.0])
    np.testing.assert_allclose(actual[0], p * (values - p @ values), rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(actual[1], BANDIT.gradient(BANDIT.first, BANDIT.second)[1], rtol=1e-6, atol=1e-8)


ANY_RATIO = {"clip_low": 1 - 1e-9, "clip_high": 1e9}


@pytest.mark.parametrize("name", UNIFORM)
def test_sequence_ratios_are_unbiased_for_samples_of_another_policy(name):
    """`rloo_sequence` without bounds is unbiased for any sampling policy."""
    estimator, factor = UNIFORM[name]
    old = (BANDIT.first + np.array([0.8, -0.5]), BANDIT.second + np.array([-1.0, 0.3]))
    config = RlooSequenceLossConfig(**ANY_RATIO)
    actual = BANDIT.expected_gradient(config, estimator, old=old)
    for part, expected in zip(actual, BANDIT.gradient(BANDIT.first, BANDIT.second), strict=True):
        np.testing.assert_allclose(part, factor * expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "config", [ImportanceLossConfig(), PpoClipLossConfig(**ANY_RATIO), CispoLossConfig(clip_low=1.0, clip_high=1e9)]
)
def test_token_ratios_are_unbiased_if_one_choice_differs(config):
    old = (BANDIT.first + np.array([0.8, -0.5]), BANDIT.second)
    expected = BANDIT.gradient(BANDIT.first, BANDIT.second)[0]
    actual = BANDIT.expected_gradient(config, RlooConfig(), old=old)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8)
    uncorrected = BANDIT.expected_gradient(ReinforceLossConfig(), RlooConfig(), old=old)[0]
    assert np.abs(uncorrected - expected).max() > 0.01
