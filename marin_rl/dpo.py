# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train a policy on pairs of answers: `python -m marin_rl.dpo --config experiments/dpo.yaml`."""

import sys
from collections.abc import Sequence

from marin_rl.sessions.command import run_training_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see [`run_training_command`][marin_rl.sessions.command.run_training_command]."""
    return run_training_command("dpo", argv)


if __name__ == "__main__":
    sys.exit(main())
