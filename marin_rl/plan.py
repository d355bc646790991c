# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plan a run without its hardware: `python -m marin_rl.plan --config FILE --topology v5p:2x2x4`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from marin_rl.config.command_line import run_command
from marin_rl.pods.planning import print_plan
from marin_rl.utils.settings.option_parser import CommandParser, positive

FITS, DOES_NOT_FIT = 0, 2
"""Exit statuses of a plan."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0 if every program compiles and fits, 2 if one does not, 1 after an error, 130 after an interrupt.
    """
    return run_command(_run, argv)


def argument_parser() -> CommandParser:
    """Return the parser of this command's own arguments; all others are those of marin_rl.train."""
    parser = CommandParser(
        "python -m marin_rl.plan",
        description="Compile every program of a run for a topology, and report its memory.",
        epilog="All other arguments are those of the command that trains: --config FILE and --key value.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--topology", required=True, metavar="NAME", help="v5p-32 or v5p:2x2x4, 2xv5p-32 (two slices), h100:8 or cpu:8"
    )
    parser.add_argument("--worker_topology", metavar="NAME", help="of a rollout worker, which is one host")
    parser.add_argument(
        "--vocab_size", type=positive, help="tokens of the model (default: of initialize_from or the tokenizer)"
    )
    parser.add_argument("--prompt_tokens", type=positive, help="tokens of every prompt (default: the longest)")
    parser.add_argument("--answer_tokens", type=positive, help="sampled tokens of every rollout (default: the longest)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to a file")
    return parser


def _run(argv: Sequence[str]) -> int:
    return FITS if print_plan(*argument_parser().parse_known_args(argv)) else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
