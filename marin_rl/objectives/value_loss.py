# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The critic's loss, and how well it explains the returns."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64

from marin_rl.objectives.dispersion import sample_variance


class ValueTerms(NamedTuple):
    """The value term of each token, and where clipping took its gradient away."""

    terms: Float[Array, "*shape"]
    """To be minimised, before weighting."""
    clipped: Bool[Array, "*shape"]
    """True where the clipped value's error is the larger one, so that the term is a constant."""


def value_loss_terms(
    values: Float[Array, "*shape"],
    old_values: Float[Array, "*shape"],
    targets: Float[Array, "*shape"],
    clip: float | None,
) -> ValueTerms:
    """The clipped squared error, `½·max((V - R)², (clip(V, V_old ± ε_v) - R)²)`.

    Args:
        values: V, what the critic being trained says of each token, float32.
        old_values: V_old, what it said before the step's first update.
        targets: R, what it should say.
        clip: ε_v, above 0; None for the plain squared error.

    Returns:
        The terms, and where the clip holds.

    >>> value_loss_terms(jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0]), jnp.array([3.0, 3.0]), 0.5).terms.tolist()
    [2.0, 1.125]

    Source: Schulman et al. 2017, arXiv 1707.06347, with the clipping of OpenAI's baselines.
    """
    plain = jnp.square(values - targets)
    if clip is None:
        return ValueTerms(plain / 2, jnp.zeros(values.shape, bool))
    bounded = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - targets)
    clipped = bounded > plain
    # Selected rather than maximum(): where both are equal, the gradient is that of the plain error by construction.
    return ValueTerms(jnp.where(clipped, bounded, plain) / 2, clipped)


def explained_variance(values: Float64[np.ndarray, " tokens"], targets: Float64[np.ndarray, " tokens"]) -> float:
    """The share of the targets' variance that the critic explains, `1 - Var(R - V)/Var(R)`.

    Args:
        values: what the critic said before the update.
        targets: what it should have said.

    Returns:
        At most 1; 0 for a constant critic, below 0 for one that is worse than that. 0 where the targets do not vary.

    >>> explained_variance(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
    0.75
    """
    # Computed without a rounding residue, which equal targets would otherwise be divided by.
    spread = sample_variance(targets)
    return 1.0 - sample_variance(targets - values) / spread if spread > 0 else 0.0
