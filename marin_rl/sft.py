# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Fine-tune a policy on data: `python -m marin_rl.sft --config experiments/sft.yaml`."""

import sys
import time
from collections.abc import Sequence

from marin_rl.config.command_line import (
    RESUME_FLAGS,
    check_command_line,
    parse_run_config,
    run_command,
    without_collections,
)
from marin_rl.utils.output import go_on_without_output
from marin_rl.utils.settings.yaml_text import to_yaml

FLAGS = {
    "print_config": "Print the config with all defaults, and stop.",
    **RESUME_FLAGS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        Exit status, as of `marin_rl.train`.
    """
    interrupted = "interrupted; run the same command again to resume from the last checkpoint, if any"
    return run_command(_run, argv, interrupted)


def _run(arguments: Sequence[str]) -> int:
    started = time.perf_counter()
    checked = check_command_line(arguments, FLAGS, "sft")
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    with without_collections():
        from marin_rl.config.train_config import SftConfig
        from marin_rl.training.config_changes import refuse_moved_runs
        from marin_rl.training.earlier_run import resolve_model
        from marin_rl.training.session import run_session
        from marin_rl.training.supervised_run import prepare_sft

    parsed = parse_run_config(SftConfig, checked, FLAGS)
    if "print_config" in parsed.flags:
        print(to_yaml(resolve_model(parsed.config)), end="")
        return 0
    refuse_moved_runs(parsed.files, parsed.config.run_dir)
    go_on_without_output()
    accept_changes = "accept_changes" in parsed.flags
    run_session(
        parsed.config, sys.stdout, prepare_sft, accept_changes=accept_changes, named=parsed.named, started=started
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
