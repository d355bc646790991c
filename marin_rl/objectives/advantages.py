# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Group advantages: the return of a rollout relative to the other rollouts of the same prompt.

In every function `rewards`, `[group]`, holds the return of each rollout of one prompt, and None for a failed rollout,
which is excluded from the baseline and has advantage 0. A ValueError names the index of a reward that is not finite.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le
from jaxtyping import Float64

from marin_rl.objectives.advantage_inputs import (
    STD_EPSILON,
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    centered,
    returns_of_turns,
    sample_variance,
    split,
    standardized,
    uniform_advantages,
)


class Normalization(enum.StrEnum):
    """Divisor of the centred advantages."""

    NONE = "none"
    """No division."""
    GROUP = "group"
    """Standard deviation of the returns of the group (ddof = 1), + 1e-6."""
    BATCH = "batch"
    """Standard deviation of the advantages of the batch (ddof = 1), + 1e-6."""


def rloo_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Compute leave-one-out advantages: each return minus the mean of the others.

    `A_i = R_i - (Σ_j R_j - R_i)/(G - 1) = G/(G - 1) · (R_i - mean R)`, over the G rollouts that have a reward.
    Exactly 0 if all rewards are equal or there is only one.

    >>> rloo_advantages([1.0, 2.0, 5.0, 8.0]).round(4).tolist()
    [-4.0, -2.6667, 1.3333, 5.3333]
    >>> rloo_advantages([1.0, None, 0.0]).tolist()
    [1.0, 0.0, -1.0]

    Source: Ahmadian et al. 2024, arXiv 2402.14740, section 2.
    """
    return _apply(rewards, lambda present: centered(present) * (present.size / max(present.size - 1, 1)))


@AdvantageConfig.register_subclass("rloo")
@dataclasses.dataclass(frozen=True)
class RlooConfig(AdvantageConfig):
    """Leave-one-out baseline. Unbiased; by default not divided by a standard deviation."""

    normalize: Normalization = Normalization.NONE
    """Divisor of the advantages: none | group | batch. All but none are biased."""

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`rloo_advantages`][marin_rl.objectives.advantages.rloo_advantages]."""
        return _per_rollout(groups, rloo_advantages, self.normalize)


def grpo_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Compute group-standardised advantages, `A_i = (R_i - mean R)/(std R + 1e-6)`, with ddof = 1.

    Exactly 0 if all rewards are equal or there is only one.

    >>> grpo_advantages([0.0, 2.0, 1.0]).round(5).tolist()
    [-1.0, 1.0, 0.0]

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1.2.
    """
    return _apply(rewards, standardized)


@AdvantageConfig.register_subclass("grpo")
@dataclasses.dataclass(frozen=True)
class GrpoConfig(AdvantageConfig):
    """Advantages centred and divided by the standard deviation of the group, so all groups weigh about the same."""

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`grpo_advantages`][marin_rl.objectives.advantages.grpo_advantages]."""
        return _per_rollout(groups, grpo_advantages)


def dr_grpo_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Compute mean-centred advantages, `A_i = R_i - mean R`. Exactly 0 if all rewards are equal or there is only one.

    >>> dr_grpo_advantages([1.0, 2.0, 5.0, 8.0]).tolist()
    [-3.0, -2.0, 1.0, 4.0]

    Source: Liu et al. 2025, arXiv 2503.20783, section 3.2.
    """
    return _apply(rewards, centered)


@AdvantageConfig.register_subclass("dr_grpo")
@dataclasses.dataclass(frozen=True)
class DrGrpoConfig(AdvantageConfig):
    """Advantages centred on the group mean: `rloo` times (G - 1)/G."""

    normalize: Normalization = Normalization.NONE
    """Divisor of the advantages: none | group | batch. With group this is `grpo`."""

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`dr_grpo_advantages`][marin_rl.objectives.advantages.dr_grpo_advantages]."""
        return _per_rollout(groups, dr_grpo_advantages, self.normalize)


def maxrl_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Compute mean-centred advantages divided by the group's mean, `A_i = (R_i - mean R)/mean R`.

    Exactly 0 if all rewards are equal (none is a success, or all are) or there is only one; at most G - 1. With rewards
    in {0, 1} and success probability p, the expectation of `1/G · Σ_i A_i · ∇log π_i` is
    `Σ_{k=1}^{G-1} 1/k · ∇pass@k`, the first G - 1 terms of `∇log p`. The paper's estimator without the subtracted mean
    has G terms; the subtracted mean, which groups without a success lack, lowers the variance and takes the last one.

    Raises:
        ValueError: if a reward is negative or not finite; the message names its index.

    >>> maxrl_advantages([1.0, 0.0, 0.0, 0.0]).tolist()
    [3.0, -1.0, -1.0, -1.0]
    >>> maxrl_advantages([0.0, None, 0.0]).tolist()
    [0.0, 0.0, 0.0]

    Source: Tajwar et al. 2026, arXiv 2602.02710, algorithm 1.
    """
    for index, reward in enumerate(rewards):
        if reward is not None and math.isfinite(reward) and reward < 0:
            raise ValueError(f"rewards[{index}] is {reward}; {_NON_NEGATIVE}")
    return _apply(rewards, _relative_to_mean)


_NON_NEGATIVE = "maxrl divides by the mean of the group, so no return may be negative; use rewards in [0, 1]"


def _relative_to_mean(returns: Float64[np.ndarray, " present"]) -> Float64[np.ndarray, " present"]:
    mean = math.fsum(returns.tolist()) / returns.size
    return centered(returns) / mean if mean else np.zeros(returns.size)


@AdvantageConfig.register_subclass("maxrl")
@dataclasses.dataclass(frozen=True)
class MaxRlConfig(AdvantageConfig):
    """Advantages centred and divided by the mean of the group: rare successes weigh more. For rewards in [0, 1]."""

    needs_non_negative_returns: ClassVar[bool] = True

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`maxrl_advantages`][marin_rl.objectives.advantages.maxrl_advantages]."""
        for inputs in itertools.chain.from_iterable(groups):
            if inputs.total_return is not None and inputs.total_return < 0:
                raise ValueError(f"rollout {inputs.id}: its return is {inputs.total_return}; {_NON_NEGATIVE}")
        return _per_rollout(groups, maxrl_advantages)


