# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What an advantage estimator is told about each rollout, and what it answers.

Arrays run over the *action tokens* of a rollout: the tokens that the policy sampled, in order, over all
its turns and sequences. Plain numpy in float64; importing this module loads no jax.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import draccus
import numpy as np
from jaxtyping import Float64, Int32


@dataclasses.dataclass(frozen=True)
class AdvantageInputs:
    """What one rollout earned, and where.

    Raises:
        ValueError: if lengths do not fit together, a number is NaN or infinite, or a token belongs to no turn; the
            message names the rollout.
    """

    id: str
    """The rollout's id; errors name it."""
    score: float | None
    """Sum of its rewards, shaping included; None where it failed."""
    turn_rewards: Float64[np.ndarray, " turns"]
    """Reward of each turn alone; 0 where its environment gave none."""
    anchors: tuple[str, ...]
    """`[turns]`, a hash of what was observed in each turn; empty strings where nobody needs it."""
    turn_ids: Int32[np.ndarray, " tokens"]
    """Turn of each action token, from 0, never going back."""
    penalties: Float64[np.ndarray, " _tokens"]
    """β·k1 of each action token, taken from the reward; zeros without KL in the reward."""
    values: Float64[np.ndarray, " _tokens"]
    """The critic's value of each action token's state; zeros without a critic."""
    unrewarded_turns: tuple[int, ...] = ()
    """Turns in which the environment gave no reward at all, which is not the same as one of 0 (GiGPO)."""

    def __post_init__(self) -> None:
        turns, tokens = len(self.turn_rewards), len(self.turn_ids)
        self._check_length("anchors", len(self.anchors), "turn_rewards", turns)
        self._check_length("penalties", len(self.penalties), "turn_ids", tokens)
        self._check_length("values", len(self.values), "turn_ids", tokens)
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(
                f"rollout {self.id}: score is {self.score}; rewards must be finite (None is for a rollout that failed)"
            )
        for name in ("turn_rewards", "penalties", "values"):
            array = getattr(self, name)
            bad = np.flatnonzero(~np.isfinite(array))
            if bad.size:
                raise ValueError(f"rollout {self.id}: {name}[{bad[0]}] is {array[bad[0]]}; it must be finite")
        if np.any(np.diff(self.turn_ids) < 0):
            raise ValueError(f"rollout {self.id}: turn_ids goes back from a turn to an earlier one")
        for turn in (*self.turn_ids[[0, -1] if tokens else []].tolist(), *self.unrewarded_turns):
            if not 0 <= turn < turns:
                raise ValueError(f"rollout {self.id}: turn {turn} is named, but turn_rewards has length {turns}")

    def _check_length(self, name: str, length: int, like: str, expected: int) -> None:
        if length != expected:
            raise ValueError(f"rollout {self.id}: {name} has length {length}, but {like} has length {expected}")

    @property
    def total_return(self) -> float | None:
        """`R = score - Σ_t penalties_t`; None where the rollout failed."""
        return None if self.score is None else self.score - math.fsum(self.penalties)


class TurnAdvantages(NamedTuple):
    """What the advantages of a rollout's turns are made of; `episode_advantage + ω·step_advantages`."""

    episode_advantage: float
    """A_E: the rollout against the others of its group."""
    returns: Float64[np.ndarray, " turns"]
    """G_t: discounted rewards of each turn and those after it."""
    step_advantages: Float64[np.ndarray, " turns"]
    """A_S: each turn against the turns of the group at the same anchor state."""


class TokenAdvantages(NamedTuple):
    """What each action token of a rollout earned."""

    advantages: Float64[np.ndarray, " tokens"]
    """How much better than expected; what the policy term multiplies."""
    value_targets: Float64[np.ndarray, " tokens"]
    """What the critic should learn; zeros without one."""
    of_turns: TurnAdvantages | None = None
    """Where the advantages come from, for estimators that credit turns (GiGPO); for logs and stored rollouts."""


@dataclasses.dataclass(frozen=True)
class AdvantageConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses how rewards become advantages, by `type`."""

    @property
    @abc.abstractmethod
    def minimum_group_size(self) -> int:
        """Fewest rollouts per prompt for which an advantage can differ from 0."""

    @property
    @abc.abstractmethod
    def needs_critic(self) -> bool:
        """Whether it uses the values of a critic, and gives it targets."""

    @property
    @abc.abstractmethod
    def is_token_level(self) -> bool:
        """Whether tokens of one rollout get advantages of their own."""

    @property
    @abc.abstractmethod
    def needs_turns(self) -> bool:
        """Whether it compares turns, and so says nothing new about rollouts of a single one."""

    @abc.abstractmethod
    def compute(self, groups: Sequence[Sequence[AdvantageInputs]]) -> list[list[TokenAdvantages]]:
        """TokenAdvantages of every rollout of the batch.

        Args:
            groups: the attempts at each prompt; failed ones (score None) leave all statistics.

        Returns:
            One credit per rollout, grouped and ordered as given; zeros for failed rollouts.

        Raises:
            ValueError: if a rollout lacks what the estimator needs; the message names it.
        """


def uniform_advantages(signal: AdvantageInputs, advantage: float) -> TokenAdvantages:
    """The same advantage on every action token of a rollout, and nothing for a critic.

    Args:
        signal: the rollout; it decides the length.
        advantage: A_i.
    """
    return TokenAdvantages(np.full(len(signal.turn_ids), advantage, np.float64), np.zeros(len(signal.turn_ids)))
