# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments that hold others: which may hold which.

A registry that held itself would send the command line's parser round for ever, so every environment has a level,
and holds only those below its own.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from marin_rl.environments.base import Environment, EnvironmentConfig
from marin_rl.rewards.component import RewardComponentConfig


def environments_below(level: int) -> dict[str, Any]:
    """Config classes by name, of environments below a level."""
    known = EnvironmentConfig.get_known_choices()
    return {name: choice for name, choice in known.items() if choice.level < level}


@runtime_checkable
class NestedEnvironmentConfig(Protocol):
    """What the registries below share. It lacks `get_known_choices`: draccus takes it for no registry of its own."""

    def build(self) -> Environment:
        """Make the environment."""
        ...

    def reward_components(self, environment: Environment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Which reward functions judge the rollouts of which environment, by its name."""
        ...

    @classmethod
    def get_choice_class(cls, name: str) -> Any:
        """The config class registered under a name."""
        return EnvironmentConfig.get_known_choices()[name]

    @classmethod
    def get_choice_name(cls, subcls: type) -> str:
        """The name under which a config class is registered."""
        return EnvironmentConfig.get_choice_name(subcls)

    @classmethod
    def default_choice_name(cls) -> str | None:
        """No default: what is held is always named."""
        return None


@runtime_checkable
class PlainEnvironmentConfig(NestedEnvironmentConfig, Protocol):
    """An environment that holds no other: level 0."""

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        """Config classes by name."""
        return environments_below(1)


@runtime_checkable
class PartEnvironmentConfig(NestedEnvironmentConfig, Protocol):
    """An environment that is no mixture: levels 0 and 1."""

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        """Config classes by name."""
        return environments_below(2)


@runtime_checkable
class ControlledEnvironmentConfig(NestedEnvironmentConfig, Protocol):
    """Every environment but a control: levels 0 to 2."""

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        """Config classes by name."""
        return environments_below(3)
