# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Generalised advantage estimation, for PPO with a critic."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le
from jaxtyping import Float64, Int32

from marin_rl.objectives.advantage_inputs import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    centered,
    discounted_returns,
    sample_variance,
    split,
    uniform_advantages,
)

WHITENING_EPSILON = 1e-8
"""Added to a variance before taking the square root and dividing by it."""


def token_rewards(
    score: float,
    penalties: Float64[np.ndarray, " tokens"],
    turn_rewards: Float64[np.ndarray, " turns"],
    turn_ids: Int32[np.ndarray, " tokens"],
) -> Float64[np.ndarray, " tokens"]:
    """Distribute the rewards of a rollout, minus KL penalties, over its action tokens.

    `r_t = -β·k1_t`, plus the reward of each turn at the last action token of the turn. The last action token of the
    rollout gets the score minus the rewards of the earlier turns, shaping and rollout-level scores included. The sum of
    the token rewards is the return `score - Σ_t β·k1_t`.

    Args:
        score: sum of the rollout's rewards.
        penalties: `[tokens]`, β·k1 of each action token.
        turn_rewards: `[turns]`, reward of each turn; 0 for a turn without one.
        turn_ids: `[tokens]`, turn of each action token, non-decreasing.

    >>> token_rewards(5.0, np.array([0.5, 0.0, -0.25]), np.array([5.0]), np.zeros(3, np.int32)).tolist()
    [-0.5, 0.0, 5.25]
    >>> token_rewards(5.0, np.zeros(3), np.array([1.0, 3.0]), np.array([0, 1, 1], np.int32)).tolist()
    [1.0, 0.0, 4.0]

    Source: Ziegler et al. 2019, arXiv 1909.08593, equation 2; Ouyang et al. 2022, arXiv 2203.02155, equation 2.
    """
    rewards = 0.0 - penalties
    ends = np.flatnonzero(np.diff(turn_ids))
    earlier = turn_rewards[turn_ids[ends]]
    rewards[ends] += earlier
    rewards[-1:] += score - math.fsum(earlier)
    return rewards


def gae_advantages(
    rewards: Float64[np.ndarray, " tokens"], values: Float64[np.ndarray, " tokens"], gamma: float, lam: float
) -> Float64[np.ndarray, " tokens"]:
    """Compute generalised advantages, `A_t = δ_t + γλ·A_{t+1}`, with `δ_t = r_t + γ·V_{t+1} - V_t`.

    V and A are 0 after the end. The recursion runs over action tokens only: the successor of the last action token of a
    turn is the first action token of the next turn, so observation tokens between turns are not discounted. V_t is the
    value of the state in which action token t was sampled. γ and λ are in [0, 1].

    >>> gae_advantages(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 3.0]), gamma=1.0, lam=0.0).tolist()
    [1.0, 1.0, 2.0]

    Source: Schulman et al. 2016, arXiv 1506.02438, equation 16.
    """
    following = np.append(values[1:], 0.0)[: values.size]
    return discounted_returns(rewards + gamma * following - values, gamma * lam)


def whitened(advantages: Sequence[Float64[np.ndarray, " _tokens"]]) -> list[Float64[np.ndarray, " _tokens"]]:
    """Whiten advantages over all loss tokens of the step, `(A - mean A)/√(var A + 1e-8)`, with ddof = 1.

    The list has one array per rollout. The result has the same shapes and is exactly 0 if all advantages are equal.

    >>> [array.round(6).tolist() for array in whitened([np.array([1.0, 3.0]), np.array([5.0])])]
    [[-1.0, 0.0], [1.0]]

    Source: Ziegler et al. 2019, arXiv 1909.08593, the published code.
    """
    pooled = np.concatenate([np.zeros(0), *advantages])
    scaled = centered(pooled) / math.sqrt(sample_variance(pooled) + WHITENING_EPSILON)
    return split(scaled, [array.size for array in advantages])


@AdvantageConfig.register_subclass("gae")
@dataclasses.dataclass(frozen=True)
class GaeConfig(AdvantageConfig):
    """Token-level advantages from a critic; works with one rollout per prompt."""

    minimum_group_size: ClassVar[int] = 1
    needs_critic: ClassVar[bool] = True
    is_token_level: ClassVar[bool] = True

    gamma: Annotated[float, Ge(0), Le(1)] = 1.0
    """γ: discount per action token."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """λ: 1 uses only the rewards (no bias), 0 bootstraps every step from the critic (low variance)."""
    whiten: bool = True
    """Whether to scale advantages to mean 0 and variance 1 over the loss tokens of the step."""

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`gae_advantages`][marin_rl.objectives.gae.gae_advantages].

        The rewards are those of [`token_rewards`][marin_rl.objectives.gae.token_rewards].
        Value targets are `A + V`, taken before whitening.
        """
        graded = [(inputs, inputs.score) for group in groups for inputs in group if inputs.score is not None]
        raw = []
        for inputs, score in graded:
            rewards = token_rewards(score, inputs.penalties, inputs.turn_rewards, inputs.turn_ids)
            raw.append(gae_advantages(rewards, inputs.values, self.gamma, self.lam))
        targets = [advantages + inputs.values for advantages, (inputs, _) in zip(raw, graded, strict=True)]
        results = map(TokenAdvantages, whitened(raw) if self.whiten else raw, targets)
        return [
            [uniform_advantages(inputs, 0.0) if inputs.score is None else next(results) for inputs in group]
            for group in groups
        ]
