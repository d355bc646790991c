# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.objectives import DistillationConfig, distillation_advantages
from marin_rl.objectives.policy_loss import ReinforceLossConfig, TokenBatch

POLICY, TEACHER = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])


def test_a_loop_in_double_precision_gives_the_same():
    rng = np.random.default_rng(0)
    policy, teacher = (-rng.exponential(8, size=200).astype(np.float32) for _ in range(2))
    expected = [
        -0.7 * min(max(float(of_policy) - float(of_teacher), -20.0), 20.0)
        for of_policy, of_teacher in zip(policy, teacher, strict=True)
    ]
    assert sum(abs(float(a) - float(b)) > 20 for a, b in zip(policy, teacher, strict=True)) > 3
    found = distillation_advantages(policy, teacher, 0.7)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-15)


def test_a_teacher_equal_to_the_policy_gives_exactly_zero():
    logprobs = np.log(POLICY).astype(np.float32)
    assert not distillation_advantages(logprobs, logprobs.copy(), 3.0).any()


def test_tokens_that_the_teacher_prefers_have_a_positive_advantage():
    found = distillation_advantages(np.log(POLICY), np.log(TEACHER), 1.0)
    assert found[0] < 0 == found[1] < found[2]


def gradient(advantages: np.ndarray) -> np.ndarray:
    """Expected gradient of the policy term of one token by the logits of its distribution."""

    def loss(logits: jax.Array) -> jax.Array:
        logprobs, ones = jax.nn.log_softmax(logits), np.ones(3, bool)
        old = jnp.log(jnp.asarray(POLICY))
        batch = TokenBatch(logprobs, old, jnp.asarray(advantages), ones, jnp.arange(3))
        return jnp.sum(POLICY * ReinforceLossConfig().per_token(batch)[0])

    return np.asarray(jax.grad(loss)(jnp.log(jnp.asarray(POLICY))))


def test_expected_gradient_is_that_of_the_reverse_kl_and_not_of_others():
    def reverse_kl(logits: jax.Array) -> jax.Array:
        logprobs = jax.nn.log_softmax(logits)
        return 2.0 * jnp.sum(jnp.exp(logprobs) * (logprobs - np.log(TEACHER)))

    def forward_kl(logits: jax.Array) -> jax.Array:
        return 2.0 * jnp.sum(TEACHER * (np.log(TEACHER) - jax.nn.log_softmax(logits)))

    logits = jnp.log(jnp.asarray(POLICY))
    found = gradient(distillation_advantages(np.log(POLICY), np.log(TEACHER), 2.0))
    np.testing.assert_allclose(found, jax.grad(reverse_kl)(logits), atol=1e-6)
    assert np.abs(found - jax.grad(forward_kl)(logits)).max() > 0.1


@pytest.mark.parametrize("coefficient", [0.0, -1.0, math.nan])
def test_a_coefficient_is_positive(coefficient: float):
    with pytest.raises(ValueError, match=r"DistillationConfig\.coefficient is .*above 0"):
        DistillationConfig(coefficient=coefficient)
