# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Groups that teach nothing, and what to do with them.

Where all rewards of a group are equal, every advantage that compares them alone is 0: the group costs time and, where
the loss is averaged over rollouts, dilutes the others. Estimators that compare turns (GiGPO), ask a critic, or compare
nothing (`reinforce`) learn from such groups too; a filter keeps them from it.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import draccus

from marin_rl.types import RolloutGroup


class Filtered(NamedTuple):
    """Groups, sorted by whether they teach something."""

    kept: list[RolloutGroup]
    """Groups to train on."""
    zero_spread: list[RolloutGroup]
    """Groups whose graded rollouts all earned the same."""
    ungraded: list[RolloutGroup]
    """Groups in which every rollout failed."""


def sort_groups(groups: Sequence[RolloutGroup]) -> Filtered:
    """Tell groups whose rewards differ from those whose rewards are all equal, or missing.

    Args:
        groups: any.
    """
    sorted_groups = Filtered([], [], [])
    for group in groups:
        rewards = {rollout.total_reward for rollout in group.rollouts if rollout.rewards}
        place = sorted_groups.kept if len(rewards) > 1 else sorted_groups.zero_spread
        (place if rewards else sorted_groups.ungraded).append(group)
    return sorted_groups


@dataclasses.dataclass(frozen=True)
class FilterConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses what becomes of groups whose rewards are all equal, by `type`."""

    @property
    @abc.abstractmethod
    def drops(self) -> bool:
        """Whether such groups are left out of the batch."""

    @property
    @abc.abstractmethod
    def batches(self) -> int:
        """Most groups that a step plays, in batches of `rollouts.prompts_per_step`."""


@FilterConfig.register_subclass("keep")
@dataclasses.dataclass(frozen=True)
class KeepGroupsConfig(FilterConfig):
    """Train on every group; those of equal rewards count in the loss's denominators and add nothing else."""

    @property
    def drops(self) -> bool:
        """Never."""
        return False

    @property
    def batches(self) -> int:
        """One."""
        return 1


@FilterConfig.register_subclass("drop")
@dataclasses.dataclass(frozen=True)
class DropGroupsConfig(FilterConfig):
    """Leave groups of equal rewards out: a smaller batch, and no update at all where no group is left."""

    @property
    def drops(self) -> bool:
        """Always."""
        return True

    @property
    def batches(self) -> int:
        """One."""
        return 1


@FilterConfig.register_subclass("resample")
@dataclasses.dataclass(frozen=True)
class ResampleGroupsConfig(FilterConfig):
    """Leave groups of equal rewards out and play further tasks in their place, up to a bound.

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2.
    """

    max_batches: int = 4
    """Most groups that a step plays, in batches of `rollouts.prompts_per_step`; at least 2, the step's own included.
    What is missing then is left out."""

    def __post_init__(self) -> None:
        if self.max_batches < 2:
            raise ValueError(
                f"filter.max_batches is {self.max_batches}; resampling needs at least 2, the step's own included, "
                "or use filter: {type: drop}"
            )

    @property
    def drops(self) -> bool:
        """Always."""
        return True

    @property
    def batches(self) -> int:
        """`max_batches`."""
        return self.max_batches
