# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train a policy: `python -m marin_rl.train --config experiments/rloo.yaml`."""

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
from marin_rl.utils.output import escape, go_on_without_output
from marin_rl.utils.settings.yaml_text import to_yaml

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
    interrupted = "interrupted; run the same command again to resume from the last checkpoint, if any"
    return run_command(_run, argv, interrupted)


def _run(arguments: Sequence[str]) -> int:
    started = time.perf_counter()
    checked = check_command_line(arguments, FLAGS)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    with without_collections():
        from marin_rl.config.train_config import TrainConfig
        from marin_rl.training.config_changes import refuse_moved_runs
        from marin_rl.training.earlier_run import resolve_model
        from marin_rl.training.session import run_session

    parsed = parse_run_config(TrainConfig, checked, FLAGS)
    accept_changes = "accept_changes" in parsed.flags
    if "print_config" in parsed.flags:
        print(to_yaml(resolve_model(parsed.config)), end="")
        return 0
    refuse_moved_runs(parsed.files, parsed.config.run_dir)
    if "dry_run" not in parsed.flags:
        go_on_without_output()
        run_session(parsed.config, sys.stdout, accept_changes=accept_changes, named=parsed.named, started=started)
        return 0
    import jax

    from marin_rl.training.dry_run import dry_run

    # The accelerators may be those of a running job, or absent.
    jax.config.update("jax_platforms", "cpu")

    def report(text: str) -> None:
        print(escape(text), flush=True)

    problems = dry_run(parsed.config, report, accept_changes=accept_changes, named=parsed.named)
    for problem in problems:
        print(f"error: {escape(problem)}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
