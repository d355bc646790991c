# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An optimizer that never lets a broken gradient touch the weights."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax


class GuardState(NamedTuple):
    """State of [`guard_updates`][marin_rl.learner.guard.guard_updates]."""

    inner: optax.OptState
    """State of the guarded optimizer."""
    grad_norm: jax.Array
    """Global L2 norm of the last gradient, before clipping."""
    finite: jax.Array
    """Whether the last gradient and loss were finite; if not, neither weights nor `inner` moved."""


def guard_updates(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer` so that a step whose gradient or loss is NaN or infinite changes nothing.

    The caller reads `finite` and `grad_norm` off the new state and decides what to do; here the only
    promise is that weights and moments are those from before the step.

    Args:
        optimizer: any optax transformation.

    Returns:
        The same transformation with a [`GuardState`][marin_rl.learner.guard.GuardState] around its state.
        Its `update` takes the loss as keyword `loss`, as levanter's trainer passes it.
    """
    guarded = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> GuardState:
        return GuardState(guarded.init(params), jnp.zeros((), jnp.float32), jnp.array(True))

    def update(updates, state: GuardState, params=None, *, loss=0.0, **extra_args):
        grad_norm = optax.tree.norm(updates).astype(jnp.float32)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        stepped, inner = guarded.update(updates, state.inner, params, loss=loss, **extra_args)
        stepped = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), stepped)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        return stepped, GuardState(inner, grad_norm, finite)

    return optax.GradientTransformationExtraArgs(init, cast(optax.TransformUpdateExtraArgsFn, update))
