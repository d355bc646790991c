# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.objectives.gae import GaeConfig
from marin_rl.objectives.value_loss import explained_variance, value_loss_terms
from tests.objectives.advantage_cases import make_inputs

CLIPS = [None, 0.2, 1.5]
terms_of = functools.partial(jax.jit, static_argnames="clip")(value_loss_terms)
gradient_of = jax.jit(
    jax.grad(lambda v, old, target, clip: value_loss_terms(v, old, target, clip).terms.sum()), static_argnames="clip"
)
number = st.floats(-10, 10)


def oracle(value, old, target, clip):
    if clip is None:
        return (value - target) ** 2 / 2, False
    near = min(max(value, old - clip), old + clip)
    plain, bounded = (value - target) ** 2, (near - target) ** 2
    return max(plain, bounded) / 2, bounded > plain


@pytest.mark.parametrize("clip", CLIPS)
@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(number, number, number), min_size=5, max_size=5))
def test_matches_the_formula(clip, tokens):
    with jax.enable_x64(True):
        terms, clipped = terms_of(*(jnp.array(column) for column in np.array(tokens).T), clip=clip)
    expected = [oracle(*token, clip) for token in tokens]
    np.testing.assert_allclose(terms, [term for term, _ in expected], rtol=1e-12, atol=1e-12)
    assert clipped.tolist() == [flag for _, flag in expected]


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_is_the_finite_difference(clip):
    rng = np.random.default_rng(0)
    values, old, targets = rng.normal(size=(3, 300))
    step = 1e-6
    with jax.enable_x64(True):
        fixed = jnp.array(old), jnp.array(targets)
        gradient = gradient_of(jnp.array(values), *fixed, clip=clip)
        above, below = (np.array(terms_of(jnp.array(values + s), *fixed, clip=clip).terms) for s in (step, -step))
    np.testing.assert_allclose(gradient, (above - below) / (2 * step), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_descent_moves_values_towards_their_targets(clip):
    old = jnp.zeros(2)
    gradient = gradient_of(old, old, jnp.array([1.0, -1.0]), clip=clip)
    assert gradient.tolist() == [-1.0, 1.0]


def test_clipped_tokens_are_those_with_zero_gradient():
    rng = np.random.default_rng(1)
    values, old, targets = jnp.array(rng.normal(size=(3, 500)), jnp.float32)
    clipped = terms_of(values, old, targets, clip=0.2).clipped
    gradient = gradient_of(values, old, targets, clip=0.2)
    assert 0 < clipped.sum() < 500
    assert (clipped == (gradient == 0)).all()


def test_clipping_stops_values_moving_towards_the_target_only():
    old, target = jnp.zeros(2), jnp.ones(2)
    # 0.6 is beyond the bound of 0.5 towards the target; -0.6 is beyond -0.5 away from it.
    terms, clipped = terms_of(jnp.array([0.6, -0.6]), old, target, clip=0.5)
    np.testing.assert_allclose(terms, [0.5 * 0.5**2, 0.5 * 1.6**2], rtol=1e-6)
    assert clipped.tolist() == [True, False]
    gradient = gradient_of(jnp.array([0.6, -0.6]), old, target, clip=0.5)
    np.testing.assert_allclose(gradient, [0.0, -1.6], rtol=1e-6)


def test_worked_example():
    # Value loss against the GAE targets of the worked example.
    inputs = make_inputs(5.0, tokens=[3], values=[1.0, 2.0, 3.0])
    ((result,),) = GaeConfig(gamma=1.0, lam=0.0).compute([[inputs]])
    values = jnp.array(inputs.values, jnp.float32)
    terms = terms_of(values, values, jnp.array(result.value_targets, jnp.float32), clip=0.2).terms
    assert terms.tolist() == [0.5, 0.5, 2.0]


class TestExplainedVariance:
    @given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=9))
    def test_matches_the_definition(self, pairs):
        values, targets = (np.array(column, np.float64) for column in zip(*pairs, strict=True))
        n = len(pairs)
        mean = sum(targets) / n
        left = [t - v for v, t in zip(values, targets, strict=True)]
        total = sum((t - mean) ** 2 for t in targets)
        unexplained = sum((e - sum(left) / n) ** 2 for e in left)
        expected = 1 - unexplained / total if len(set(targets)) > 1 else 0.0
        assert explained_variance(values, targets) == pytest.approx(expected, rel=1e-9, abs=1e-9)

    def test_worked_examples(self):
        targets = np.array([1.0, 2.0, 4.0])
        assert explained_variance(targets, targets) == 1.0
        assert explained_variance(targets - 3.0, targets) == pytest.approx(1.0)
        assert explained_variance(np.full(3, 7.0), targets) == pytest.approx(0.0, abs=1e-12)
        assert explained_variance(-targets, targets) == pytest.approx(-3.0)

    def test_explained_variance_of_equal_targets_is_zero(self):
        # np.var of these values is 2e-34 instead of 0; dividing by it would give -1.5e34.
        assert explained_variance(np.arange(6.0), np.full(6, 0.1)) == 0.0
        assert explained_variance(np.zeros(1), np.ones(1)) == 0.0
        assert explained_variance(np.zeros(0), np.zeros(0)) == 0.0
