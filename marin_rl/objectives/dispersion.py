# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Distance from the mean, and the spread around it, without rounding residues.

Plain numpy in float64; importing this module loads no jax.
"""

import math

import numpy as np
from jaxtyping import Float64

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def centered(values: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
    """Distance from the mean, `x_i - mean x`.

    Args:
        values: finite numbers, in any order; the result of each does not depend on it.

    Returns:
        `[count]`. Exactly 0 where all values are equal, and for a single one.

    >>> centered(np.array([1.0, 2.0, 6.0])).tolist()
    [-2.0, -1.0, 3.0]
    >>> centered(np.full(6, 0.1)).tolist() == [0.0] * 6
    True
    """
    if not values.size:
        return values
    # Counted from the smallest, equal values are exactly 0 apart, and so is their mean; fsum makes
    # the result independent of the order.
    above_smallest = values - values.min()
    return above_smallest - math.fsum(above_smallest) / values.size


def sample_variance(values: Float64[np.ndarray, " count"]) -> float:
    """Unbiased variance, `Σ_i (x_i - mean x)²/(n - 1)`.

    Args:
        values: finite numbers, in any order.

    Returns:
        The variance; 0 for fewer than two values.

    >>> sample_variance(np.array([1.0, 3.0]))
    2.0
    """
    return math.fsum(centered(values) ** 2) / max(values.size - 1, 1)


def standardized(values: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
    """Distance from the mean in standard deviations, `(x_i - mean x)/(std x + 1e-6)`, with ddof = 1.

    Args:
        values: finite numbers, in any order.

    Returns:
        `[count]`. Exactly 0 where all values are equal, and for a single one.

    >>> standardized(np.array([0.0, 2.0, 1.0])).round(5).tolist()
    [-1.0, 1.0, 0.0]
    """
    return centered(values) / (math.sqrt(sample_variance(values)) + STD_EPSILON)
