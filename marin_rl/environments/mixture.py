# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures: training on several environments, each with a share of the tasks."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, StreamState, TaskStream, check_nested
from marin_rl.environments.composite import CompositeEnvironment, by_name, draw_by_weight, part_rewards
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.types import Task


@dataclasses.dataclass(frozen=True)
class MixturePartConfig:
    """Environment of a mixture."""

    environment: EnvironmentConfig
    """The environment; names must differ between parts."""
    weight: float = 1.0
    """Sampling weight relative to the other parts; above 0."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be finite and above 0, got {self.weight}; remove the part to exclude it")


@EnvironmentConfig.register_subclass("mixture")
@dataclasses.dataclass(frozen=True)
class MixtureConfig(EnvironmentConfig):
    """Several environments. Training tasks are sampled from them by weight; each is evaluated separately."""

    level: ClassVar[int] = 2

    parts: tuple[MixturePartConfig, ...]
    """Environments and their weights."""
    name: str = "mixture"
    """Name of the mixture, for messages; metrics use the names of the parts."""

    def __post_init__(self) -> None:
        for index, part in enumerate(self.parts):
            check_nested(self, part.environment, f"parts.{index}.environment")

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of each part and of the mixture."""
        return part_rewards(environment, [part.environment for part in self.parts], self.rewards)

    def build(self) -> AbstractEnvironment:
        """Build the parts.

        Raises:
            ValueError: if two of them share a name, or there are none.
        """
        environments = [part.environment.build() for part in self.parts]
        parts = by_name(environments, f"mixture {self.name!r}")
        weights = {environment.name: part.weight for environment, part in zip(environments, self.parts, strict=True)}
        return CompositeEnvironment(self.name, parts, lambda seed: MixtureStream(parts, weights, seed))


@dataclasses.dataclass(frozen=True)
class MixtureStream(TaskStream):
    """Draws from all parts by weight."""

    environments: Mapping[str, AbstractEnvironment]
    """Environments by name."""
    weights: Mapping[str, float]
    """Weights by environment name; above 0."""
    seed: int
    """Seed for the choice of parts and for the task order of each part."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts; each has separate metrics."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Draw tasks from the parts by weight."""
        return draw_by_weight(self.environments, self.weights, state, count, self.seed)
