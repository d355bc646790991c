# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Log levels of the package and of single modules."""

import enum
import logging
from collections.abc import Mapping
from pathlib import Path

import marin_rl

PACKAGE = "marin_rl"


class LogLevel(enum.StrEnum):
    """Minimum level of the messages in a log file."""

    DEBUG = "debug"
    """Every turn of every episode with its tokens, tool calls, rewards and advantages."""
    INFO = "info"
    """Progress, and one line per rollout."""
    WARNING = "warning"
    """Problems that the run handled."""
    ERROR = "error"
    """Problems that the run could not handle."""

    @property
    def number(self) -> int:
        """The corresponding level of Python's `logging`."""
        return logging.getLevelNamesMapping()[self.name]


def module_levels(levels: Mapping[str, str]) -> dict[str, int]:
    """Convert the configured log levels to levels of Python's `logging`.

    Args:
        levels: `logging` of the config: level by module or package name, such as `marin_rl.rollouts`. A package
            covers its modules.

    Returns:
        Numeric level by module or package name.

    Raises:
        ValueError: if a module or level does not exist; the message names the key.

    >>> module_levels({"marin_rl.rollouts.rollout_builder": "debug"})
    {'marin_rl.rollouts.rollout_builder': 10}
    """
    for name, level in levels.items():
        if not _exists(name):
            raise ValueError(
                f"logging.{name} does not name a module of {PACKAGE}; use a name from log.txt, such as "
                "marin_rl.rollouts.rollout_builder, or a package, such as marin_rl.rollouts"
            )
        if level not in tuple(LogLevel):
            raise ValueError(f"logging.{name} is {level!r}; it must be one of {', '.join(LogLevel)}")
    return {name: LogLevel(level).number for name, level in levels.items()}


def _exists(module: str) -> bool:
    package, *parts = module.split(".")
    if package != PACKAGE or not all(part.isidentifier() for part in parts):
        return False
    path = Path(next(iter(marin_rl.__path__))).joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()
