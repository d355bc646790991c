# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives.kl import (
    KlConfig,
    KlEstimator,
    LossKlConfig,
    NoKlConfig,
    RewardKlConfig,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_plus,
)

LOGPROBS = np.array([-1.0, -2.0, -0.5])
REFERENCE = np.array([-1.5, -1.0, -0.5])
WORKED = {
    "k1": (kl_k1, [0.5, -1.0, 0.0]),
    "k2": (kl_k2, [0.125, 0.5, 0.0]),
    "k3": (kl_k3, [0.106531, 0.718282, 0.0]),
    "k3_plus": (kl_k3_plus, [0.106531, 0.718282, 0.0]),
}


gradients_of = {
    name: jax.jit(jax.grad(lambda x, reference, estimator=estimator: estimator(x, reference).sum()))
    for name, (estimator, _) in WORKED.items()
}


def oracle(name, logprob, reference):
    d = max(-20.0, min(20.0, reference - logprob))
    k3 = math.exp(d) - 1 - d
    return {"k1": -d, "k2": d * d / 2, "k3": k3, "k3_plus": k3}[name]


@pytest.mark.parametrize("name", WORKED)
def test_worked_example(name):
    estimator, expected = WORKED[name]
    np.testing.assert_allclose(estimator(jnp.array(LOGPROBS), jnp.array(REFERENCE)), expected, atol=1e-6)


@pytest.mark.parametrize("name", WORKED)
@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(-60, 0), st.floats(-60, 0)), min_size=4, max_size=4))
def test_matches_the_formula(name, pairs):
    logprobs, reference = np.array(pairs).T
    with jax.enable_x64(True):
        actual = WORKED[name][0](jnp.array(logprobs), jnp.array(reference))
    np.testing.assert_allclose(actual, [oracle(name, *pair) for pair in pairs], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("difference", [1e-3, 1e-4, 1e-5, 1e-6])
def test_k3_is_accurate_for_close_policies(difference):
    # exp(d) - 1 - d in float32 has an error of about 6e-8, which exceeds k3 below d = 3e-4.
    k3 = kl_k3(jnp.float32(0.0), jnp.float32(difference))
    assert abs(float(k3) - difference**2 / 2) < 1e-7 * difference + difference**3


@pytest.mark.parametrize("name", WORKED)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_differences_are_clamped_and_keep_their_sign(name, sign):
    estimator = WORKED[name][0]
    far = estimator(jnp.float32(-500 if sign > 0 else 0), jnp.float32(0 if sign > 0 else -500))
    assert float(far) == pytest.approx(oracle(name, 0.0, 20.0 * sign), rel=1e-5)
    assert math.isfinite(far)


@pytest.mark.parametrize("name", WORKED)
def test_gradient_is_the_finite_difference(name):
    # k3_plus has the derivative of k2, not of its value.
    differentiated = kl_k2 if name == "k3_plus" else WORKED[name][0]
    rng = np.random.default_rng(0)
    logprobs, reference = rng.uniform(-5, 0, (2, 200))
    step = 1e-6
    with jax.enable_x64(True):
        gradient = gradients_of[name](logprobs, reference)
        above, below = (np.array(differentiated(jnp.array(logprobs + s), jnp.array(reference))) for s in (step, -step))
    np.testing.assert_allclose(gradient, (above - below) / (2 * step), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(-60, 0, width=32), st.floats(-60, 0, width=32)), min_size=4, max_size=4))
def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(pairs):
    logprobs, reference = jnp.array(np.array(pairs, np.float32).T)
    assert kl_k3_plus(logprobs, reference).tolist() == kl_k3(logprobs, reference).tolist()
    plus, k2 = (gradients_of[name](logprobs, reference).tolist() for name in ("k3_plus", "k2"))
    assert plus == k2


@pytest.mark.parametrize("name", WORKED)
def test_sign_of_the_gradient(name):
    """Gradient descent on k2, k3 and k3_plus moves log π towards log π_ref."""
    gradient = gradients_of[name](jnp.array(LOGPROBS), jnp.array(REFERENCE))
    assert np.sign(gradient).tolist() == ([1.0, 1.0, 1.0] if name == "k1" else [1.0, -1.0, 0.0])


