# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The commands that train."""

import functools
import time
from collections.abc import Sequence

from marin_rl.config.command_line import (
    TRAIN_FLAGS,
    check_command_line,
    run_command,
    without_collections,
)


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
