# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An optimizer wrapper that skips updates with non-finite gradients."""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax


class SkipState(NamedTuple):
    """State of [`skip_nonfinite_updates`][marin_rl.learner.skip_nonfinite_updates.skip_nonfinite_updates]."""

    inner: optax.OptState
    """State of the wrapped optimizer."""
    grad_norm: jax.Array
    """Global L2 norm of the last gradient, before clipping."""
    finite: jax.Array
    """Whether the last gradient and loss were finite; if not, the weights and `inner` are unchanged."""


def skip_nonfinite_updates(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `optimizer` so that a step with a NaN or infinite gradient or loss changes nothing.

    Weights and moments keep their values from before the step. The caller reads `finite` and `grad_norm` from the new
    state and decides how to proceed.

    Args:
        optimizer: any optax transformation.

    Returns:
        The same transformation with a [`SkipState`][marin_rl.learner.skip_nonfinite_updates.SkipState] around its
        state. Its `update` takes the loss as keyword `loss`, as levanter's trainer passes it.
    """
    wrapped = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> SkipState:
        return SkipState(wrapped.init(params), jnp.zeros((), jnp.float32), jnp.array(True))

    def update(updates, state: SkipState, params=None, *, loss=0.0, **extra_args):
        grad_norm = optax.tree.norm(updates).astype(jnp.float32)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        stepped, inner = wrapped.update(updates, state.inner, params, loss=loss, **extra_args)
        stepped = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), stepped)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        return stepped, SkipState(inner, grad_norm, finite)

    return optax.GradientTransformationExtraArgs(init, cast(optax.TransformUpdateExtraArgsFn, update))
