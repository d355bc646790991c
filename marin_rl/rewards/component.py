# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward components: the weighted terms of a rollout's reward, chosen by `type` in the config."""

import abc
import dataclasses
import enum
import math
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import draccus

from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.sandbox.pool import Sandbox


class RewardConfigError(ValueError):
    """The configuration of a reward component is not usable; the message names it and the remedy."""


class RewardScope(enum.StrEnum):
    """Set of rollouts that a component scores at once."""

    POINTWISE = "pointwise"
    """A single rollout, as soon as it has ended."""
    GROUP = "group"
    """All attempts at one prompt."""
    BATCH = "batch"
    """All rollouts of a step."""


@runtime_checkable
class RewardComponent(Protocol):
    """Scores rollouts."""

    @property
    def name(self) -> str:
        """Name under which its scores are logged."""
        ...

    @property
    def weight(self) -> float:
        """Factor of its scores."""
        ...

    @property
    def scope(self) -> RewardScope | None:
        """Set of rollouts that it scores at once; None if `check` determines it."""
        ...

    async def check(self) -> None:
        """Check that the component is usable, before any rollout is sampled.

        Raises:
            RewardConfigError: if it is not.
        """
        ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """Return one result per rollout, in their order.

        Raises:
            RewardCallError: if the call failed.
        """
        ...

    async def close(self) -> None:
        """Release its resources; the caller closes the sandbox."""
        ...


@dataclasses.dataclass(frozen=True)
class RewardComponentConfig(draccus.ChoiceRegistry, abc.ABC):
    """Config of a reward component, chosen by `type`."""

    @abc.abstractmethod
    def build(self, sandbox: Sandbox) -> RewardComponent:
        """Build the component.

        Args:
            sandbox: sandbox for user code and model-written code; started before the component's `check`.
        """


_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_component(name: str, weight: float) -> None:
    """Validate the fields that every component's config has.

    Args:
        name: name of the component.
        weight: factor of its scores.

    Raises:
        ValueError: if the name cannot be part of a metric name, or the weight is not finite.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"rewards: invalid name {name!r}; use letters, digits, '_', '-' and '.'")
    if not math.isfinite(weight):
        raise ValueError(f"rewards: weight of {name!r} must be finite, got {weight}")
