# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Settings of rollouts: the handling of long prompts, and filters of groups.

If all rewards of a group are equal, every group-relative advantage is 0, except for a KL penalty in the reward. The
group then costs time and, if the loss is averaged over rollouts, reduces the weight of the other groups. Estimators
that compare turns (GiGPO), use a critic, or compare nothing (`reinforce`) also learn from such groups; a filter
prevents that. A dropped group has no KL penalty either.
"""

import dataclasses
import enum
from typing import Annotated, ClassVar

import draccus
from annotated_types import Ge

from marin_rl.types import RolloutGroup
from marin_rl.utils.settings.checks import ConfigSection


class LongPrompts(enum.StrEnum):
    """Handling of tasks with a too long prompt."""

    ERROR = "error"
    """End the run with an error that names the task."""
    SKIP = "skip"
    """Skip the task and use the next one."""


def rewards_differ(group: RolloutGroup) -> bool:
    """Return whether the graded rollouts of a group have different rewards; False if all rollouts failed."""
    return len({rollout.total_reward for rollout in group.rollouts if rollout.rewards}) > 1


@dataclasses.dataclass(frozen=True)
class FilterConfig(ConfigSection, draccus.ChoiceRegistry):
    """Handling of groups with equal rewards, selected by `type`."""

    drops: ClassVar[bool] = True
    """Whether such groups are excluded from the batch."""

    max_batches: ClassVar[int] = 1
    """Maximum number of groups that a step samples, in batches of `rollouts.prompts_per_step`."""


@FilterConfig.register_subclass("keep")
@dataclasses.dataclass(frozen=True)
class KeepGroupsConfig(FilterConfig):
    """Train on every group.

    With group-relative advantages, groups with equal rewards contribute only to denominators and KL penalties.
    """

    drops: ClassVar[bool] = False


@FilterConfig.register_subclass("drop")
@dataclasses.dataclass(frozen=True)
class DropGroupsConfig(FilterConfig):
    """Exclude groups with equal rewards. The batch becomes smaller; if no group is left, the update is skipped."""


@FilterConfig.register_subclass("resample")
@dataclasses.dataclass(frozen=True)
class ResampleGroupsConfig(FilterConfig):
    """Replace groups with equal rewards by groups of further tasks, up to a limit.

    References:
        Yu et al., [DAPO](https://arxiv.org/abs/2503.14476), 2025, section 3.2.
    """

    # A setting in this choice, a constant in the others.
    max_batches: Annotated[int, Ge(2), "or use filter: {type: drop}"] = 4  # pyrefly: ignore[bad-override]
    """Maximum number of groups that a step samples, in batches of `rollouts.prompts_per_step`, including the
    step's own batch. Groups still missing at the limit are left out."""
