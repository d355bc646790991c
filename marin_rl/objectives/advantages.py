# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Group advantages: how much better a rollout did than the others at the same prompt.

Plain numpy in float64; importing this module loads no jax. In every function a reward of None
means that the rollout failed: it leaves the baseline, and its advantage is 0.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence

import draccus
import numpy as np
from jaxtyping import Bool, Float64

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


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
    return _apply(rewards, lambda present: _center(present) * (present.size / max(present.size - 1, 1)))


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
    return _apply(rewards, lambda present: _center(present) / (_std(present) + STD_EPSILON))


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
    return _apply(rewards, _center)


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


@dataclasses.dataclass(frozen=True)
class AdvantageConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses how the rewards of a group become advantages, by `type`."""

    @property
    @abc.abstractmethod
    def minimum_group_size(self) -> int:
        """Fewest rollouts per prompt for which an advantage can differ from 0."""

    @abc.abstractmethod
    def compute(self, rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
        """Advantages `[group]` of the rollouts of one prompt; a reward is None where its rollout failed.

        Raises:
            ValueError: if a reward is NaN or infinite; the message names its index.
        """


@AdvantageConfig.register_subclass("rloo")
@dataclasses.dataclass(frozen=True)
class RlooConfig(AdvantageConfig):
    """Leave-one-out baseline: unbiased, and not scaled by the spread of the group."""

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    def compute(self, rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
        """See [`rloo_advantages`][marin_rl.objectives.advantages.rloo_advantages]."""
        return rloo_advantages(rewards)


@AdvantageConfig.register_subclass("grpo")
@dataclasses.dataclass(frozen=True)
class GrpoConfig(AdvantageConfig):
    """Centred and divided by the group's standard deviation: every group weighs about the same."""

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    def compute(self, rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
        """See [`grpo_advantages`][marin_rl.objectives.advantages.grpo_advantages]."""
        return grpo_advantages(rewards)


@AdvantageConfig.register_subclass("dr_grpo")
@dataclasses.dataclass(frozen=True)
class DrGrpoConfig(AdvantageConfig):
    """Centred only: `rloo` times (G - 1)/G."""

    @property
    def minimum_group_size(self) -> int:
        """Two: one rollout leaves nothing to compare with."""
        return 2

    def compute(self, rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
        """See [`dr_grpo_advantages`][marin_rl.objectives.advantages.dr_grpo_advantages]."""
        return dr_grpo_advantages(rewards)


@AdvantageConfig.register_subclass("reinforce")
@dataclasses.dataclass(frozen=True)
class ReinforceConfig(AdvantageConfig):
    """The reward itself, with no baseline: high variance, works with one rollout per prompt."""

    @property
    def minimum_group_size(self) -> int:
        """One: nothing is compared."""
        return 1

    def compute(self, rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
        """See [`reinforce_advantages`][marin_rl.objectives.advantages.reinforce_advantages]."""
        return reinforce_advantages(rewards)


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


def _center(rewards: Float64[np.ndarray, " present"]) -> Float64[np.ndarray, " present"]:
    # Counted from the smallest, equal rewards are exactly 0 apart, and so is their mean; fsum makes
    # the result independent of the order of the rollouts.
    above_smallest = rewards - rewards.min()
    return above_smallest - math.fsum(above_smallest) / rewards.size


def _std(rewards: Float64[np.ndarray, " present"]) -> float:
    return math.sqrt(math.fsum(_center(rewards) ** 2) / max(rewards.size - 1, 1))
