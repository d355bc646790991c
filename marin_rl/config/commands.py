# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The commands that train, by their config classes."""

from collections.abc import Mapping
from typing import Any

from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.supervised_config import DpoConfig, SftConfig
from marin_rl.config.train_config import TrainConfig

CONFIGS: tuple[type[AbstractRunConfig], ...] = (TrainConfig, SftConfig, DpoConfig)
"""The config class of each command."""


def config_class(values: Mapping[str, Any]) -> type[AbstractRunConfig]:
    """Return the class of a config from its keys."""
    return next((config for config in CONFIGS if config.source_key in values), TrainConfig)


def config_class_of(command: str) -> type[AbstractRunConfig]:
    """Return the config class of a command."""
    return next(config for config in CONFIGS if config.command == command)
