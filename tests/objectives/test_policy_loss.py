# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives.advantages import dr_grpo_advantages, rloo_advantages
from marin_rl.objectives.aggregation import SequenceSumConfig, row_rollout_ids
from marin_rl.objectives.policy_loss import (
    ImportanceLossConfig,
    PolicyLossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    policy_ratio,
)

CONFIGS = [
    ReinforceLossConfig(),
    ImportanceLossConfig(),
    PpoClipLossConfig(),
    PpoClipLossConfig(clip_low=0.1, clip_high=0.4),
    PpoClipLossConfig(dual_clip=3.0),
]


def oracle(config, logprob, old, advantage):
    """The term and whether clipping holds, for one token, in Python floats."""
    ratio = math.exp(max(-20.0, min(20.0, logprob - old)))
    match config:
        case ReinforceLossConfig():
            return -advantage * logprob, False
        case ImportanceLossConfig():
            return -advantage * ratio, False
        case PpoClipLossConfig(clip_low=low, clip_high=high, dual_clip=dual):
            inside = min(max(ratio, 1 - low), 1 + high)
            term = max(-advantage * ratio, -advantage * inside)
            clipped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
            if dual is not None and advantage < 0:
                clipped = clipped or ratio > dual
                term = min(term, -dual * advantage)
            return term, clipped


token = st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-5, 5))
close = st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-5, 5))


@pytest.mark.parametrize("config", CONFIGS)
@settings(deadline=None, max_examples=40)
@given(st.lists(token | close, min_size=5, max_size=5))
def test_matches_the_formula(config, tokens):
    with jax.enable_x64(True):
        terms, clipped = config.per_token(*(jnp.array(column) for column in np.array(tokens).T))
    expected = [oracle(config, *token) for token in tokens]
    np.testing.assert_allclose(terms, [term for term, _ in expected], rtol=1e-9, atol=1e-12)
    # A product -A·r can round onto -A·(1 ± ε) for a subnormal A; there is nothing to clip there.
    counted = np.abs(np.array(tokens)[:, 2]) > 1e-9
    assert np.array(clipped)[counted].tolist() == np.array([flag for _, flag in expected])[counted].tolist()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_sign_rule(config, advantage):
    """Descent raises the probability of a token of positive advantage, and lowers that of a negative one."""
    old = jnp.float32(-1.0)
    gradient = jax.grad(lambda x: config.per_token(x, old, jnp.float32(advantage)).terms)(old)
    assert float(gradient) == pytest.approx(-advantage)


@pytest.mark.parametrize("config", CONFIGS)
def test_zero_advantage_gives_no_term_and_no_gradient(config):
    zero, old = jnp.zeros(2), jnp.array([-1.0, -3.0])
    gradient = jax.grad(lambda x: config.per_token(x, old, zero).terms.sum())(jnp.array([-3.0, -1.0]))
    assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("config", CONFIGS)
def test_gradient_is_the_finite_difference(config):
    rng = np.random.default_rng(0)
    old = rng.uniform(-3, 0, 200)
    logprobs, advantages = old + rng.normal(scale=0.8, size=200), rng.normal(size=200)
    step = 1e-6
    with jax.enable_x64(True):

        def total(x):
            return config.per_token(jnp.array(x), jnp.array(old), jnp.array(advantages)).terms

        gradient = jax.grad(lambda x: total(x).sum())(jnp.array(logprobs))
        difference = (total(logprobs + step) - total(logprobs - step)) / (2 * step)
    np.testing.assert_allclose(gradient, difference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS[2:])
def test_clipped_is_exactly_where_the_gradient_vanishes(config):
    rng = np.random.default_rng(1)
    old = jnp.array(rng.uniform(-3, 0, 500), jnp.float32)
    logprobs = old + jnp.array(rng.normal(scale=1.0, size=500), jnp.float32)
    advantages = jnp.array(rng.choice([-1.5, 1.5], 500), jnp.float32)
    clipped = config.per_token(logprobs, old, advantages).clipped
    gradient = jax.grad(lambda x: config.per_token(x, old, advantages).terms.sum())(logprobs)
    assert 0 < clipped.sum() < 500
    assert (clipped == (gradient == 0)).all()


