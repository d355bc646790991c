# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.models.mixture import MixtureShape, choose, dense_mixture, sorted_mixture

pytestmark = pytest.mark.both_lines

EMBED, MLP, EXPERTS = 5, 7, 6
SHAPE = MixtureShape(
    layers=1, experts=EXPERTS, per_token=2, normalizes=True, balance_coefficient=0.0, z_coefficient=0.0
)
Arrays = list[np.ndarray]


def arrays(tokens: int, top: int, seed: int) -> Arrays:
    """Return inputs, chosen experts, their weights, and the matrices of the experts."""
    rng = np.random.default_rng(seed)
    shapes = (EXPERTS, EMBED, MLP), (EXPERTS, EMBED, MLP), (EXPERTS, MLP, EMBED)
    chosen = np.array([rng.permutation(EXPERTS)[:top] for _ in range(tokens)]).reshape(tokens, top)
    x, weights = rng.normal(size=(tokens, EMBED)), rng.uniform(size=(tokens, top))
    return [x, chosen, weights, *(rng.normal(size=shape) for shape in shapes)]


def by_loop(x: np.ndarray, chosen: np.ndarray, weights: np.ndarray, gate: Arrays, up: Arrays, down: Arrays):
    """Return `Σ_e w_e · down_e(tanh(gate_e x) · up_e x)` in float64, for experts that have matrices."""
    out = np.zeros_like(x)
    for token, experts in enumerate(chosen):
        for expert, weight in zip(experts.tolist(), weights[token], strict=True):
            if 0 <= expert < len(gate):
                hidden = np.tanh(x[token] @ gate[expert]) * (x[token] @ up[expert])
                out[token] += weight * (hidden @ down[expert])
    return out


@pytest.mark.medium
@pytest.mark.parametrize("form", [dense_mixture, sorted_mixture])
@settings(max_examples=20, deadline=None)
@given(tokens=st.sampled_from([1, 9]), top=st.sampled_from([1, 2, 6]), seed=st.integers(0, 10), own=st.booleans())
def test_both_forms_add_up_the_chosen_experts(form, tokens: int, top: int, seed: int, own: bool):
    """Also on a device that has experts 2 to 4 of 6, and if all tokens choose one expert."""
    x, chosen, weights, *matrices = arrays(tokens, top, seed)
    if seed == 0:
        chosen[:] = chosen[0]
    if not own:
        chosen, matrices = chosen - 2, [matrix[2:5] for matrix in matrices]
    expected = by_loop(x, chosen, weights, *matrices)
    inputs = (
        jnp.asarray(array, np.int32 if array is chosen else np.float32) for array in (x, chosen, weights, *matrices)
    )
    found = form(*inputs, activation=jnp.tanh)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_both_forms_are_equal():
    x, chosen, weights, *matrices = (jnp.asarray(array) for array in arrays(9, 2, 0))
    direction = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    def gradients(form):
        def loss(x, weights, *matrices):
            return jnp.sum(direction * form(x, chosen, weights, *matrices, activation=jnp.tanh))

        return jax.grad(loss, argnums=range(5))(x, weights, *matrices)

    for dense, in_groups in zip(gradients(dense_mixture), gradients(sorted_mixture), strict=True):
        np.testing.assert_allclose(dense, in_groups, rtol=1e-4, atol=1e-4)


@pytest.mark.medium
def test_rows_in_no_group_may_hold_anything(monkeypatch: pytest.MonkeyPatch):
    """Some kernels do not write rows of experts of other devices, in the backward pass either."""
    real = jax.lax.ragged_dot

    def in_groups(rows, sizes):
        return (jnp.arange(len(rows)) < sizes.sum())[:, None]

    @jax.custom_vjp
    def leaves_rows(rows, matrices, sizes):
        return jnp.where(in_groups(rows, sizes), real(rows, matrices, sizes), jnp.nan)

    def forward(rows, matrices, sizes):
        return leaves_rows(rows, matrices, sizes), (rows, matrices, sizes)

    def backward(inputs, cotangent):
        rows, matrices, sizes = inputs
        has_group = in_groups(rows, sizes)
        # Reads the rows in groups only.
        pull = jax.vjp(lambda *both: real(*both, sizes), jnp.where(has_group, rows, 0), matrices)[1]
        of_rows, of_matrices = pull(jnp.where(has_group, cotangent, 0))
        return jnp.where(has_group, of_rows, jnp.nan), of_matrices, None

    leaves_rows.defvjp(forward, backward)
    x, chosen, weights, *matrices = (jnp.asarray(array) for array in arrays(9, 2, 0))
    own = [matrix[2:5] for matrix in matrices]

    def gradients(form):
        return jax.grad(
            lambda *args: jnp.sum(form(args[0], chosen - 2, *args[1:], activation=jnp.tanh) ** 2), range(5)
        )(x, weights, *own)

    expected = gradients(dense_mixture)
    monkeypatch.setattr(jax.lax, "ragged_dot", leaves_rows)
    for found, array in zip(gradients(sorted_mixture), expected, strict=True):
        np.testing.assert_allclose(found, array, rtol=1e-4, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(normalizes=st.booleans(), seed=st.integers(0, 1000), given_share=st.sampled_from([0.0, 0.5, 1.0]))
def test_weights_are_the_probabilities_of_the_chosen_experts(normalizes: bool, seed: int, given_share: float):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, 4, EXPERTS)).astype(np.float32)
    given_experts = np.array([rng.permutation(EXPERTS)[:2] for _ in range(12)], np.uint8).reshape(3, 4, 2)
    is_given = rng.uniform(size=(3, 4)) < given_share
    given_experts[~is_given] = 255
    shape = SHAPE._replace(normalizes=normalizes)
    chosen = choose(jnp.asarray(logits), shape, jnp.asarray(given_experts))
    own = np.argsort(-logits, axis=-1)[..., :2]
    experts = np.where(is_given[..., None], given_experts, own)
    probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True)
    weights = np.take_along_axis(probabilities, experts, -1)
    if normalizes:
        weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_array_equal(chosen.experts, experts)
    np.testing.assert_allclose(chosen.weights, weights, rtol=1e-5)
    differs = (np.sort(experts, axis=-1) != np.sort(own, axis=-1)).any(axis=-1)
    np.testing.assert_array_equal(chosen.differs, differs)


def test_equal_logits_choose_the_first_experts():
    assert choose(jnp.zeros((1, EXPERTS)), SHAPE).experts.tolist() == [[0, 1]]


def test_no_gradient_flows_through_the_choice():
    """The gradient of the weights is that of the probabilities of constant experts."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, EXPERTS)), jnp.float32)
    experts = np.argsort(-logits, axis=-1)[:, :2]
    direction = jnp.asarray(np.random.default_rng(1).normal(size=experts.shape), jnp.float32)

    def constant(logits):
        weights = jnp.take_along_axis(jax.nn.softmax(logits), experts, -1)
        return jnp.sum(direction * weights / weights.sum(-1, keepdims=True))

    def chosen(logits):
        return jnp.sum(direction * choose(logits, SHAPE).weights)

    np.testing.assert_allclose(jax.grad(chosen)(logits), jax.grad(constant)(logits), atol=1e-6)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (60000, np.uint16)])
def test_the_type_of_recorded_experts_has_a_number_for_none(experts: int, dtype: type):
    found = SHAPE._replace(experts=experts).dtype
    assert found == dtype
    assert np.iinfo(found).max >= experts
