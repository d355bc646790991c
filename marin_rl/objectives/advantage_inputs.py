# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Inputs, outputs and numerical building blocks of the advantage estimators.

Arrays run over the *action tokens* of a rollout: the tokens that the policy sampled, in order, over all turns and
sequences. All numbers are float64.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import draccus
import numpy as np
from jaxtyping import Float, Float64, Int32, Shaped

from marin_rl.utils.settings.checks import ConfigSection

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclasses.dataclass(frozen=True)
class AdvantageInputs:
    """Rewards, turns, penalties and values of one rollout.

    Raises:
        ValueError: if the lengths are inconsistent, a number is NaN or infinite, or a turn index is out of range; the
            message names the rollout.
    """

    id: str
    """Id of the rollout, for error messages."""
    score: float | None
    """Sum of the rollout's rewards, shaping included; None if the rollout failed."""
    turn_rewards: Float64[np.ndarray, " turns"]
    """Reward of each turn; 0 if the environment gave none."""
    anchors: tuple[str, ...]
    """`[turns]`, hash of the observation of each turn; empty strings if the estimator does not use anchor states."""
    turn_ids: Int32[np.ndarray, " tokens"]
    """Turn of each action token, starting at 0 and non-decreasing."""
    penalties: Float64[np.ndarray, " _tokens"]
    """β·k1 of each action token, subtracted from the reward; zeros without KL in the reward."""
    values: Float64[np.ndarray, " _tokens"]
    """The critic's value of each action token's state; zeros without a critic."""
    unrewarded_turns: tuple[int, ...] = ()
    """Turns in which the environment gave no reward. GiGPO distinguishes them from turns with a reward of 0."""
    masked_penalty: float = 0.0
    """Sum of β·k1 of a rollout whose tokens were removed from the loss, so that `penalties` has length 0."""

    def __post_init__(self) -> None:
        turns = len(self.turn_rewards)
        for name, like in (("anchors", "turn_rewards"), ("penalties", "turn_ids"), ("values", "turn_ids")):
            length, expected = len(getattr(self, name)), len(getattr(self, like))
            if length != expected:
                raise ValueError(f"rollout {self.id}: {name} has length {length}, but {like} has length {expected}")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(
                f"rollout {self.id}: score is {self.score}; rewards must be finite (use None for a failed rollout)"
            )
        for name in ("turn_rewards", "penalties", "values"):
            array = getattr(self, name)
            # The sum is finite unless a number is not, or very large numbers overflow.
            if not math.isfinite(array.sum()) and not np.isfinite(array).all():
                bad = np.flatnonzero(~np.isfinite(array))
                raise ValueError(f"rollout {self.id}: {name}[{bad[0]}] is {array[bad[0]]}; it must be finite")
        if (self.turn_ids[:-1] > self.turn_ids[1:]).any():
            raise ValueError(f"rollout {self.id}: turn_ids must not decrease")
        for turn in (*self.turn_ids[:1].tolist(), *self.turn_ids[-1:].tolist(), *self.unrewarded_turns):
            if not 0 <= turn < turns:
                raise ValueError(f"rollout {self.id}: turn {turn} is out of range; turn_rewards has length {turns}")

    @property
    def total_return(self) -> float | None:
        """`R = score - Σ_t penalties_t - masked_penalty`; None if the rollout failed."""
        if self.score is None:
            return None
        penalty = math.fsum(self.penalties.tolist()) if np.count_nonzero(self.penalties) else self.masked_penalty
        return self.score - penalty

    @property
    def rest_of_score(self) -> float:
        """The part of the score that is not a reward of a turn; 0 if the rollout failed."""
        return 0.0 if self.score is None else self.score - math.fsum(self.turn_rewards)


class TurnAdvantages(NamedTuple):
    """Components of the turn-level advantages of a rollout, `episode_advantage + ω·step_advantages`."""

    episode_advantage: float
    """A_E: the rollout compared with the others of its group."""
    returns: Float64[np.ndarray, " turns"]
    """G_t: discounted sum of the rewards of each turn and the turns after it."""
    step_advantages: Float64[np.ndarray, " turns"]
    """A_S: each turn compared with the turns of the group that share its anchor state."""


class TokenAdvantages(NamedTuple):
    """Advantage and value target of each action token of a rollout."""

    advantages: Float64[np.ndarray, " tokens"]
    """A: the factor of the policy term."""
    value_targets: Float64[np.ndarray, " tokens"]
    """Regression targets of the critic; zeros without one."""
    turn_advantages: TurnAdvantages | None = None
    """Turn-level components, if the estimator computes them (GiGPO); for logs and stored rollouts."""


