# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Levels of the messages in log files, for the whole package and per module."""

import enum
import logging
from collections.abc import Mapping
from pathlib import Path

import marin_rl

PACKAGE = "marin_rl"


class LogLevel(enum.StrEnum):
    """The least severe messages that a log file keeps."""

    DEBUG = "debug"
    """Every step of every episode with its tokens, tool calls, rewards and advantages."""
    INFO = "info"
    """Progress, and a line per rollout."""
    WARNING = "warning"
    """What went wrong and was dealt with."""
    ERROR = "error"
    """What went wrong and was not."""

    @property
    def number(self) -> int:
        """The level of the standard library."""
        return logging.getLevelNamesMapping()[self.name]


def module_levels(levels: Mapping[str, str]) -> dict[str, int]:
    """The configured levels of modules and packages, as numbers of the standard library.

    Args:
        levels: `logging` of the config: by module name as in the log's lines, such as `marin_rl.rollouts`, which covers
            the modules in it.

    Raises:
        ValueError: if there is no such module or level; the message names the key.

    >>> module_levels({"marin_rl.rollouts.rollout_builder": "debug"})
    {'marin_rl.rollouts.rollout_builder': 10}
    """
    for name, level in levels.items():
        if not _exists(name):
            raise ValueError(
                f"logging names {name!r}, which is no module of {PACKAGE}; copy a name from the lines of log.txt, such "
                "as marin_rl.rollouts.rollout_builder, or one of its packages, such as marin_rl.rollouts"
            )
        if level not in tuple(LogLevel):
            raise ValueError(f"logging.{name} is {level!r}; it takes one of {', '.join(LogLevel)}")
    return {name: LogLevel(level).number for name, level in levels.items()}


def _exists(module: str) -> bool:
    package, *parts = module.split(".")
    if package != PACKAGE or not all(part.isidentifier() for part in parts):
        return False
    path = Path(next(iter(marin_rl.__path__))).joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()
