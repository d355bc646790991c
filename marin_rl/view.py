# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Show stored rollouts in the terminal, `python -m marin_rl.view runs/rloo`, or as a page with `--html FILE`.

With several runs, compare them: a table of their metrics, or a page with curves over each other and rollouts side by
side.
"""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import run_command
from marin_rl.runs.rollout_store import list_files
from marin_rl.runs.run_directory import RunDirectory, read_config_text
from marin_rl.runs.viewer.command import argument_parser, compare, show
from marin_rl.runs.viewer.selection import open_rollouts
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.settings.yaml_text import parse_yaml
from marin_rl.utils.storage import storage_path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(argv: Sequence[str]) -> None:
    arguments = (parser := argument_parser()).parse_args(argv)
    if len(arguments.runs) > 1:
        compare(arguments, parser)
        return
    [run] = arguments.runs
    source = open_rollouts(storage_path(run, "RUN"))
    if not source.is_file and not list_files(source.rollouts):
        # Imported here because it imports jax, which most views do not need.
        from marin_rl.sessions.recipes import config_class

        values = parse_yaml(read_config_text(RunDirectory(source.path)), f"the config of {run}")
        if not (config := config_class(values)).samples:
            raise RunDirectoryError(
                f"{run!r} is a run of marin_rl.{config.command}, which trains on data and stores no rollouts; see its "
                "metrics.jsonl or curves.png"
            )
    show(arguments, source)


if __name__ == "__main__":
    sys.exit(main())
