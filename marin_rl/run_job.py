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
from marin_rl.runs.run_directory import check_output
from marin_rl.sessions.job import JOB, attempt
from marin_rl.utils.output import go_on_without_output
from marin_rl.utils.settings.option_parser import CommandParser
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.signals import interruptible
from marin_rl.utils.storage import storage_path, write_bytes


def argument_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "python -m marin_rl.run_job",
        description="Start or resume the run of a job, and write its result. The status is 0 if it succeeded, "
        f"{os.EX_TEMPFAIL} if another attempt may succeed, and 1 if not.",
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
    result_file = storage_path(given.result, "RESULT.json")
    if isinstance(result_file, Path) and result_file.resolve() == Path(given.job).resolve():
        raise ConfigError(f"the job and the result are the same file, {given.job!r}; give the result another name")
    if result_file.name == JOB:
        raise ConfigError(f"the result {given.result!r} has the name of a record in run directories; rename it")
    check_output(result_file, "RESULT.json", b'"attempt": "')
    result_file.parent.mkdir(parents=True, exist_ok=True)
    # The result of a former attempt would count as that of this one, if this one is killed.
    result_file.unlink(missing_ok=True)
    go_on_without_output()
    with interruptible():
        result = attempt(Path(given.job))
        write_bytes(result_file, json.dumps(dataclasses.asdict(result), indent=2).encode() + b"\n")
    if result.state == "succeeded":
        return 0
    return os.EX_TEMPFAIL if result.can_be_retried else 1


if __name__ == "__main__":
    sys.exit(main())