class TestExpectedGradients:
    """Exact expected gradient of each estimator on a categorical policy, summed over all actions."""

    logits = np.array([0.3, -0.7, 1.1, 0.2])
    reference = np.log(np.array([0.4, 0.3, 0.2, 0.1]))

    def expected_gradient(self, estimator):
        with jax.enable_x64(True):
            probabilities = jax.nn.softmax(jnp.array(self.logits))

            def loss(logits):
                return jnp.sum(probabilities * estimator(jax.nn.log_softmax(logits), jnp.array(self.reference)))

            return np.array(jax.grad(loss)(jnp.array(self.logits)))

    def kl_gradient(self, reverse):
        """Closed form: ∇KL(π‖ref)_a = π_a (log π_a/ref_a - KL);  ∇KL(ref‖π)_a = π_a - ref_a."""
        policy = np.exp(self.logits) / np.exp(self.logits).sum()
        if not reverse:
            return policy - np.exp(self.reference)
        log_ratio = np.log(policy) - self.reference
        return policy * (log_ratio - np.sum(policy * log_ratio))

    def test_k1_has_zero_expected_gradient(self):
        np.testing.assert_allclose(self.expected_gradient(kl_k1), 0.0, atol=1e-12)

    @pytest.mark.parametrize("estimator", [kl_k2, kl_k3_plus])
    def test_k2_and_k3_plus_have_the_gradient_of_the_reverse_kl(self, estimator):
        np.testing.assert_allclose(self.expected_gradient(estimator), self.kl_gradient(reverse=True), atol=1e-12)

    def test_k3_has_the_gradient_of_the_forward_kl(self):
        actual = self.expected_gradient(kl_k3)
        np.testing.assert_allclose(actual, self.kl_gradient(reverse=False), atol=1e-12)
        assert np.abs(actual - self.kl_gradient(reverse=True)).max() > 0.01

    def test_k1_and_k3_are_unbiased_and_k2_is_biased(self):
        policy = np.exp(self.logits) / np.exp(self.logits).sum()
        exact = np.sum(policy * (np.log(policy) - self.reference))
        with jax.enable_x64(True):
            k1, k2, k3 = (
                float(policy @ np.array(estimator(jnp.log(policy), jnp.array(self.reference))))
                for estimator in (kl_k1, kl_k2, kl_k3)
            )
        assert k1 == pytest.approx(exact, abs=1e-12)
        assert k3 == pytest.approx(exact, abs=1e-12)
        assert k2 == pytest.approx(np.sum(policy * (np.log(policy) - self.reference) ** 2) / 2, abs=1e-12)
        assert abs(k2 - exact) > 1e-3


def test_in_reward_penalises_the_reward_only():
    config = RewardKlConfig(beta=0.1)
    np.testing.assert_allclose(config.reward_penalty(np.array([5.0, -1.0])), [0.5, -0.1])
    assert config.loss_terms(jnp.array(LOGPROBS), jnp.array(REFERENCE)).tolist() == [0.0] * 3
    assert config.needs_reference


@pytest.mark.parametrize("name", WORKED)
def test_in_loss_penalises_the_loss_only(name):
    config = LossKlConfig(beta=0.5, estimator=KlEstimator(name))
    terms = config.loss_terms(jnp.array(LOGPROBS), jnp.array(REFERENCE))
    np.testing.assert_allclose(terms, np.multiply(0.5, WORKED[name][1]), atol=1e-6)
    assert config.reward_penalty(np.array([5.0, -1.0])).tolist() == [0.0, 0.0]
    assert config.needs_reference


@pytest.mark.parametrize("estimator", [KlEstimator.K2, KlEstimator.K3, KlEstimator.K3_PLUS])
def test_in_loss_gradient_points_towards_the_reference(estimator):
    config = LossKlConfig(beta=1.0, estimator=estimator)
    gradient = jax.grad(lambda x: config.loss_terms(x, jnp.array(REFERENCE)).sum())(jnp.array(LOGPROBS))
    # Gradient descent lowers the first (above its reference), raises the second (below it), keeps the third.
    assert np.sign(gradient).tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("config", [NoKlConfig(), RewardKlConfig(beta=0.0), LossKlConfig(beta=0.0)])
def test_no_reference_is_needed_with_a_zero_coefficient(config):
    assert not config.needs_reference
    assert config.beta == 0.0
    assert config.loss_terms(jnp.array(LOGPROBS), jnp.full(3, jnp.nan)).tolist() == [0.0] * 3
    assert config.reward_penalty(np.array([5.0])).tolist() == [0.0]


def test_configs_are_selected_by_type():
    assert draccus.decode(KlConfig, {"type": "none"}) == NoKlConfig()
    assert draccus.decode(KlConfig, {"type": "in_reward", "beta": 0.05}) == RewardKlConfig(beta=0.05)
    assert draccus.decode(KlConfig, {"type": "in_loss", "beta": 0.01, "estimator": "k3"}) == LossKlConfig(
        beta=0.01, estimator=KlEstimator.K3
    )
