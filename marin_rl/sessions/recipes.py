# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The recipe of each command that trains, by the class of its config. A further command needs an entry here."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig

if TYPE_CHECKING:
    from marin_rl.parts.model import AbstractModelParts
    from marin_rl.training.loop import AbstractRun


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the runs of a command are started. Its config names the command, and the key that only its configs have."""

    parts: "type[AbstractModelParts]"
    """Class of the parts of a run."""
    open: "Callable[..., AbstractRun]"
    """Starts or resumes a run, from the class of the parts, the config, the data and a `Start`."""
    check: Callable[..., Sequence[str]]
    """The dry run; see [`dry_run`][marin_rl.sessions.dry_run.dry_run]."""
    read: Callable[[Any], tuple[Any, Any]] = lambda config: (config, None)
    """Reads the data that decides the length of a run; returns the complete config, and the data for `open`."""


# The functions import levanter, which takes seconds, and which commands need only after their config is checked.


def _train() -> Recipe:
    """Reinforcement learning."""
    from marin_rl.parts.rl import RunParts
    from marin_rl.sessions.dry_run import dry_run
    from marin_rl.training.open_run import open_run

    return Recipe(RunParts, open_run, dry_run)


def _sft() -> Recipe:
    """Supervised fine-tuning."""
    from marin_rl.parts.supervised import SupervisedParts
    from marin_rl.sessions.dry_run import dry_run_supervised
    from marin_rl.training.supervised_run import open_supervised, read_data

    return Recipe(SupervisedParts, open_supervised, dry_run_supervised, read_data)


def _dpo() -> Recipe:
    """Direct preference optimization."""
    from marin_rl.parts.supervised import PreferenceParts
    from marin_rl.sessions.dry_run import dry_run_supervised
    from marin_rl.training.preference_run import open_preferences
    from marin_rl.training.supervised_run import read_data

    return Recipe(PreferenceParts, open_preferences, dry_run_supervised, read_data)


RECIPES: dict[type[AbstractRunConfig], Callable[[], Recipe]] = {TrainConfig: _train, SftConfig: _sft, DpoConfig: _dpo}
"""The commands that train."""


def recipe_of(config: AbstractRunConfig) -> Recipe:
    """Return the recipe of a config."""
    return RECIPES[type(config)]()


def as_rl(config: AbstractRunConfig) -> TrainConfig | None:
    """Return the config of a run of RL, which alone samples; None for other runs."""
    return config if isinstance(config, TrainConfig) else None


def config_class(values: Mapping[str, Any]) -> type[AbstractRunConfig]:
    """Return the class of a config from its keys."""
    return next((config for config in RECIPES if config.source_key in values), TrainConfig)


def config_class_of(command: str) -> type[AbstractRunConfig]:
    """Return the config class of a command."""
    return next(config for config in RECIPES if config.command == command)