def reinforce_advantages(rewards: Sequence[float | None]) -> Float64[np.ndarray, " group"]:
    """Use the returns as advantages, without a baseline: `A_i = R_i`.

    Unlike the other estimators, groups of one rollout and groups of equal rewards have non-zero advantages.

    >>> reinforce_advantages([1.0, None, 0.5]).tolist()
    [1.0, 0.0, 0.5]

    Source: Williams 1992, equation 4 with a zero baseline.
    """
    return _apply(rewards, lambda present: present)


def turn_returns(inputs: AdvantageInputs, gamma: float) -> Float64[np.ndarray, " turns"]:
    """Compute the discounted return from each turn of a scored rollout, `G_t = Σ_{k≥t} γ^{k-t}·r_k`, with γ in [0, 1].

    `r_k` is the reward of turn k minus the KL penalties of its action tokens. The part of the score that is not a turn
    reward (shaping) is added to the last turn, so with γ = 1 the return of the first turn is that of the rollout. The
    penalty of a rollout without loss (`masked_penalty`) is not part of it.

    Returns:
        `[turns]`, G of each turn.

    Source: Sutton & Barto 2018, equation 3.9.
    """
    penalties = np.bincount(inputs.turn_ids, weights=inputs.penalties, minlength=inputs.turn_rewards.size)
    rewards = inputs.turn_rewards - penalties
    return returns_of_turns(rewards, inputs.rest_of_score, gamma)


@AdvantageConfig.register_subclass("reinforce")
@dataclasses.dataclass(frozen=True)
class ReinforceConfig(AdvantageConfig):
    """Returns without a baseline: high variance, works with one rollout per prompt."""

    minimum_group_size: ClassVar[int] = 1

    gamma: Annotated[float, Ge(0), Le(1)] | None = None
    """γ: each turn gets its discounted return-to-go; null: each turn gets the return of the rollout."""

    @property
    def is_token_level(self) -> bool:  # pyrefly: ignore[bad-override]
        """Whether there is a discount, which gives turns different advantages."""
        return self.gamma is not None

    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """See [`reinforce_advantages`][marin_rl.objectives.advantages.reinforce_advantages] and `turn_returns`."""
        if self.gamma is None:
            return _per_rollout(groups, reinforce_advantages)
        gamma = self.gamma

        def discounted(inputs: AdvantageInputs) -> TokenAdvantages:
            if inputs.score is None:
                return uniform_advantages(inputs, 0.0)
            return TokenAdvantages(turn_returns(inputs, gamma)[inputs.turn_ids], np.zeros(len(inputs.turn_ids)))

        return [[discounted(inputs) for inputs in group] for group in groups]


def _per_rollout(
    groups: Sequence[Sequence[AdvantageInputs]],
    advantages_of: Callable[[Sequence[float | None]], Float64[np.ndarray, " group"]],
    normalize: Normalization = Normalization.NONE,
) -> list[list[TokenAdvantages]]:
    """Compute one advantage per rollout and assign it to all its action tokens."""
    returns = [[inputs.total_return for inputs in group] for group in groups]
    advantages = [advantages_of(group_returns) for group_returns in returns]
    match normalize:
        case Normalization.NONE:
            divisors = [1.0] * len(groups)
        case Normalization.GROUP:
            divisors = [_std(group_returns) + STD_EPSILON for group_returns in returns]
        case Normalization.BATCH:
            pairs = zip(returns, advantages, strict=True)
            graded = [a for rs, values in pairs for r, a in zip(rs, values.tolist(), strict=True) if r is not None]
            divisors = [_std(graded) + STD_EPSILON] * len(groups)
    scaled = [values / divisor for values, divisor in zip(advantages, divisors, strict=True)]
    lengths = [len(inputs.turn_ids) for group in groups for inputs in group]
    per_token = np.repeat(np.concatenate([np.zeros(0), *scaled]), lengths)
    results = map(TokenAdvantages, split(per_token, lengths), split(np.zeros(per_token.size), lengths))
    return [[next(results) for _ in group] for group in groups]


def _std(values: Sequence[float | None]) -> float:
    return math.sqrt(sample_variance(np.array([value for value in values if value is not None], np.float64)))


def _apply(
    rewards: Sequence[float | None],
    advantages_of: Callable[[Float64[np.ndarray, " present"]], Float64[np.ndarray, " present"]],
) -> Float64[np.ndarray, " group"]:
    """Compute the advantages of the rollouts that have a reward; 0 for the others."""
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"rewards[{index}] is {reward}; rewards must be finite (use None for a failed rollout)")
    present = {index: reward for index, reward in enumerate(rewards) if reward is not None}
    advantages = np.zeros(len(rewards))
    if present:
        advantages[list(present)] = advantages_of(np.array(list(present.values()), np.float64))
    return advantages
