# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""pass@k: the probability that at least one of k samples is correct."""

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate pass@k of one problem without bias.

    `pass@k = 1 - C(n - c, k)/C(n, k)`: the share of the k-subsets of n samples that contain at least one of the c
    correct samples. Computed in exact integers and rounded once.

    Args:
        num_samples: n, number of samples drawn for the problem.
        num_correct: c, number of correct samples.
        k: subset size, in [1, n].

    Returns:
        The estimate, in [0, 1]. Its mean over problems is the pass@k of a benchmark.

    Raises:
        ValueError: if k is not in [1, n] or c is not in [0, n]; the message gives the value and the range.

    >>> pass_at_k(num_samples=4, num_correct=1, k=2)
    0.5
    >>> pass_at_k(num_samples=4, num_correct=3, k=2)
    1.0

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct is {num_correct}; it must be in [0, num_samples = {num_samples}]")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; it must be in [1, num_samples = {num_samples}]: draw more samples or lower k")
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets
