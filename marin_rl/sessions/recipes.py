# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The recipe of each command that trains: the classes of its config and parts, its data, start and dry run."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.parts.model import AbstractModelParts
from marin_rl.parts.rl import RunParts
from marin_rl.parts.supervised import PreferenceParts, SupervisedParts
from marin_rl.sessions.dry_run import dry_run, dry_run_supervised
from marin_rl.training.loop import AbstractRun
from marin_rl.training.open_run import open_run
from marin_rl.training.preference_run import open_preferences
from marin_rl.training.supervised_run import open_supervised, read_data


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A command that trains."""

    config: type[AbstractRunConfig]
    """Class of its config, which names the command and the key that only its configs have."""
    parts: type[AbstractModelParts]
    """Class of the parts of a run."""
    read: Callable[[Any], tuple[Any, Any]]
    """Reads the data that decides the length of a run; returns the complete config, and the data for `open`."""
    open: Callable[..., AbstractRun]
    """Starts or resumes a run, from the class of the parts, the config, the data and a `Start`."""
    check: Callable[..., Sequence[str]]
    """The dry run; see [`dry_run`][marin_rl.sessions.dry_run.dry_run]."""


RECIPES = (
    Recipe(
        TrainConfig,
        RunParts,
        read=lambda config: (config, None),
        open=open_run,
        check=dry_run,
    ),
    Recipe(
        SftConfig,
        SupervisedParts,
        read=read_data,
        open=open_supervised,
        check=dry_run_supervised,
    ),
    Recipe(
        DpoConfig,
        PreferenceParts,
        read=read_data,
        open=open_preferences,
        check=dry_run_supervised,
    ),
)
"""Reinforcement learning, supervised fine-tuning, and direct preference optimization."""


def recipe_of(config: AbstractRunConfig) -> Recipe:
    """Return the recipe of a config."""
    return next(recipe for recipe in RECIPES if recipe.config is type(config))
