# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train a policy: `python -m marin_rl.train --config experiments/rloo.yaml`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import (
    RESUME_FLAGS,
    check_command_line,
    parse_config,
    run_command,
    without_collections,
)
from marin_rl.config.yaml_text import to_yaml
from marin_rl.escaping import escape
from marin_rl.output import go_on_without_output

FLAGS = {
    "dry_run": "Validate the config, print it with all defaults and the size of a step, and stop.",
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
    check_command_line(arguments, FLAGS)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    with without_collections():
        from marin_rl.config.train_config import TrainConfig
        from marin_rl.environments.base import Split
        from marin_rl.training.dry_run import check_tasks, describe_run
        from marin_rl.training.session import run_session
        from marin_rl.training.starting_weights import check_weight_files, resolve_model

    parsed = parse_config(TrainConfig, arguments, FLAGS)
    if "dry_run" in parsed.flags:
        config = resolve_model(parsed.config)
        check_weight_files(config)
        environment = config.environment.build()
        check_tasks(config, environment)
        sizes = describe_run(config, config.tokenizer.build(), len(environment.tasks(Split.TRAIN)))
        print(escape(f"{to_yaml(config)}\n{sizes}"))
        return 0
    go_on_without_output()
    run_session(parsed.config, sys.stdout, accept_changes="accept_changes" in parsed.flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
