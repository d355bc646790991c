# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a job of another program: `python -m marin_rl.run_job job.json result.json`."""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from marin_rl.config.command_line import run_command
from marin_rl.sessions.job import attempt_to_file
from marin_rl.utils.settings.option_parser import CommandParser


def argument_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "python -m marin_rl.run_job",
        description="Start or resume the run of a job, and write and print its result. The status is 0 if it "
        f"succeeded, {os.EX_TEMPFAIL} if another attempt may succeed, and 1 if not.",
    )
    parser.add_argument("job", metavar="JOB.json", help="config, inputs with their checksums, run_dir and attempt")
    parser.add_argument("result", metavar="RESULT.json", help="path or address of the result, written at the end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0 if the job succeeded, 75 (`EX_TEMPFAIL`) if another attempt may succeed, 1 if not.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    given = argument_parser().parse_args(arguments)
    result = attempt_to_file(Path(given.job), given.result)
    print(json.dumps(dataclasses.asdict(result)))
    if result.state == "succeeded":
        return 0
    return os.EX_TEMPFAIL if result.can_be_retried else 1


if __name__ == "__main__":
    sys.exit(main())
