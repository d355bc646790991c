# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rewards for length: a soft penalty on answers close to their limit, and what becomes of those cut off by it."""

import abc
import dataclasses
import math

import draccus


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """The soft overlong penalty, `-min(max(len - (L_max - L_buf), 0), L_buf)/L_buf · factor`.

    Nothing up to `L_max - L_buf`, then linear, and `-factor` from L_max on.

    Args:
        length: tokens of the answer.
        max_length: L_max, the limit of an answer, in tokens.
        buffer: L_buf, how many tokens before the limit it begins; at least 1.
        factor: the penalty at the limit, in units of reward.

    Returns:
        Not above 0.

    >>> [soft_overlong_penalty(length, 10, 4, 1.0) for length in (6, 7, 10, 12)]
    [0.0, -0.25, -1.0, -1.0]

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 13.
    """
    over = min(max(length - (max_length - buffer), 0), buffer)
    return -over / buffer * factor if over else 0.0


@dataclasses.dataclass(frozen=True)
class OverlongConfig:
    """A soft penalty on answers that come close to their limit."""

    buffer: int = 0
    """Tokens before the limit at which the penalty begins; 0 for no penalty."""
    factor: float = 1.0
    """Penalty at the limit, in units of reward, above 0."""

    def __post_init__(self) -> None:
        if self.buffer < 0:
            raise ValueError(f"overlong.buffer is {self.buffer}; it counts tokens and cannot be negative")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(
                f"overlong.factor is {self.factor}; it must be finite and above 0 (buffer: 0 turns it off)"
            )

    def penalty(self, length: int, max_length: int) -> float:
        """See [`soft_overlong_penalty`][marin_rl.objectives.shaping.soft_overlong_penalty]; 0 where it is off."""
        return soft_overlong_penalty(length, max_length, self.buffer, self.factor) if self.buffer else 0.0


@dataclasses.dataclass(frozen=True)
class TruncationConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses what becomes of rollouts that hit a limit of tokens or turns, by `type`."""

    @property
    @abc.abstractmethod
    def masks(self) -> bool:
        """Whether their tokens carry no loss."""

    @property
    @abc.abstractmethod
    def fixed_reward(self) -> float | None:
        """The reward they get whatever they said; None for the one they earned."""


@TruncationConfig.register_subclass("keep")
@dataclasses.dataclass(frozen=True)
class KeepTruncatedConfig(TruncationConfig):
    """They count like any other, with the reward they earned."""

    @property
    def masks(self) -> bool:
        """Never."""
        return False

    @property
    def fixed_reward(self) -> float | None:
        """What they earned."""
        return None


@TruncationConfig.register_subclass("mask")
@dataclasses.dataclass(frozen=True)
class MaskTruncatedConfig(TruncationConfig):
    """Their reward counts in the group's baseline, and their tokens carry no loss (DAPO's overlong filtering)."""

    @property
    def masks(self) -> bool:
        """Always."""
        return True

    @property
    def fixed_reward(self) -> float | None:
        """What they earned."""
        return None


@TruncationConfig.register_subclass("reward")
@dataclasses.dataclass(frozen=True)
class RewardTruncatedConfig(TruncationConfig):
    """They earn a fixed reward, whatever they said."""

    reward: float = 0.0
    """That reward, finite."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"truncation.reward is {self.reward}; it must be finite")

    @property
    def masks(self) -> bool:
        """Never."""
        return False

    @property
    def fixed_reward(self) -> float | None:
        """`reward`."""
        return self.reward
