# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Group advantages: how much better a rollout did than the others at the same prompt.

Plain numpy in float64; importing this module loads no jax. In every function a reward of None
means that the rollout failed: it leaves the baseline, and its advantage is 0.

Importing this module registers every `AdvantageConfig` there is.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float64

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.objectives.advantage_inputs import AdvantageConfig, AdvantageInputs, TokenAdvantages, uniform_advantages
from marin_rl.objectives.dispersion import STD_EPSILON, centered, sample_variance, standardized
from marin_rl.objectives.gae import GaeConfig
from marin_rl.objectives.gigpo import GigpoConfig
from marin_rl.objectives.returns import check_discount, discounted_returns

__all__ = [
    "AdvantageConfig",
    "DrGrpoConfig",
    "GaeConfig",
    "GigpoConfig",
    "GrpoConfig",
    "Normalization",
    "ReinforceConfig",
    "RlooConfig",
    "dr_grpo_advantages",
    "grpo_advantages",
    "reinforce_advantages",
    "rloo_advantages",
    "turn_returns",
]


def rloo_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Leave-one-out advantages: each rollout against the mean of the others.

    `A_i = R_i - (Σ_j R_j - R_i)/(G - 1) = G/(G - 1) · (R_i - mean R)`, over the G rollouts that have a reward.

    Args:
        rewards: `[group]`, the return of each rollout of one prompt; None where it failed.

    Returns:
        `[group]`. Exactly 0 where all rewards are equal, where only one rollout has a reward, and for failed rollouts.

    Raises:
        ValueError: if a reward is NaN or infinite; the message names its index.

    >>> rloo_advantages([1.0, 2.0, 5.0, 8.0]).round(4).tolist()
    [-4.0, -2.6667, 1.3333, 5.3333]
    >>> rloo_advantages([1.0, None, 0.0]).tolist()
    [1.0, 0.0, -1.0]

    Source: Ahmadian et al. 2024, arXiv 2402.14740, section 2.
    """
    return _apply(rewards, lambda present: centered(present) * (present.size / max(present.size - 1, 1)))


def grpo_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Group-standardised advantages.

    `A_i = (R_i - mean R)/(std R + 1e-6)`, with the unbiased standard deviation (ddof = 1).

    Args:
        rewards: `[group]`, the return of each rollout of one prompt; None where it failed.

    Returns:
        `[group]`. Exactly 0 where all rewards are equal, where only one rollout has a reward, and for failed rollouts.

    Raises:
        ValueError: if a reward is NaN or infinite; the message names its index.

    >>> grpo_advantages([0.0, 2.0, 1.0]).round(5).tolist()
    [-1.0, 1.0, 0.0]

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2.
    """
    return _apply(rewards, standardized)


def dr_grpo_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Mean-centred advantages: `A_i = R_i - mean R`.

    Args:
        rewards: `[group]`, the return of each rollout of one prompt; None where it failed.

    Returns:
        `[group]`. Exactly 0 where all rewards are equal, where only one rollout has a reward, and for failed rollouts.

    Raises:
        ValueError: if a reward is NaN or infinite; the message names its index.

    >>> dr_grpo_advantages([1.0, 2.0, 5.0, 8.0]).tolist()
    [-3.0, -2.0, 1.0, 4.0]

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2.
    """
    return _apply(rewards, centered)


def reinforce_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """No baseline: `A_i = R_i`.

    The one estimator that compares nothing: a group of one, or of equal rewards, keeps its rewards.

    Args:
        rewards: `[group]`, the return of each rollout of one prompt; None where it failed.

    Returns:
        `[group]`, 0 for failed rollouts.

    Raises:
        ValueError: if a reward is NaN or infinite; the message names its index.

    >>> reinforce_advantages([1.0, None, 0.5]).tolist()
    [1.0, 0.0, 0.5]

    Source: Williams 1992, equation 4 with a zero baseline.
    """
    return _apply(rewards, lambda present: present)


def turn_returns(signal: AdvantageInputs, gamma: float) -> Float64[np.ndarray, " turns"]:
    """What a rollout earns from each of its turns on: `G_t = Σ_{k≥t} γ^{k-t}·r_k`.

    `r_k` is the reward of turn k less the KL penalties of its action tokens. What the score holds beyond the rewards
    of the turns (shaping) is earned in the last one, so that with γ = 1 the first turn's return is the rollout's.

    Args:
        signal: a rollout that has a score.
        gamma: γ, in [0, 1], per turn.

    Returns:
        G of each turn.
    """
    penalties = np.bincount(signal.turn_ids, weights=signal.penalties, minlength=signal.turn_rewards.size)
    rewards = signal.turn_rewards - penalties
    if signal.score is not None:
        rewards[-1:] += signal.score - math.fsum(signal.turn_rewards)
    return discounted_returns(rewards, gamma)


class Normalization(enum.StrEnum):
    """What an advantage is divided by, on top of its baseline."""

    NONE = "none"
    """Nothing."""
    GROUP = "group"
    """The standard deviation of the returns of its group (ddof = 1), + 1e-6."""
    BATCH = "batch"
    """The standard deviation of the advantages of the batch (ddof = 1), + 1e-6."""


@AdvantageConfig.register_subclass("rloo")
@dataclasses.dataclass(frozen=True)
class RlooConfig(AdvantageConfig):
    """Leave-one-out baseline: unbiased, and by default not scaled by the spread of the group."""

    normalize: Normalization = Normalization.NONE
    """What the advantages are divided by: none | group | batch. Anything but none is biased."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Never."""
        return False

    @property
    def is_token_level(self) -> bool:
        """Never."""
        return False

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`rloo_advantages`][marin_rl.objectives.advantages.rloo_advantages]."""
        return _per_rollout(groups, rloo_advantages, self.normalize)


@AdvantageConfig.register_subclass("grpo")
@dataclasses.dataclass(frozen=True)
class GrpoConfig(AdvantageConfig):
    """Centred and divided by the group's standard deviation: every group weighs about the same."""

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Never."""
        return False

    @property
    def is_token_level(self) -> bool:
        """Never."""
        return False

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`grpo_advantages`][marin_rl.objectives.advantages.grpo_advantages]."""
        return _per_rollout(groups, grpo_advantages)


