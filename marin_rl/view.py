# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Show the rollouts of a run or of one file: `python -m marin_rl.view runs/rloo`, or as a page with `--html FILE`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from marin_rl.escaping import escape
from marin_rl.rollouts.store import RolloutStoreError
from marin_rl.runtime.run_directory import RunDirectoryError, local_path
from marin_rl.types import RolloutStatus
from marin_rl.viewing.html_page import write_page
from marin_rl.viewing.selection import (
    RolloutSource,
    Selection,
    SortKey,
    find_rollout,
    list_rollouts,
    newest_step,
    open_source,
    parse_steps,
)
from marin_rl.viewing.terminal import print_listing, print_rollout, print_side_by_side

USER_ERRORS = (ValueError, OSError, RunDirectoryError, RolloutStoreError)
"""Errors whose message says what to do; a traceback would only hide it."""

PIPE_WIDTH = 160
"""Characters in a line where the output is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        The exit status: 0, or 1 after an error.
    """
    arguments = _parser().parse_args(argv)
    try:
        _show(arguments, open_source(local_path(arguments.run, "RUN")))
    except USER_ERRORS as error:
        print(f"error: {escape(str(error))}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m marin_rl.view", description="Look at the rollouts of a run.")
    parser.add_argument("run", metavar="RUN", help="the run directory, or one file of rollouts; neither is changed")
    which = parser.add_argument_group("which rollouts")
    which.add_argument("--step", type=int, help="those of one step; by default the newest, of a single file all")
    which.add_argument("--steps", type=parse_steps, metavar="A-B", help="those of some steps: 10-20, 10-, -20")
    which.add_argument("--evaluation", action="store_true", help="those of evaluations instead of training")
    which.add_argument("--environment", help="those of one environment")
    which.add_argument("--status", type=RolloutStatus, choices=list(RolloutStatus), help="those that ended so")
    which.add_argument("--min_reward", type=float, help="those with at least this reward")
    which.add_argument("--max_reward", type=float, help="those with at most this reward")
    how = parser.add_argument_group("what to show of them")
    how.add_argument("--sort", type=SortKey, choices=list(SortKey), help="order of the list")
    how.add_argument("--descending", action="store_true", help="the greatest first")
    how.add_argument("--limit", type=_positive, default=50, help="most lines in the list (50)")
    how.add_argument("--id", action="append", default=[], help="this one in full; two of them side by side")
    how.add_argument("--compare", nargs=2, metavar=("A", "B"), default=[], help="these two side by side")
    how.add_argument("--tokens", action="store_true", help="with every sampled token and its numbers")
    page = parser.add_argument_group("a page of the run")
    page.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page instead")
    page.add_argument("--max_rollouts", type=_positive, default=500, help="most rollouts on it (500)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return value


def _show(arguments: argparse.Namespace, source: RolloutSource) -> None:
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, emoji=False)
    steps = _steps(arguments)
    if arguments.html is not None:
        count = write_page(source, arguments.html, _selection(arguments, steps), arguments.max_rollouts)
        console.print(f"{arguments.html}: {count} rollouts", markup=False, soft_wrap=True)
        return
    ids = [*arguments.id, *arguments.compare]
    if ids:
        rows = [find_rollout(source, id, steps) for id in ids]
        if len(rows) == 1:
            print_rollout(console, rows[0], tokens=arguments.tokens)
        else:
            print_side_by_side(console, rows, tokens=arguments.tokens)
        return
    if steps is None and not source.is_file:
        newest = newest_step(source, evaluation=arguments.evaluation)
        if newest is None:
            console.print(_nothing(source, arguments.evaluation), markup=False, soft_wrap=True)
            return
        steps = range(newest, newest + 1)
    listing = list_rollouts(
        source,
        _selection(arguments, steps),
        sort=arguments.sort,
        descending=arguments.descending,
        limit=arguments.limit,
    )
    print_listing(console, listing)


def _steps(arguments: argparse.Namespace) -> range | None:
    if arguments.step is None:
        return arguments.steps
    if arguments.steps is not None:
        raise ValueError("both --step and --steps were given; give one of them")
    return range(arguments.step, arguments.step + 1)


def _selection(arguments: argparse.Namespace, steps: range | None) -> Selection:
    return Selection(
        steps,
        arguments.evaluation,
        arguments.environment,
        arguments.status,
        arguments.min_reward,
        arguments.max_reward,
    )


def _nothing(source: RolloutSource, evaluation: bool) -> str:
    kind = "evaluation rollouts" if evaluation else "rollouts"
    return (
        f"{source.path} has no stored {kind} yet: its first step is not over, or rollout_store.every is 0 in its "
        "config.yaml"
    )


if __name__ == "__main__":
    sys.exit(main())
