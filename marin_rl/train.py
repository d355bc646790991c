# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train a policy: `python -m marin_rl.train --config experiments/rloo.yaml`."""

import sys
from collections.abc import Sequence

from marin_rl.escaping import escape
from marin_rl.runtime.config_decoding import ConfigError
from marin_rl.runtime.config_parsing import check_command_line, parse_config, to_yaml

FLAGS = {"dry_run": "Check the config, print it in full with what each update amounts to, and stop."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0 when the run is complete or was stopped on request, 1 after an error, 130 after an
        interrupt that left no time to save.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        check_command_line(arguments, FLAGS, "marin_rl.runtime.config", "TrainConfig")
    except ConfigError as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    # Importing jax and levanter takes seconds, so the mistakes that can be found without them are reported before.
    from marin_rl.environments.base import Split
    from marin_rl.runtime.config import TrainConfig, levanter_defaults
    from marin_rl.runtime.dry_run import describe_run
    from marin_rl.runtime.session import run_session
    from marin_rl.runtime.starting_weights import resolve_model
    from marin_rl.runtime.user_errors import USER_ERRORS

    try:
        parsed = parse_config(TrainConfig, arguments, levanter_defaults(), FLAGS)
        if "dry_run" in parsed.flags:
            config = resolve_model(parsed.config)
            print(to_yaml(config))
            tasks = config.environment.build().tasks(Split.TRAIN)
            print(describe_run(config, config.tokenizer.build(), len(tasks)))
            return 0
        run_session(parsed.config, sys.stdout)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from the last checkpoint, if any", file=sys.stderr)
        return 130
    except USER_ERRORS as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