@dataclasses.dataclass(frozen=True)
class AdvantageConfig(ConfigSection, draccus.ChoiceRegistry, abc.ABC):
    """Advantage estimator, selected by `type`."""

    minimum_group_size: ClassVar[int] = 2
    """Smallest number of rollouts per prompt that can give a non-zero advantage."""
    needs_critic: ClassVar[bool] = False
    """Whether the estimator reads `values` and computes `value_targets`."""
    needs_turns: ClassVar[bool] = False
    """Whether the estimator compares turns, and therefore requires rollouts of several turns."""
    needs_non_negative_returns: ClassVar[bool] = False
    """Whether returns, after shaping and penalties, must not be negative."""
    is_token_level: ClassVar[bool] = False
    """Whether the tokens of one rollout can have different advantages."""

    @abc.abstractmethod
    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """Compute the advantages of all rollouts of a batch.

        Args:
            groups: the rollouts of each prompt; failed rollouts (score None) are excluded from all statistics.

        Returns:
            One result per rollout, grouped and ordered like `groups`; zeros for failed rollouts.

        Raises:
            ValueError: if a rollout lacks a required input; the message names the rollout.
        """


def uniform_advantages(inputs: AdvantageInputs, advantage: float) -> TokenAdvantages:
    """Assign one advantage to every action token of a rollout, with zero value targets."""
    return TokenAdvantages(np.full(len(inputs.turn_ids), advantage, np.float64), np.zeros(len(inputs.turn_ids)))


def split(values: Shaped[np.ndarray, "values ..."], lengths: Sequence[int]) -> list[Shaped[np.ndarray, "_part ..."]]:
    """Split an array along its first axis into consecutive parts, which are views of it.

    >>> [part.tolist() for part in split(np.array([1, 2, 3]), [1, 0, 2])]
    [[1], [], [2, 3]]
    """
    return [values[end - length : end] for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)]


def discounted_returns(rewards: Float[np.ndarray, " steps"], gamma: float) -> Float64[np.ndarray, " steps"]:
    """Compute the discounted return from each step, `G_t = r_t + γ·G_{t+1}`.

    `r_t` are the rewards of consecutive turns or action tokens; observations between them are not steps. A ValueError
    is raised unless `gamma` is in [0, 1].

    >>> discounted_returns(np.array([0.0, 0.0, 1.0]), 0.95).round(6).tolist()
    [0.9025, 0.95, 1.0]

    Source: Sutton & Barto 2018, equation 3.9.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; a discount factor must be in [0, 1]")
    returns = []
    following = 0.0
    for reward in reversed(rewards.tolist()):
        following = reward + gamma * following
        returns.append(following)
    return np.array(returns[::-1], np.float64)


def returns_of_turns(
    rewards: Float64[np.ndarray, " turns"], rest: float, gamma: float
) -> Float64[np.ndarray, " turns"]:
    """Compute the discounted return from each turn, where the last turn also gets the rest of the score.

    With γ = 1 each return is the exact sum, rounded once: rollouts that got equal rewards in another order are equal.
    `rest` is the part of the score that is not a reward of a turn.

    Returns:
        `[turns]`, G of each turn.

    >>> returns_of_turns(np.array([0.1, 0.2, 0.3]), 0.0, gamma=1.0).tolist()
    [0.6, 0.5, 0.3]
    """
    if gamma == 1:
        return np.array([math.fsum([*rewards[turn:], rest]) for turn in range(rewards.size)], np.float64)
    return discounted_returns(np.append(rewards[:-1], rewards[-1:] + rest), gamma)


def centered(values: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
    """Subtract the mean of finite numbers, `x_i - mean x`. Exactly 0 if all are equal; independent of their order.

    >>> centered(np.array([1.0, 2.0, 6.0])).tolist()
    [-2.0, -1.0, 3.0]
    >>> centered(np.full(6, 0.1)).tolist() == [0.0] * 6
    True
    """
    if not values.size:
        return values
    # Relative to the smallest, equal values and their mean are exactly 0; fsum makes the result
    # independent of the order.
    above_smallest = values - values.min()
    return above_smallest - math.fsum(above_smallest.tolist()) / values.size


def sample_variance(values: Float64[np.ndarray, " count"]) -> float:
    """Compute the unbiased variance of finite numbers, `Σ_i (x_i - mean x)²/(n - 1)`; 0 for fewer than two.

    >>> sample_variance(np.array([1.0, 3.0]))
    2.0
    """
    return math.fsum((centered(values) ** 2).tolist()) / max(values.size - 1, 1)


def standardized(values: Float64[np.ndarray, " count"]) -> Float64[np.ndarray, " count"]:
    """Standardise finite numbers, `(x_i - mean x)/(std x + 1e-6)`, with ddof = 1. Exactly 0 if all are equal.

    >>> standardized(np.array([0.0, 2.0, 1.0])).round(5).tolist()
    [-1.0, 1.0, 0.0]
    """
    return centered(values) / (math.sqrt(sample_variance(values)) + STD_EPSILON)
