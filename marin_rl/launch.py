# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run a command of this package as a job of an Iris cluster: `python -m marin_rl.launch --help`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.pods.config import LaunchConfig
from marin_rl.pods.preflight import check_command
from marin_rl.utils.output import escape, go_on_without_output
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.user_code import require_extra

FLAGS = {
    "local": "Start a cluster on this machine, whose hosts are processes with CPU devices, for this job.",
    "preemptible": "Use preemptible slices only.",
    "dry_run": "Check the command and the files to copy, and stop.",
}
"""Flags of the command."""
USAGE = """\
usage: python -m marin_rl.launch (--cluster NAME | --local) [--slice v5p-32] [--KEY VALUE ...] -- COMMAND ARGUMENTS

COMMAND is a command of this package, such as train, and ARGUMENTS are its own, such as --config experiments/rloo.yaml.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0 if the job succeeded, 1 after an error or if it did not succeed, 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return 1
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:split], arguments[split + 1 :]
    if {"-h", "--help"} & set(own):
        print(USAGE)
    # The options of one would otherwise be reported as unknown options of the other.
    elif not command:
        raise ConfigError("no command; give it with its arguments after --, such as -- train --config FILE")
    parsed = parse_config(LaunchConfig, own, FLAGS)
    if parsed.config.cluster is not None and "local" in parsed.flags:
        raise ConfigError("both --cluster and --local are given; leave one of them out")
    if parsed.config.cluster is None and "local" not in parsed.flags:
        raise ConfigError("no cluster; give its name or YAML file with --cluster, or --local for one on this machine")
    require_extra("iris", "marin_rl.launch")
    go_on_without_output()
    run_dir = check_command(parsed.config, command, _report, is_local="local" in parsed.flags)
    # Imported here because Iris takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.pods.iris_jobs import job_name, run_launch

    name = job_name(command, run_dir)
    if "dry_run" in parsed.flags:
        _report(f"the command and its files are valid; they would be the job {name}")
        return 0
    return run_launch(parsed.config, command, name, preemptible="preemptible" in parsed.flags, report=_report)


def _report(text: str) -> None:
    print(escape(text), flush=True)


if __name__ == "__main__":
    sys.exit(main())