@pytest.mark.parametrize(("log_ratio", "advantage", "clipped"), [
    (math.log(1.21), 1.0, True),
    (math.log(1.19), 1.0, False),
    (math.log(0.79), 1.0, False),
    (math.log(0.79), -1.0, True),
    (math.log(0.81), -1.0, False),
    (math.log(1.21), -1.0, False),
    (math.log(2.9), -1.0, False),
    (math.log(3.1), -1.0, True),
    (math.log(3.1), 1.0, True),
])  # fmt: skip
def test_which_side_clips_for_which_sign(log_ratio, advantage, clipped):
    config = PpoClipLossConfig(dual_clip=3.0)
    terms = config.per_token(jnp.float32(log_ratio), jnp.float32(0.0), jnp.float32(advantage))
    assert bool(terms.clipped) is clipped


def test_ratio_is_clamped():
    ratio = policy_ratio(jnp.array([0.0, -900.0]), jnp.array([-900.0, 0.0]))
    np.testing.assert_allclose(ratio, [math.exp(20), math.exp(-20)], rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_impossible_differences_stay_finite_in_float32(config):
    logprobs, old = jnp.array([0.0, -1e30]), jnp.array([-1e30, 0.0])
    for advantage in (-3.0, 3.0):

        def total(x, advantage=advantage):
            return config.per_token(x, old, jnp.full(2, advantage)).terms.sum()

        assert math.isfinite(total(logprobs))
        assert np.isfinite(jax.grad(total)(logprobs)).all()


class TestBandit:
    """One-token rollouts of a softmax policy: the expected gradient over *all* groups, against the closed form."""

    logits = np.array([0.4, -0.2, 0.9])
    rewards = np.array([1.0, 0.0, 3.0])
    group = 3

    def policy_gradient(self):
        """∂/∂logit_a of -E[R] = -π_a (R_a - E[R])."""
        policy = np.exp(self.logits) / np.exp(self.logits).sum()
        return -policy * (self.rewards - policy @ self.rewards)

    def expected_gradient(self, config, advantages_of):
        policy = np.exp(self.logits) / np.exp(self.logits).sum()
        groups = np.array(list(itertools.product(range(3), repeat=self.group)))
        chances = policy[groups].prod(axis=1)
        advantages = np.array([advantages_of(self.rewards[actions].tolist()) for actions in groups])
        weights = SequenceSumConfig().loss_weights(
            np.ones((self.group, 1), bool), row_rollout_ids(np.arange(self.group), 1)
        )
        with jax.enable_x64(True):
            old = jnp.array(np.log(policy)[groups])

            def loss(logits):
                logprobs = jax.nn.log_softmax(logits)[groups]
                terms = config.per_token(logprobs, old, jnp.array(advantages)).terms
                return jnp.sum(jnp.array(chances)[:, None] * weights[:, 0] * terms)

            return np.array(jax.grad(loss)(jnp.array(self.logits)))

    @pytest.mark.parametrize("config", CONFIGS)
    def test_rloo_is_unbiased(self, config):
        actual = self.expected_gradient(config, rloo_advantages)
        np.testing.assert_allclose(actual, self.policy_gradient(), atol=1e-7)

    @pytest.mark.parametrize("config", CONFIGS)
    def test_dr_grpo_is_short_by_the_share_of_itself_in_its_baseline(self, config):
        actual = self.expected_gradient(config, dr_grpo_advantages)
        np.testing.assert_allclose(actual, self.policy_gradient() * (1 - 1 / self.group), atol=1e-7)


def test_configs_are_chosen_by_type():
    assert draccus.decode(PolicyLossConfig, {"type": "reinforce"}) == ReinforceLossConfig()
    assert draccus.decode(PolicyLossConfig, {"type": "importance"}) == ImportanceLossConfig()
    fields = {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}
    assert draccus.decode(PolicyLossConfig, fields) == PpoClipLossConfig(0.1, 0.3, 3.0)


@pytest.mark.parametrize(("fields", "message"), [
    ({"clip_low": -0.1}, r"policy_loss\.clip_low is -0\.1"),
    ({"clip_low": 1.0}, r"policy_loss\.clip_low is 1\.0"),
    ({"clip_high": -0.1}, r"policy_loss\.clip_high is -0\.1"),
    ({"clip_high": math.nan}, r"policy_loss\.clip_high is nan"),
    ({"dual_clip": 1.0}, r"policy_loss\.dual_clip is 1\.0"),
    ({"dual_clip": math.nan}, r"policy_loss\.dual_clip is nan"),
])  # fmt: skip
def test_impossible_bounds_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        PpoClipLossConfig(**fields)
