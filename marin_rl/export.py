# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Export a checkpoint in Hugging Face format: `python -m marin_rl.export --run runs/rloo --output weights`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.sessions.run_export import FLAGS, ExportRunConfig, export


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> None:
    parsed = parse_config(ExportRunConfig, arguments, FLAGS)
    export(parsed.config, adapter="adapter" in parsed.flags, merged="merged" in parsed.flags)


if __name__ == "__main__":
    sys.exit(main())
