# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The state of training, and the optimizer: AdamW with settings of every step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array
from levanter.models.lm_model import LmHeadModel

from marin_rl.models.lora import Adapter
from marin_rl.serving.tinker.records import AdamParams


class TrainState(eqx.Module):
    """What a training client changes."""

    trained: LmHeadModel | Adapter
    """Weights, or adapter, in the type of parameters."""
    mean: Any
    """Adam's moving average of the gradient."""
    square: Any
    """Adam's moving average of its square."""
    steps: jax.Array
    """int32, number of steps that these averages contain."""
    gradient: Any
    """float32, sum of the gradients since the last step."""


def new_state(trained: Any) -> TrainState:
    """Return the state before the first step."""

    def zeros(dtype: Any = None) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype), trained)

    return TrainState(trained, zeros(), zeros(), jnp.zeros((), jnp.int32), zeros(jnp.float32))


def gradient_norm(gradient: Any) -> jax.Array:
    """Return the global L2 norm of a sum of gradients; infinite also if its square overflows."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))


def adam_step(state: TrainState, params: AdamParams) -> tuple[TrainState, dict[str, jax.Array]]:
    """Apply the sum of the gradients `g` to the weights `p`, and zero it.

    ```
    g ← g · min(1, clip / |g|)     if clip > 0
    m ← β1 m + (1 - β1) g,   v ← β2 v + (1 - β2) g²
    p ← p - lr · wd · p - lr · m / (1 - β1ᵗ) / (√(v / (1 - β2ᵗ)) + ε)
    ```

    This is AdamW of torch (Loshchilov & Hutter 2019). The settings are traced, so that no value compiles another
    program.

    Returns:
        The new state, the norm of `g` as `grad_norm`, and as `fits` whether the new weights and averages are finite. If
        they are not, the state is as before. If the norm is not finite, only `g` becomes zero.
    """
    norm = gradient_norm(state.gradient)
    clip = jnp.where(params.grad_clip_norm > 0, params.grad_clip_norm, jnp.inf)
    factor = jnp.where(norm > clip, clip / norm, 1.0)
    steps = state.steps + 1
    first, second = (1 - beta ** steps.astype(jnp.float32) for beta in (params.beta1, params.beta2))

    def update(weight: Array, mean: Array, square: Array, gradient: Array) -> tuple[Array, ...]:
        scaled = gradient * factor
        new_mean = params.beta1 * mean + (1 - params.beta1) * scaled
        new_square = params.beta2 * square + (1 - params.beta2) * jnp.square(scaled)
        change = new_mean / first / (jnp.sqrt(new_square / second) + params.eps) + params.weight_decay * weight
        new = (weight - params.learning_rate * change, new_mean, new_square)
        return tuple(value.astype(old.dtype) for value, old in zip(new, (weight, mean, square), strict=True))

    trees = (state.trained, state.mean, state.square, state.gradient)
    leaves = list(zip(*map(jax.tree.leaves, trees), strict=True))
    finite = jnp.isfinite(norm)
    # Computed twice: the new values of all leaves until the last one is checked would take the memory of the state.
    checked = (update(*jax.lax.optimization_barrier(of_leaf)) for of_leaf in leaves)
    fits = ~finite | jnp.all(jnp.array([jnp.isfinite(value).all() for values in checked for value in values]))
    updated = [
        [jnp.where(finite & fits, new, old) for new, old in zip(update(*of_leaf), of_leaf, strict=False)]
        for of_leaf in leaves
    ]
    trained, mean, square = (
        jax.tree.unflatten(jax.tree.structure(tree), list(new))
        for tree, new in zip(trees, zip(*updated, strict=True), strict=False)
    )
    gradient = jax.tree.map(lambda leaf: jnp.where(fits, 0.0, leaf), state.gradient)
    new_state = TrainState(trained, mean, square, jnp.where(finite & fits, steps, state.steps), gradient)
    return new_state, {"grad_norm": norm, "fits": fits}
