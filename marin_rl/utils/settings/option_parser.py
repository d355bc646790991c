# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parser of a command with few options, which are no keys of a config."""

import argparse
from typing import NoReturn

from marin_rl.utils.settings.section_types import ConfigError


class HelpShown(SystemExit):
    """A command has printed the text of `--help`."""


class CommandParser(argparse.ArgumentParser):
    """Parser of a command with few options; raises ConfigError for wrong arguments instead of printing its usage."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the command after `--help`."""
        raise HelpShown(status)

    def error(self, message: str) -> NoReturn:
        """Raise the error, with the remedy."""
        raise ConfigError(f"{message}; see --help")


def positive(text: str) -> int:
    """Parse the value of an option of a `CommandParser`: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
