# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import typing

import pytest

from marin_rl.environments import EnvironmentConfig
from marin_rl.environments.curriculum import LessonConfig
from marin_rl.environments.mixture import MixturePartConfig
from marin_rl.environments.nesting import (
    ControlledEnvironmentConfig,
    NestedEnvironmentConfig,
    PartEnvironmentConfig,
    PlainEnvironmentConfig,
    environments_below,
)

CHOICES = EnvironmentConfig.get_known_choices()
# What a config holds through a section of its own.
SECTIONS = {"mixture": MixturePartConfig, "curriculum": LessonConfig}


def held_by(name: str) -> list[type]:
    """The registries that a config's fields choose from, by its type hints."""
    hints = typing.get_type_hints(SECTIONS.get(name, CHOICES[name]))
    return [hint for hint in hints.values() if isinstance(hint, type) and issubclass(hint, NestedEnvironmentConfig)]


@pytest.mark.parametrize("name", CHOICES)
def test_an_environment_holds_those_of_lower_levels_alone(name: str):
    level = CHOICES[name].level
    held = held_by(name)
    # Which says that the walk below sees every environment that holds others.
    assert bool(held) == (level > 0)
    for registry in held:
        assert registry.get_known_choices().keys() == environments_below(level).keys()
        assert all(choice.level < level for choice in registry.get_known_choices().values())


def test_every_level_can_be_held_by_the_one_above_it():
    assert environments_below(0) == {}
    highest = max(choice.level for choice in CHOICES.values())
    assert environments_below(highest + 1) == CHOICES
    for level in range(highest):
        assert environments_below(level).keys() < environments_below(level + 1).keys()


@pytest.mark.parametrize(
    "registry",
    [PlainEnvironmentConfig, PartEnvironmentConfig, ControlledEnvironmentConfig],
    ids=lambda one: one.__name__,
)
def test_names_and_classes_are_those_of_the_one_registry(registry: type):
    assert registry.default_choice_name() is None
    for name, choice in registry.get_known_choices().items():
        assert registry.get_choice_class(name) is choice
        assert registry.get_choice_name(choice) == name
    with pytest.raises(KeyError):
        registry.get_choice_class("nothing")


def test_a_config_is_of_every_registry_that_could_hold_it():
    arithmetic = CHOICES["arithmetic"]()
    assert dataclasses.is_dataclass(arithmetic)
    assert isinstance(arithmetic, PlainEnvironmentConfig)
    assert not isinstance(3, PlainEnvironmentConfig)
