# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train on stored or synthetic rollouts, without a sampler: `python -m marin_rl.replay --run runs/rloo --step 20`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import read_arguments, run_command
from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.sessions.command import check_command_line
from marin_rl.utils.settings.option_parser import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def argument_parser() -> CommandParser:
    """Return the parser of the command's own options."""
    parser = CommandParser(
        "python -m marin_rl.replay",
        description="Train on the stored rollouts of a step of a run, or on synthetic ones, without a sampler.",
        epilog="All other arguments are those of marin_rl.train, and change the config of the run.",
        allow_abbrev=False,
    )
    parser.add_argument("--run", metavar="DIR", help="run directory, a path or an address; no file in it is changed")
    parser.add_argument("--step", type=int, metavar="N", help="step to replay")
    parser.add_argument(
        "--fake", metavar="SHAPE", help="synthetic rollouts instead: prompt=32,completion=16-64,steps=4"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser


def _run(argv: Sequence[str]) -> None:
    given, rest = argument_parser().parse_known_args(argv)
    directory = None if given.run is None else open_with_checkpoint(given.run, None)
    if given.fake is None and (directory is None or given.step is None):
        raise ValueError("give --run DIR and --step N to replay a step, or --fake SHAPE for synthetic rollouts")
    if given.fake is not None and given.step is not None:
        raise ValueError(f"--step is {given.step}, but --fake replays no step; omit one of them")
    # The config of a run is checked below, so that its problems name its file.
    arguments = read_arguments(rest, {})
    checked = check_command_line(rest, {}, reads_files=False) if directory is None else None
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.sessions.replay import replay, replay_fake

    config = None if checked is None else checked.complete().config
    if given.fake is not None:
        print(replay_fake(directory, config, arguments, given.fake, as_json=given.json))
    elif directory is not None:
        print(replay(directory, arguments, str(given.run), int(given.step), as_json=given.json))


if __name__ == "__main__":
    sys.exit(main())
