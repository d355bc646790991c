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

from marin_rl.objectives.preference import pair_sums, preference_loss

SETTINGS = [(0.1, 0.0), (0.1, 0.2), (2.5, 0.0), (2.5, 0.49)]
loss_of = functools.partial(jax.jit, static_argnums=(1, 2))(preference_loss)
slope_of = jax.jit(
    jax.grad(lambda m, beta, smoothing: preference_loss(m, beta, smoothing).sum()), static_argnums=(1, 2)
)
sums_of = jax.jit(pair_sums)
SHAPE = (4, 9)


def softplus(x):
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def oracle(margin, beta, smoothing):
    return (1 - smoothing) * softplus(-beta * margin) + smoothing * softplus(beta * margin)


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e4, 1e4), min_size=6, max_size=6))
def test_matches_the_formula(beta, smoothing, margins):
    with jax.enable_x64(True):
        losses = loss_of(jnp.array(margins), beta, smoothing)
    np.testing.assert_allclose(losses, [oracle(m, beta, smoothing) for m in margins], rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
def test_gradient_is_that_of_the_logistic_function(beta, smoothing):
    margins = np.linspace(-30, 30, 61)
    with jax.enable_x64(True):
        slopes = slope_of(jnp.array(margins), beta, smoothing)
    # d/dm = β (σ(βm) - (1 - ε)): Rafailov et al. 2023, section 4, with smoothed labels.
    expected = beta * (1 / (1 + np.exp(-beta * margins)) - (1 - smoothing))
    np.testing.assert_allclose(slopes, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
def test_loss_of_equal_models_is_log_2(beta, smoothing):
    assert float(loss_of(jnp.zeros(()), beta, smoothing)) == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
def test_a_step_raises_the_margin_of_an_equal_pair(beta, smoothing):
    assert float(slope_of(jnp.zeros(1), beta, smoothing)[0]) < 0


def test_label_smoothing_is_the_expected_loss_of_exchanged_labels():
    margins = jnp.linspace(-20, 20, 41)
    mixture = 0.7 * loss_of(margins, 0.5, 0.0) + 0.3 * loss_of(-margins, 0.5, 0.0)
    np.testing.assert_allclose(loss_of(margins, 0.5, 0.3), mixture, rtol=1e-6)


def test_label_smoothing_is_least_at_the_odds_of_the_labels():
    best = math.log(0.8 / 0.2) / 0.5
    slopes = slope_of(jnp.array([best - 0.1, best, best + 0.1]), 0.5, 0.2)
    assert slopes[0] < 0 < slopes[2]
    assert abs(float(slopes[1])) < 1e-7


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
def test_extreme_margins_are_finite(beta, smoothing):
    margins = jnp.array([-1e30, -1e6, 1e6, 1e30], jnp.float32)
    assert np.isfinite(loss_of(margins, beta, smoothing)).all()
    assert np.isfinite(slope_of(margins, beta, smoothing)).all()


def tokens_of(seed, pairs=5):
    """Tokens of pairs in random places, each with both signs, and padding with NaN."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, pairs, SHAPE)
    signs = np.where(ids >= 0, rng.choice([1.0, -1.0, 0.0], SHAPE), 0.0)
    logprobs, reference = np.where(signs == 0, np.nan, -rng.exponential(size=(2, *SHAPE)))
    return logprobs, reference, signs, np.where(signs == 0, 0.0, rng.uniform(size=SHAPE)), ids


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length_normalized", [False, True])
def test_sums_match_loops(seed, length_normalized):
    logprobs, reference, signs, weights, ids = tokens_of(seed)
    factors = signs.copy()
    for place in zip(*np.nonzero(signs), strict=True):
        same = [q for q in np.ndindex(SHAPE) if ids[q] == ids[place] and signs[q] == signs[place]]
        factors[place] /= len(same) if length_normalized else 1
    with jax.enable_x64(True):
        sums = sums_of(*map(jnp.array, (logprobs, reference, factors, weights, ids)))
    for pair in range(ids.size):
        tokens = [q for q in np.ndindex(SHAPE) if ids[q] == pair and signs[q] != 0]
        chosen, rejected = ([q for q in tokens if signs[q] == sign] for sign in (1, -1))
        ratios = [math.fsum(logprobs[q] - reference[q] for q in answer) for answer in (chosen, rejected)]
        lengths = [max(len(answer), 1) if length_normalized else 1 for answer in (chosen, rejected)]
        expected = [
            ratios[0] / lengths[0] - ratios[1] / lengths[1],
            *ratios,
            *(math.fsum(logprobs[q] for q in answer) for answer in (chosen, rejected)),
            math.fsum(weights[q] for q in tokens),
        ]
        np.testing.assert_allclose([column[pair] for column in sums], expected, rtol=1e-12, atol=1e-12)


def test_order_and_place_of_pairs_do_not_matter():
    arrays = tokens_of(0)
    place = np.random.default_rng(1).permutation(arrays[0].size)
    exchange = np.array([3, 0, 4, 2, 1, -1])
    moved = [array.reshape(-1)[place].reshape(SHAPE) for array in (*arrays[:4], exchange[arrays[4]])]
    with jax.enable_x64(True):
        sums, of_moved = (sums_of(*map(jnp.array, given)) for given in (arrays, moved))
    for column, of_moved_column in zip(sums, of_moved, strict=True):
        np.testing.assert_allclose(of_moved_column[exchange[:5]], column[:5], rtol=1e-12)


def test_exchanged_answers_negate_the_margin():
    logprobs, reference, signs, weights, ids = map(jnp.array, tokens_of(2))
    given, exchanged = (sums_of(logprobs, reference, s, weights, ids) for s in (signs, -signs))
    np.testing.assert_allclose(given.margins, -exchanged.margins, rtol=1e-6)
    assert (given.chosen_logratios == exchanged.rejected_logratios).all()


@pytest.mark.medium
def test_gradient_reaches_answer_tokens_only_with_their_sign():
    logprobs, reference, signs, weights, ids = map(jnp.array, tokens_of(3))

    def loss(logprobs):
        sums = pair_sums(logprobs, reference, signs, weights, ids)
        return jnp.sum(sums.weights * preference_loss(sums.margins, 0.3))

    gradient = np.array(jax.grad(loss)(jnp.nan_to_num(logprobs)))
    assert (np.sign(gradient) == -np.sign(signs)).all()
    assert np.isfinite(np.array(jax.grad(loss)(logprobs))).all()
