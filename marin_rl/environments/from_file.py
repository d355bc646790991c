# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An environment of one's own, from a Python file that the config names."""

import dataclasses
from typing import Any, cast

import draccus

from marin_rl.environments.base import Environment, EnvironmentConfig
from marin_rl.environments.user_file import UserFileError, load_from_file


@EnvironmentConfig.register_subclass("file")
@dataclasses.dataclass(frozen=True)
class FileConfig(EnvironmentConfig):
    """A class or a function in a Python file.

    The file runs in the training process, unprotected, unlike reward functions, which run in the sandbox.
    """

    path: str
    """The file; relative paths start at the working directory."""
    name: str
    """What to take from it: a dataclass that extends `EnvironmentConfig`, or a function that returns an environment
    or such a config."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the class, or arguments of the function."""

    def build(self) -> Environment:
        """Import the file and make the environment.

        Raises:
            UserFileError: if the file or the name cannot be used.
            ValueError: if the options do not fit.
        """
        where = f"{self.name!r} of {self.path}"
        made = self._make(load_from_file(self.path, self.name), where)
        environment = made.build() if isinstance(made, EnvironmentConfig) else made
        if not isinstance(environment, Environment):
            raise UserFileError(
                f"{where} gave {type(environment).__name__}, which is no environment: it needs name, tasks(split) and "
                "start(task, seed)"
            )
        return environment

    def _make(self, found: Any, where: str) -> Any:
        if not callable(found):
            raise UserFileError(
                f"{where} is {type(found).__name__}; it must be a function that returns an environment, or a class "
                "that extends EnvironmentConfig"
            )
        try:
            if isinstance(found, type) and issubclass(found, EnvironmentConfig):
                return draccus.decode(cast(Any, found), self.options)
            return found(**self.options)
        except Exception as error:
            raise UserFileError(f"{where} refuses options {self.options}: {type(error).__name__}: {error}") from error
