# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rewards that depend on how long an answer was, and on whether it was cut off.

Applied to training rollouts before they are compared; what it adds is a reward component like any other, so it is
logged and stored like any other.
"""

import dataclasses
from collections.abc import Sequence

from marin_rl.objectives.shaping import OverlongConfig, TruncationConfig
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus

OVERLONG = "overlong"
"""Reward component: the soft penalty on long answers."""
TRUNCATED = "truncated"
"""Reward component: the fixed reward of truncated rollouts, and the 0 of those cut off before they had any reward."""


def shape_rewards(
    groups: Sequence[RolloutGroup], overlong: OverlongConfig, truncation: TruncationConfig, *, max_new_tokens: int
) -> list[RolloutGroup]:
    """The same groups with the overlong penalty, and the reward of truncated rollouts, in their rewards.

    Args:
        groups: graded groups; failed rollouts stay as they are.
        overlong: the soft penalty, added as component `overlong`. Of several turns the longest answer counts.
        truncation: may give truncated rollouts a fixed reward, as their only component `truncated`; their turns then
            have no rewards of their own.
        max_new_tokens: the limit of an answer.

    Raises:
        ValueError: if the environment or a reward function has a component `overlong` already; names the rollout.
    """

    def shaped(rollout: Rollout) -> Rollout:
        if not rollout.rewards:
            return rollout
        if rollout.status is RolloutStatus.TRUNCATED and truncation.fixed_reward is not None:
            turns = tuple(dataclasses.replace(turn, rewards={}) for turn in rollout.turns)
            return dataclasses.replace(rollout, rewards={TRUNCATED: truncation.fixed_reward}, turns=turns)
        if not overlong.buffer:
            return rollout
        if OVERLONG in rollout.rewards:
            raise ValueError(
                f"rollout {rollout.id}: its environment or a reward function gives a reward named {OVERLONG!r}, which "
                "is the name of the soft overlong penalty; give it another name, or set overlong.buffer: 0"
            )
        longest = max(len(turn.generation.token_ids) for turn in rollout.turns)
        penalty = overlong.penalty(longest, max_new_tokens)
        return dataclasses.replace(rollout, rewards={**rollout.rewards, OVERLONG: penalty})

    return [RolloutGroup(group.id, [shaped(rollout) for rollout in group.rollouts]) for group in groups]
