# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train a policy: `python -m marin_rl.train --config experiments/rloo.yaml`."""

import sys
import time
from collections.abc import Sequence

from marin_rl.config.command_line import (
    INTERRUPTED,
    RESUME_FLAGS,
    check_command_line,
    parse_run_config,
    run_command,
    without_collections,
)

FLAGS = {
    "dry_run": "Check everything that the run will need, print the size of a step, and stop.",
    "print_config": "Print the config with all defaults, and stop.",
    **RESUME_FLAGS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        Exit status: 0 if the run is complete or was stopped by the user, 1 after an error, 130 after an interrupt
        before a checkpoint could be saved.
    """
    return run_command(_run, argv, INTERRUPTED)


def _run(arguments: Sequence[str]) -> int:
    started = time.perf_counter()
    checked = check_command_line(arguments, FLAGS)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    with without_collections():
        from marin_rl.config.train_config import TrainConfig
        from marin_rl.training.session import run_parsed

    return run_parsed(parse_run_config(TrainConfig, checked, FLAGS), started)


if __name__ == "__main__":
    sys.exit(main())