@AdvantageConfig.register_subclass("dr_grpo")
@dataclasses.dataclass(frozen=True)
class DrGrpoConfig(AdvantageConfig):
    """Centred only: `rloo` times (G - 1)/G."""

    normalize: Normalization = Normalization.NONE
    """What the advantages are divided by: none | group | batch. With group this is `grpo`."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Never."""
        return False

    @property
    def is_token_level(self) -> bool:
        """Never."""
        return False

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`dr_grpo_advantages`][marin_rl.objectives.advantages.dr_grpo_advantages]."""
        return _per_rollout(groups, dr_grpo_advantages, self.normalize)


@AdvantageConfig.register_subclass("reinforce")
@dataclasses.dataclass(frozen=True)
class ReinforceConfig(AdvantageConfig):
    """The reward itself, with no baseline: high variance, works with one rollout per prompt."""

    gamma: float | None = None
    """γ, in [0, 1]: each turn gets what is earned from it on, discounted per turn; null: each gets the whole return."""

    def __post_init__(self) -> None:
        if self.gamma is not None:
            check_discount("advantage.gamma", self.gamma)

    @property
    def minimum_group_size(self) -> int:
        """One: nothing is compared."""
        return 1

    @property
    def needs_critic(self) -> bool:
        """Never."""
        return False

    @property
    def needs_turns(self) -> bool:
        """Never."""
        return False

    @property
    def is_token_level(self) -> bool:
        """With a discount, since turns differ then."""
        return self.gamma is not None

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`reinforce_advantages`][marin_rl.objectives.advantages.reinforce_advantages] and `turn_returns`."""
        if self.gamma is None:
            return _per_rollout(groups, reinforce_advantages)
        return [[self._from_turn_on(signal, self.gamma) for signal in group] for group in groups]

    def _from_turn_on(self, signal: AdvantageInputs, gamma: float) -> TokenAdvantages:
        if signal.score is None:
            return uniform_advantages(signal, 0.0)
        return TokenAdvantages(turn_returns(signal, gamma)[signal.turn_ids], np.zeros(len(signal.turn_ids)))


def _per_rollout(
    groups: Sequence[Sequence[AdvantageInputs]],
    advantages_of: Callable[[Sequence[float | None]], Float64[np.ndarray, " group"]],
    normalize: Normalization = Normalization.NONE,
) -> list[list[TokenAdvantages]]:
    """One advantage per rollout, on all of its action tokens."""
    returns = [[signal.total_return for signal in group] for group in groups]
    advantages = [advantages_of(of_group) for of_group in returns]
    match normalize:
        case Normalization.NONE:
            divisors = [1.0] * len(groups)
        case Normalization.GROUP:
            divisors = [_std(of_group) + STD_EPSILON for of_group in returns]
        case Normalization.BATCH:
            pairs = zip(returns, advantages, strict=True)
            graded = [a for rs, given in pairs for r, a in zip(rs, given.tolist(), strict=True) if r is not None]
            divisors = [_std(graded) + STD_EPSILON] * len(groups)
    return [
        [uniform_advantages(signal, advantage) for signal, advantage in zip(group, (given / by).tolist(), strict=True)]
        for group, given, by in zip(groups, advantages, divisors, strict=True)
    ]


def _std(values: Sequence[float | None]) -> float:
    return math.sqrt(sample_variance(np.array([value for value in values if value is not None], np.float64)))


def _apply(
    rewards: Sequence[float | None],
    advantages_of: Callable[[Float64[np.ndarray, " present"]], Float64[np.ndarray, " present"]],
) -> Float64[np.ndarray, " group"]:
    """Advantages of the rollouts that have a reward; 0 for the others."""
    present = _present(rewards)
    advantages = np.zeros(len(rewards))
    if present.any():
        advantages[present] = advantages_of(np.array([reward for reward in rewards if reward is not None], np.float64))
    return advantages


def _present(rewards: Sequence[float | None]) -> Bool[np.ndarray, " group"]:
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(
                f"rewards[{index}] is {reward}; rewards must be finite (give None for a rollout that has none)"
            )
    return np.array([reward is not None for reward in rewards], bool)
