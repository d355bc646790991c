# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Launch training on several hosts, or in several processes of this machine: `python -m marin_rl.launch --help`."""

import sys
import time
from collections.abc import Sequence

from marin_rl.config.command_line import parse_config
from marin_rl.errors import USER_ERRORS
from marin_rl.escaping import escape
from marin_rl.launch.local import LocalConfig, run_together, training_processes
from marin_rl.launch.supervise import SupervisorConfig, supervise

USAGE = """\
usage: python -m marin_rl.launch COMMAND [--config FILE] [--KEY VALUE ...] [--help] [-- ARGUMENTS]

Commands:
  local      run N training processes on this machine, connected by jax.distributed
  supervise  run the command in ARGUMENTS, and restart it after a failure

ARGUMENTS of local are those of python -m marin_rl.train, such as --config experiments/rloo.yaml.
COMMAND --help describes the keys of a command.
"""
DRY_RUN = {"dry_run": "Print every command and file, and stop."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        Exit status: 0, or 1 after an error; of `local` and `supervise` the exit status of the command.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 1
    command, *rest = arguments
    split = rest.index("--") if "--" in rest else len(rest)
    own, passed = rest[:split], rest[split + 1 :]
    try:
        match command:
            case "local":
                return _local(own, passed)
            case "supervise":
                return _supervise(own, passed)
        raise ValueError(f"unknown command {command!r}; valid commands: local, supervise")
    except USER_ERRORS as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1


def _local(own: Sequence[str], passed: Sequence[str]) -> int:
    parsed = parse_config(LocalConfig, own, DRY_RUN)
    if not passed:
        raise ValueError("no training arguments; give those of marin_rl.train after --, such as -- --config FILE")
    processes = training_processes(parsed.config, passed)
    if "dry_run" in parsed.flags:
        print("\n".join(map(str, processes)))
        return 0
    return run_together(processes, parsed.config.stop_timeout, _write)


def _supervise(own: Sequence[str], passed: Sequence[str]) -> int:
    config = parse_config(SupervisorConfig, own).config
    if not passed:
        raise ValueError("no command; give it after --, such as -- python -m marin_rl.train --config FILE")
    return supervise(config, passed, lambda text: _write(f"{time.strftime('%F %T')} [supervisor] {text}\n"))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
