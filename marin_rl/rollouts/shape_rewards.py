# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rewards that depend on the length of a reply and on its truncation.

They are added to training rollouts before advantages are computed, as ordinary reward components that are logged and
stored like all others.
"""

import dataclasses
from collections.abc import Sequence

from marin_rl.objectives.shaping import OverlongConfig, TruncationConfig
from marin_rl.types import Rollout, RolloutGroup, RolloutStatus

OVERLONG = "overlong"
"""Reward component: the soft penalty on long replies."""
TRUNCATED = "truncated"
"""Reward component: the fixed reward of truncated rollouts, or 0 if a limit ended a rollout before any reward."""


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

    Returns:
        The groups with changed rewards.

    Raises:
        ValueError: if the environment or a reward function already has a component `overlong`; names the rollout.
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
                "is the name of the soft overlong penalty; rename that reward, or set overlong.buffer: 0"
            )
        longest = max(len(turn.generation.token_ids) for turn in rollout.turns)
        penalty = overlong.penalty(longest, max_new_tokens)
        return dataclasses.replace(rollout, rewards={**rollout.rewards, OVERLONG: penalty})

    return [RolloutGroup(group.id, [shaped(rollout) for rollout in group.rollouts]) for group in groups]
