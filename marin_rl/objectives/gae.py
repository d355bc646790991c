# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Generalised advantage estimation, for PPO with a critic.

Plain numpy in float64; importing this module loads no jax.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int32

from marin_rl.objectives.advantage_inputs import AdvantageConfig, AdvantageInputs, TokenAdvantages
from marin_rl.objectives.dispersion import centered, sample_variance
from marin_rl.objectives.returns import check_discount, discounted_returns

WHITENING_EPSILON = 1e-8
"""Added to a variance before its root is divided by."""


def token_rewards(
    score: float,
    penalties: Float64[np.ndarray, " tokens"],
    turn_rewards: Float64[np.ndarray, " turns"],
    turn_ids: Int32[np.ndarray, " tokens"],
) -> Float64[np.ndarray, " tokens"]:
    """KL-penalised rewards of the action tokens, whose sum is the rollout's return `score - Σ_t β·k1_t`.

    `r_t = -β·k1_t`, plus the reward of each turn at the turn's last action token. The last action token of the rollout
    gets what the score contains beyond the rewards of the earlier turns: the reward of the last turn, shaping, and
    scores of reward functions that are about the whole rollout. A rollout with a single score has it there in full.

    Args:
        score: sum of the rollout's rewards.
        penalties: β·k1 of each action token.
        turn_rewards: reward of each turn; 0 for a turn without one.
        turn_ids: turn of each action token, never going back.

    Returns:
        The reward of each action token.

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
    """Generalised advantages: `A_t = δ_t + γλ·A_{t+1}`, with `δ_t = r_t + γ·V_{t+1} - V_t` and V = A = 0 after the end.

    Runs over action tokens only: from the last token of a turn it goes to the first of the next, so that
    observation tokens in between neither discount nor end anything.

    Args:
        rewards: of each action token.
        values: V of the state in which each action token was chosen.
        gamma: γ, in [0, 1].
        lam: λ, in [0, 1].

    Returns:
        A of each action token.

    >>> gae_advantages(np.array([0.0, 0.0, 5.0]), np.array([1.0, 2.0, 3.0]), gamma=1.0, lam=0.0).tolist()
    [1.0, 1.0, 2.0]

    Source: Schulman et al. 2016, arXiv 1506.02438, equation 16.
    """
    following = np.append(values[1:], 0.0)[: values.size]
    return discounted_returns(rewards + gamma * following - values, gamma * lam)


def whitened(advantages: Sequence[Float64[np.ndarray, " _tokens"]]) -> list[Float64[np.ndarray, " _tokens"]]:
    """Mean 0 and variance 1 over all action tokens of the batch: `(A - mean A)/√(var A + 1e-8)`, var unbiased.

    Args:
        advantages: of the action tokens of each rollout.

    Returns:
        The same shapes. Exactly 0 where all are equal, and for a single token.

    >>> [array.round(6).tolist() for array in whitened([np.array([1.0, 3.0]), np.array([5.0])])]
    [[-1.0, 0.0], [1.0]]

    Source: Ziegler et al. 2019, arXiv 1909.08593, the published code.
    """
    together = np.concatenate([np.zeros(0), *advantages])
    scaled = centered(together) / math.sqrt(sample_variance(together) + WHITENING_EPSILON)
    return np.split(scaled, np.cumsum([array.size for array in advantages]))[: len(advantages)]


@AdvantageConfig.register_subclass("gae")
@dataclasses.dataclass(frozen=True)
class GaeConfig(AdvantageConfig):
    """Advantages from a critic, per token; needs no group."""

    gamma: float = 1.0
    """γ, in [0, 1]: discount per action token."""
    lam: float = 0.95
    """λ, in [0, 1]: 1 trusts the rewards alone (no bias), 0 the critic alone (little variance)."""
    whiten: bool = True
    """Whether advantages get mean 0 and variance 1 over the action tokens of the batch."""

    def __post_init__(self) -> None:
        check_discount("advantage.gamma", self.gamma)
        check_discount("advantage.lam", self.lam)

    @property
    def minimum_group_size(self) -> int:
        """One: the critic is the baseline."""
        return 1

    @property
    def needs_critic(self) -> bool:
        """Always."""
        return True

    @property
    def needs_turns(self) -> bool:
        """Never."""
        return False

    @property
    def is_token_level(self) -> bool:
        """Always."""
        return True

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`gae_advantages`][marin_rl.objectives.gae.gae_advantages].

        The rewards are those of [`token_rewards`][marin_rl.objectives.gae.token_rewards].
        Value targets are `A + V`, taken before whitening.
        """
        raw = [[self._advantages(signal) for signal in group] for group in groups]
        present = [
            (group, member)
            for group, signals in enumerate(groups)
            for member, s in enumerate(signals)
            if s.score is not None
        ]
        token_advantages_list = [
            [TokenAdvantages(advantages, np.zeros(advantages.size)) for advantages in group] for group in raw
        ]
        final = [raw[group][member] for group, member in present]
        for (group, member), advantages in zip(present, whitened(final) if self.whiten else final, strict=True):
            token_advantages_list[group][member] = TokenAdvantages(
                advantages, raw[group][member] + groups[group][member].values
            )
        return token_advantages_list

    def _advantages(self, signal: AdvantageInputs) -> Float64[np.ndarray, " tokens"]:
        if signal.score is None:
            return np.zeros(len(signal.turn_ids))
        rewards = token_rewards(signal.score, signal.penalties, signal.turn_rewards, signal.turn_ids)
        return gae_advantages(rewards, signal.values, self.gamma, self.lam)
