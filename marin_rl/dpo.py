# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train a policy on pairs of answers: `python -m marin_rl.dpo --config experiments/dpo.yaml`."""

import sys
import time
from collections.abc import Sequence

from marin_rl.config.command_line import (
    DATA_FLAGS,
    INTERRUPTED,
    check_command_line,
    parse_run_config,
    run_command,
    without_collections,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        Exit status, as of `marin_rl.train`.
    """
    return run_command(_run, argv, INTERRUPTED)


def _run(arguments: Sequence[str]) -> int:
    started = time.perf_counter()
    checked = check_command_line(arguments, DATA_FLAGS, "dpo")
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    with without_collections():
        from marin_rl.config.train_config import DpoConfig
        from marin_rl.training.preference_run import prepare_dpo
        from marin_rl.training.session import run_parsed
        from marin_rl.training.supervised_run import dry_run_data

    return run_parsed(parse_run_config(DpoConfig, checked, DATA_FLAGS), started, prepare_dpo, dry_run_data)


if __name__ == "__main__":
    sys.exit(main())
