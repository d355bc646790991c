# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Length shaping: a soft penalty on overlong answers, and the treatment of truncated rollouts."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import draccus
from annotated_types import Ge, Gt

from marin_rl.types import Rollout, RolloutGroup, RolloutStatus
from marin_rl.utils.settings.checks import ConfigSection

OVERLONG = "overlong"
"""Reward component: the soft penalty on long replies."""


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Compute the soft overlong penalty, `-min(max(len - (L_max - L_buf), 0), L_buf)/L_buf · factor`.

    Args:
        length: length of the answer in tokens.
        max_length: L_max, the length limit in tokens.
        buffer: L_buf, the number of tokens before the limit over which the penalty grows; 0 disables it.
        factor: magnitude of the penalty at the limit, in units of reward.

    Returns:
        The penalty: 0 up to a length of `L_max - L_buf`, then linear down to `-factor` at L_max and beyond.

    >>> [soft_overlong_penalty(length, 10, 4, 1.0) for length in (6, 7, 10, 12)]
    [0.0, -0.25, -1.0, -1.0]

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 13.
    """
    over = min(max(length - (max_length - buffer), 0), buffer)
    return -over / buffer * factor if over else 0.0


@dataclasses.dataclass(frozen=True)
class OverlongConfig(ConfigSection):
    """Soft penalty on answers close to the length limit."""

    buffer: Annotated[int, Ge(0)] = 0
    """Number of tokens before the limit at which the penalty starts; 0 disables the penalty."""
    factor: Annotated[float, Gt(0), "or set overlong.buffer: 0 to disable the penalty"] = 1.0
    """Magnitude of the penalty at the limit, in units of reward."""


@dataclasses.dataclass(frozen=True)
class TruncationConfig(ConfigSection, draccus.ChoiceRegistry):
    """Treatment of rollouts truncated by a token or turn limit, selected by `type`."""

    masks: ClassVar[bool] = False
    """Whether truncated rollouts are excluded from the loss."""
    reward: ClassVar[float | None] = None
    """Reward that replaces the rewards of truncated rollouts; None keeps them."""


@TruncationConfig.register_subclass("keep")
@dataclasses.dataclass(frozen=True)
class KeepTruncatedConfig(TruncationConfig):
    """Truncated rollouts are treated like all others."""


@TruncationConfig.register_subclass("mask")
@dataclasses.dataclass(frozen=True)
class MaskTruncatedConfig(TruncationConfig):
    """Truncated rollouts count in the baseline of their group, but have no loss tokens (DAPO's overlong filtering)."""

    masks: ClassVar[bool] = True


@TruncationConfig.register_subclass("reward")
@dataclasses.dataclass(frozen=True)
class RewardTruncatedConfig(TruncationConfig):
    """Truncated rollouts get a fixed reward."""

    reward: float = 0.0  # pyrefly: ignore[bad-override]
    """Reward of truncated rollouts."""


def shape_rewards(
    groups: Sequence[RolloutGroup], overlong: OverlongConfig, truncation: TruncationConfig, *, max_new_tokens: int
) -> list[RolloutGroup]:
    """Add the overlong penalty and the reward of truncated rollouts.

    Args:
        groups: graded groups; failed rollouts are unchanged.
        overlong: the soft penalty, added as component `overlong`. It depends on the longest reply of a rollout.
        truncation: may replace all rewards of truncated rollouts by a fixed component `truncated`; their turns then
            have no rewards.
        max_new_tokens: maximum tokens of a reply.

    Raises:
        ValueError: if the environment or a reward function already has a component `overlong`; names the rollout.
    """

    def shaped(rollout: Rollout) -> Rollout:
        if not rollout.rewards:
            return rollout
        if rollout.status is RolloutStatus.TRUNCATED and truncation.reward is not None:
            turns = tuple(dataclasses.replace(turn, rewards={}) for turn in rollout.turns)
            return dataclasses.replace(rollout, rewards={RolloutStatus.TRUNCATED.value: truncation.reward}, turns=turns)
        if not overlong.buffer:
            return rollout
        if OVERLONG in rollout.rewards:
            raise ValueError(
                f"rollout {rollout.id}: its environment or a reward function gives a reward named {OVERLONG!r}, which "
                "is the name of the soft overlong penalty; rename that reward, or set overlong.buffer: 0"
            )
        longest = max(len(turn.generation.token_ids) for turn in rollout.turns)
        penalty = soft_overlong_penalty(longest, max_new_tokens, overlong.buffer, overlong.factor)
        return dataclasses.replace(rollout, rewards={**rollout.rewards, OVERLONG: penalty})

    return [RolloutGroup(group.id, [shaped(rollout) for rollout in group.rollouts]) for group in groups]
