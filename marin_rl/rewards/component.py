# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward components: the weighted parts that a rollout's reward is the sum of, chosen by `type` in the config."""

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
    """A reward component that cannot be used as it is configured; the message names it and the remedy."""


class RewardScope(enum.StrEnum):
    """Which rollouts a component is given at once."""

    POINTWISE = "pointwise"
    """One, as soon as it has ended."""
    GROUP = "group"
    """All attempts at one prompt."""
    BATCH = "batch"
    """All rollouts of a step."""


@runtime_checkable
class RewardComponent(Protocol):
    """RewardScorer rollouts."""

    @property
    def name(self) -> str:
        """Under which its scores are logged."""
        ...

    @property
    def weight(self) -> float:
        """What its scores are multiplied by."""
        ...

    @property
    def scope(self) -> RewardScope | None:
        """What it is given at once; None where only `check` can tell."""
        ...

    async def check(self) -> None:
        """Find out, before anything is sampled, whether it can be used.

        Raises:
            RewardConfigError: if not.
        """
        ...

    async def judge(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        """One result for each rollout, in their order.

        Raises:
            RewardCallError: if it brought no answer.
        """
        ...

    async def close(self) -> None:
        """Let go of what it holds; the sandbox is not its own."""
        ...


@dataclasses.dataclass(frozen=True)
class RewardComponentConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses a reward component by `type`."""

    @abc.abstractmethod
    def build(self, sandbox: Sandbox) -> RewardComponent:
        """Make the component.

        Args:
            sandbox: where code that is not the trainer's runs; started before the component is checked.
        """


_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_component(name: str, weight: float) -> None:
    """Check what every component's config has.

    Raises:
        ValueError: if the name cannot be part of a metric's, or the weight is not finite.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"rewards: the name {name!r} is no part of a metric's name; use letters, digits, _, - and .")
    if not math.isfinite(weight):
        raise ValueError(f"rewards: the weight of {name!r} is {weight}; it must be finite")
