# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The commands that train, and the check of their command lines before levanter is imported."""

import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from marin_rl.config.command_line import (
    Arguments,
    ParsedConfig,
    merge_layers,
    parse_arguments,
    read_arguments,
    run_command,
    suggesting,
    without_collections,
)
from marin_rl.utils.settings.decode import decode, decode_rest
from marin_rl.utils.settings.help import overview_text
from marin_rl.utils.settings.imports import import_types
from marin_rl.utils.settings.option_parser import HelpShown
from marin_rl.utils.settings.section_types import ConfigError, deferring

ConfigT = TypeVar("ConfigT")

RESUME_FLAGS = {"accept_changes": "Resume although files of the run were changed, and record the changes."}
"""Flags of the commands that train which commands that start them pass on."""
TRAIN_FLAGS = {
    "dry_run": "Check everything that the run will need, print the size of a step, and stop.",
    "print_config": "Print the config with all defaults, and stop.",
    **RESUME_FLAGS,
}
"""Flags of the commands that train."""


@dataclasses.dataclass(frozen=True)
class CheckedLine(Generic[ConfigT]):
    """The command line of a run's config, whose settings are checked, except for those of levanter's sections."""

    arguments: Arguments
    """The arguments."""
    config: ConfigT
    """The config without levanter's sections."""

    def complete(self) -> ParsedConfig[ConfigT]:
        """Decode levanter's sections, and check them.

        Raises:
            ConfigError: if one is invalid.
        """
        raw = merge_layers(type(self.config), self.arguments.layers())
        with suggesting(type(self.config), raw, self.arguments):
            return ParsedConfig(decode_rest(self.config, raw), self.arguments)


def check_command_line(
    argv: Sequence[str], flags: Mapping[str, str], command: str | None = "train", *, reads_files: bool = True
) -> CheckedLine[Any]:
    """Validate the command line of a run's config, or print the help, without importing levanter, which takes seconds.

    Args:
        argv: arguments of `parse_config`.
        flags: flags of `parse_config`.
        command: the command that trains, None for that of the config.
        reads_files: whether the run will read its input files on this machine, so that they must exist.

    Raises:
        ConfigError: if the command line is invalid; the message names all problems of settings other than levanter's.
        HelpShown: with status 0, after `--help` has printed its text.
    """
    arguments = read_arguments(argv, flags)
    if arguments.help_section is None and not arguments.config_paths and not arguments.overrides:
        raise ConfigError("no config; give its file with --config FILE. --help lists the most important keys")
    layers = arguments.layers()
    # Imported here because the sections take a second to import, and the problems above can be reported without them.
    with without_collections():
        from marin_rl.config.input_files import file_problems
        from marin_rl.sessions import recipes

    found = recipes.config_class(collections.ChainMap(*layers))
    config_class = found if command is None else recipes.config_class_of(command)
    if arguments.help_section == "":
        with deferring():
            sys.stdout.write(overview_text(config_class, flags, config_class.command, config_class.common_keys))
        raise HelpShown(0)
    if arguments.help_section is not None:
        return CheckedLine(arguments, parse_arguments(config_class, arguments, flags, {}).config)
    import_types(config_class, layers)
    with deferring():
        raw = merge_layers(config_class, layers)
    if found is not config_class and found.source_key in raw and config_class.source_key not in raw:
        raise ConfigError(
            f"this is a config of marin_rl.{found.command}, because it has {found.source_key!r}, but the command takes "
            f"configs of marin_rl.{config_class.command}, which have {config_class.source_key!r}"
        )
    try:
        with deferring():
            config = decode(config_class, raw)
    except ConfigError as error:
        # A key that is near to no other may belong to a section of levanter.
        if any(problem.startswith("unknown key ") and "did you mean" not in problem for problem in error.problems):
            return CheckedLine(arguments, parse_arguments(config_class, arguments, flags, {}).config)
        with deferring(), suggesting(config_class, raw, arguments):
            raise
    if reads_files and (problems := list(file_problems(config))):
        raise ConfigError(*problems)
    return CheckedLine(arguments, config)


def run_training_command(command: str, argv: Sequence[str] | None = None) -> int:
    """Run the command line of a command that trains.

    `command` is its name; `argv` is None for the arguments of the process.

    Returns:
        Exit status: 0 if the run is complete or was stopped by the user, 1 after an error, 130 after an interrupt
        before a checkpoint could be saved.
    """
    interrupted = "interrupted; run the same command again to resume from the last checkpoint, if any"
    return run_command(functools.partial(_run, command), argv, interrupted)


def _run(command: str, arguments: Sequence[str]) -> int:
    started = time.perf_counter()
    checked = check_command_line(arguments, TRAIN_FLAGS, command)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    with without_collections():
        from marin_rl.sessions.session import run_parsed

    return run_parsed(checked.complete(), started)
