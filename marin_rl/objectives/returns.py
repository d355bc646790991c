# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Discounted returns: what is still to come, seen from each step. Plain numpy in float64."""

import numpy as np
from jaxtyping import Float, Float64


def discounted_returns(rewards: Float[np.ndarray, " steps"], gamma: float) -> Float64[np.ndarray, " steps"]:
    """The return from each step on, `G_t = r_t + γ·G_{t+1}`.

    One function for turns and for tokens: the caller lays out action positions alone, so observations between them
    neither earn nor discount anything.

    Args:
        rewards: `[steps]`, the reward of each step, in order.
        gamma: γ, in [0, 1].

    Returns:
        `[steps]` float64.

    Raises:
        ValueError: if γ is not in [0, 1].

    >>> discounted_returns(np.array([0.0, 0.0, 1.0]), 0.95).round(6).tolist()
    [0.9025, 0.95, 1.0]

    Source: Sutton & Barto 2018, equation 3.9.
    """
    check_discount("gamma", gamma)
    returns = np.zeros(rewards.size)
    following = 0.0
    for step in range(rewards.size - 1, -1, -1):
        following = float(rewards[step]) + gamma * following
        returns[step] = following
    return returns


def check_discount(name: str, value: float) -> None:
    """Refuse what is no discount.

    Args:
        name: how the setting is called in errors.
        value: its value.

    Raises:
        ValueError: if it is not in [0, 1].
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; a discount is in [0, 1]")
