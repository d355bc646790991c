# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Launch training on Cloud TPU, or in several processes of this machine: `python -m marin_rl.launch --help`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import run_command
from marin_rl.pods.launch import HELP, launch_local, launch_tpu
from marin_rl.utils.errors import nearest
from marin_rl.utils.settings.section_types import ConfigError

USAGE = """\
usage: python -m marin_rl.launch COMMAND [ACTION] [--config FILE] [--KEY VALUE ...] [--help] [-- ARGUMENTS]

Commands:
  local       run N training processes on this machine, connected by jax.distributed
  tpu ACTION  train on one or several TPU slices, with rollout workers on further slices (rollout_slices)

Actions of tpu:
  start       request slices or reuse existing ones, install the code, start or resume the run, and follow it
              until it is complete; a run that fails is restarted, slices that are lost are requested again
  status      print the state of slices and hosts
  logs        print the end of the logs
  stop        stop the run with a checkpoint; the slices remain
  delete      delete the slices

ARGUMENTS of local and start are those of python -m marin_rl.train, such as --config experiments/rloo.yaml.
COMMAND [ACTION] --help describes the keys of a command.
"""
COMMANDS = {"local": launch_local, "tpu": launch_tpu}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt; of `local` that of the training.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP:
        print(USAGE, end="")
        return 0 if arguments else 1
    command, *rest = arguments
    split = rest.index("--") if "--" in rest else len(rest)
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    return COMMANDS[command](rest[:split], rest[split + 1 :])


if __name__ == "__main__":
    sys.exit(main())
