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
from marin_rl.tinker_api.records import AdamParams


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


def adam_step(state: TrainState, params: AdamParams) -> tuple[TrainState, dict[str, jax.Array]]:
    """Apply the sum of the gradients `g` to the weights `p`, and zero it.

    ```
    g ← g · min(1, clip / |g|)     if clip > 0
    m ← β1 m + (1 - β1) g,   v ← β2 v + (1 - β2) g²
    p ← p - lr · wd · p - lr · m / (1 - β1ᵗ) / (√(v / (1 - β2ᵗ)) + ε)
    ```

    This is AdamW of torch (Loshchilov & Hutter 2019). If `g` has NaN or infinity, nothing changes. The settings
    are traced, so that no value compiles another program.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(state.gradient)))
    clip = jnp.where(params.grad_clip_norm > 0, params.grad_clip_norm, jnp.inf)
    factor = jnp.where(norm > clip, clip / norm, 1.0)
    steps = state.steps + 1
    first, second = (1 - beta ** steps.astype(jnp.float32) for beta in (params.beta1, params.beta2))
    finite = jnp.isfinite(norm)

    def update(weight: Array, mean: Array, square: Array, gradient: Array) -> tuple[Array, ...]:
        scaled = gradient * factor
        new_mean = params.beta1 * mean + (1 - params.beta1) * scaled
        new_square = params.beta2 * square + (1 - params.beta2) * jnp.square(scaled)
        change = new_mean / first / (jnp.sqrt(new_square / second) + params.eps) + params.weight_decay * weight
        new = (weight - params.learning_rate * change, new_mean, new_square)
        old = (weight, mean, square)
        return tuple(jnp.where(finite, a, b).astype(b.dtype) for a, b in zip(new, old, strict=True))

    trees = (state.trained, state.mean, state.square, state.gradient)
    leaves = [jax.tree.leaves(tree) for tree in trees]
    updated = zip(*(update(*of_leaf) for of_leaf in zip(*leaves, strict=True)), strict=True)
    trained, mean, square = (
        jax.tree.unflatten(jax.tree.structure(tree), list(new)) for tree, new in zip(trees, updated, strict=False)
    )
    gradient = jax.tree.map(lambda leaf: jnp.where(finite, 0.0, leaf), state.gradient)
    new_state = TrainState(trained, mean, square, jnp.where(finite, steps, state.steps), gradient)
    return new_state, {"grad_norm": norm}
