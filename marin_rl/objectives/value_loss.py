# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Value loss and explained variance of the critic."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64

from marin_rl.objectives.advantage_inputs import sample_variance


class ValueTerms(NamedTuple):
    """Value term and clipping flag of each token."""

    terms: Float[Array, "*shape"]
    """Terms to minimise, before weighting."""
    clipped: Bool[Array, "*shape"]
    """True if the error of the clipped value is larger, so that the term is a constant."""


def value_loss_terms(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    clip: float | None,
) -> ValueTerms:
    """Compute the clipped squared error, `½·max((V - R)², (clip(V, V_old ± ε_v) - R)²)`.

    Args:
        values: V, the critic's value of each token, float32.
        old_values: V_old, the values before the first update of the step.
        targets: R, the value targets.
        clip: ε_v, above 0; None for the plain squared error.

    >>> value_loss_terms(jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0]), jnp.array([3.0, 3.0]), 0.5).terms.tolist()
    [2.0, 1.125]

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 9, with the clipping of OpenAI's baselines (`ppo2`).
    """
    plain = jnp.square(values - targets)
    if clip is None:
        return ValueTerms(plain / 2, jnp.zeros(values.shape, bool))
    bounded = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - targets)
    clipped = bounded > plain
    # where() rather than maximum(): if both errors are equal, the gradient is that of the plain error.
    return ValueTerms(jnp.where(clipped, bounded, plain) / 2, clipped)


def explained_variance(values: Float64[np.ndarray, " tokens"], targets: Float64[np.ndarray, " tokens"]) -> float:
    """Compute the fraction of the targets' variance explained by the critic, `1 - Var(R - V)/Var(R)`.

    V is the critic's value before the update, and R the value target.

    Returns:
        At most 1; 0 for a constant critic, negative for a worse one. 0 if all targets are equal.

    >>> explained_variance(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    0.75

    Source: the coefficient of determination R²; logged for PPO by OpenAI's baselines (`explained_variance`).
    """
    # sample_variance is exactly 0 for equal targets, so the division cannot amplify a rounding residue.
    variance = sample_variance(targets)
    return 1.0 - sample_variance(targets - values) / variance if variance > 0 else 0.0
