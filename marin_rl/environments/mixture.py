# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Training on several environments at once, each with its share of the tasks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from marin_rl.environments.base import Environment, EnvironmentConfig, check_nested
from marin_rl.environments.composite import CompositeEnvironment, by_name, draw_by_weight, part_rewards
from marin_rl.environments.task_stream import StreamState
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.types import RolloutGroup, Task


@dataclasses.dataclass(frozen=True)
class MixturePartConfig:
    """One environment of a mixture."""

    environment: EnvironmentConfig
    """The environment; its name must differ from those of the others."""
    weight: float = 1.0
    """How often tasks are drawn from it, beside the other parts' weights; above 0."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight is {self.weight}; it must be finite and above 0, or leave the part out")


@EnvironmentConfig.register_subclass("mixture")
@dataclasses.dataclass(frozen=True)
class MixtureConfig(EnvironmentConfig):
    """Several environments. Each training task is from one of them, by weight; evaluation is of each."""

    level: ClassVar[int] = 2

    parts: tuple[MixturePartConfig, ...]
    """The environments and their weights."""
    name: str = "mixture"
    """Name of the whole in messages; metrics go by the names of the parts."""

    def __post_init__(self) -> None:
        for index, part in enumerate(self.parts):
            check_nested(self, part.environment, f"parts.{index}.environment")

    def reward_components(self, environment: Environment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Each part's own reward functions, and those of the whole."""
        return part_rewards(environment, [part.environment for part in self.parts], self.rewards)

    def build(self) -> Environment:
        """Make the parts.

        Raises:
            ValueError: if two of them share a name, or there are none.
        """
        made = [part.environment.build() for part in self.parts]
        parts = by_name(made, f"mixture {self.name!r}")
        weights = {environment.name: part.weight for environment, part in zip(made, self.parts, strict=True)}
        return CompositeEnvironment(self.name, parts, lambda seed: MixtureStream(parts, weights, seed))


@dataclasses.dataclass(frozen=True)
class MixtureStream:
    """Draws from every part by weight."""

    environments: Mapping[str, Environment]
    """By name."""
    weights: Mapping[str, float]
    """By name; above 0."""
    seed: int
    """Of the choice, and of every part's order."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All of them are measured apart."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """The next tasks, each of a part chosen by weight."""
        return draw_by_weight(self.environments, self.weights, state, count, self.seed)

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """The state as it is: weights are fixed."""
        return state

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Nothing."""
        return {}
