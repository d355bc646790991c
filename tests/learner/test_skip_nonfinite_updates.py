# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marin_rl.learner.train_step import SkipState, skip_nonfinite_updates

CLIP = 1.0
OPTIMIZER = skip_nonfinite_updates(optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1)))
PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([[0.5]])}
GRADS = {"w": jnp.array([3.0, 0.0, -4.0]), "b": jnp.array([[12.0]])}


@jax.jit
def apply(grads, state: SkipState, params, loss):
    updates, state = OPTIMIZER.update(grads, state, params, loss=loss)
    return optax.apply_updates(params, updates), state


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def broken(value: float):
    return {"w": GRADS["w"].at[1].set(value), "b": GRADS["b"]}


BROKEN_STEPS = {
    "nan gradient": (broken(np.nan), 1.0),
    "infinite gradient": (broken(np.inf), 1.0),
    "nan loss": (GRADS, np.nan),
    "infinite loss": (GRADS, -np.inf),
}


@pytest.fixture(params=BROKEN_STEPS)
def broken_step(request: pytest.FixtureRequest):
    return BROKEN_STEPS[request.param]


def test_skipped_update_leaves_weights_and_moments_bit_identical(broken_step) -> None:
    params, state = apply(GRADS, OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    after_params, after = apply(broken_step[0], state, params, broken_step[1])
    assert not bool(after.finite)
    assert bits(after_params) == bits(params)
    assert bits(after.inner) == bits(state.inner)


def test_training_continues_after_a_skipped_update(broken_step) -> None:
    params, state = apply(GRADS, OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    skipped_params, skipped = apply(broken_step[0], state, params, broken_step[1])
    expected_params, expected = apply(GRADS, state, params, 1.0)
    found_params, found = apply(GRADS, skipped, skipped_params, 1.0)
    assert bool(found.finite)
    assert bits(found_params) == bits(expected_params)
    assert bits(found.inner) == bits(expected.inner)


def test_finite_update_is_that_of_the_wrapped_optimizer() -> None:
    bare = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(0.1))
    updates, inner = bare.update(GRADS, bare.init(PARAMS), PARAMS)
    found, state = OPTIMIZER.update(GRADS, OPTIMIZER.init(PARAMS), PARAMS, loss=0.5)
    assert bool(state.finite)
    assert bits(found) == bits(updates)
    assert bits(state.inner) == bits(inner)


def test_the_norm_is_the_one_before_clipping() -> None:
    _, state = apply(GRADS, OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    assert float(state.grad_norm) == 13.0 > CLIP
    assert state.grad_norm.dtype == jnp.float32


def test_norm_of_a_nonfinite_gradient_is_reported() -> None:
    _, state = apply(broken(np.nan), OPTIMIZER.init(PARAMS), PARAMS, 1.0)
    assert np.isnan(state.grad_norm)


def test_extra_arguments_reach_the_optimizer() -> None:
    seen = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    wrapped = skip_nonfinite_updates(spy)
    wrapped.update(GRADS, wrapped.init(PARAMS), PARAMS, loss=2.0, obj_fn=print)
    assert seen == {"loss": 2.0, "obj_fn": print}
