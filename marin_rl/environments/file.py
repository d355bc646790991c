# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments from the user's Python files."""

import dataclasses
from typing import Any, cast

import draccus

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.environments.single_turn import SingleTurnEnvironment, refuse_garbage_rewards
from marin_rl.utils.settings.fields import LOCAL_FILE, NAMES_FILES
from marin_rl.utils.user_code import UserFileError, load_function, user_errors


@EnvironmentConfig.register_subclass("file")
@dataclasses.dataclass(frozen=True)
class FileConfig(EnvironmentConfig):
    """Environment from a class or function in a Python file.

    The file runs in the training process without isolation; reward functions run in the sandbox.
    """

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Path of the file, relative to the working directory."""
    name: str
    """Name in the file: a dataclass that extends `EnvironmentConfig`, or a function that returns an environment
    or such a config."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Fields of the class, or arguments of the function."""
    allow_garbage_rewards: bool = False
    """Whether to accept a `SingleTurnEnvironment` whose `score` rewards empty replies, `nan`, noise and the like."""

    def build(self) -> AbstractEnvironment:
        """Import the file and build the environment.

        Raises:
            UserFileError: if the file or name is invalid.
            ValueError: if the options are invalid, or `score` rewards garbage.
        """
        where = f"{self.name!r} of {self.path}"
        expected = "a function that returns an environment, or a class that extends EnvironmentConfig"
        factory = load_function(self.path, self.name, expected)
        with user_errors(f"{where} with options {self.options} raised"):
            is_config = isinstance(factory, type) and issubclass(factory, EnvironmentConfig)
            built = draccus.decode(cast(Any, factory), self.options) if is_config else factory(**self.options)
        with user_errors(f"{where} raised"):
            environment = built.build() if isinstance(built, EnvironmentConfig) else built
        if not isinstance(environment, AbstractEnvironment):
            raise UserFileError(
                f"{where} returned {type(environment).__name__}, which is not an environment: extend "
                "AbstractEnvironment"
            )
        if isinstance(environment, SingleTurnEnvironment) and not self.allow_garbage_rewards:
            refuse_garbage_rewards(environment, where, may_raise=True)
        return environment
