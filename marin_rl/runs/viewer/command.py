# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The options of `marin_rl.view`, and what it prints and writes for them."""

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from marin_rl.runs.rollout_store import EVALUATION
from marin_rl.runs.run_groups import group_runs
from marin_rl.runs.viewer.comparison import comparison_data, print_overview
from marin_rl.runs.viewer.html_page import page_data, write_page
from marin_rl.runs.viewer.selection import (
    Listing,
    Selection,
    StoredRollouts,
    find_rollout,
    list_rollouts,
    newest_step,
    parse_steps,
)
from marin_rl.runs.viewer.terminal import print_listing, print_rollout
from marin_rl.types import RolloutStatus
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.option_parser import CommandParser, positive

PIPE_WIDTH = 160
"""Characters per line if the output is not a terminal."""
MAX_ROLLOUTS = 500
"""Rollouts on a page without `--limit`."""


def argument_parser() -> CommandParser:
    """Return the parser of the options."""
    parser = CommandParser(
        "python -m marin_rl.view",
        usage="python -m marin_rl.view RUN [RUN...] [FILTERS] [--id ID | --html FILE] [--help]",
        description="Show the rollouts of a run, or compare runs.",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="run directory or file of rollouts, which is not modified; several run directories are compared: those "
        "that differ only in the seed are one curve, and so are those given as NAME=DIR with the same name",
    )
    which = parser.add_argument_group("filters")
    which.add_argument(
        "--step",
        metavar="N|A-B",
        help="one step or a range: 12, 10-20, 10- or -20 (default: the newest step; in a single file, all)",
    )
    which.add_argument("--evaluation", action="store_true", help="rollouts of evaluations instead of training")
    which.add_argument("--environment", help="name of the environment")
    which.add_argument("--status", choices=[str(status) for status in RolloutStatus], help="final status")
    which.add_argument("--min_reward", type=float, help="minimum total reward")
    which.add_argument("--max_reward", type=float, help="maximum total reward")
    how = parser.add_argument_group("output")
    how.add_argument("--limit", type=positive, help="maximum rollouts, 50 in a list and 500 on a page")
    how.add_argument("--id", help="show one rollout in full")
    how.add_argument("--tokens", action="store_true", help="list every sampled token with its values")
    how.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page instead")
    return parser


def compare(arguments: argparse.Namespace, parser: CommandParser) -> None:
    """Compare several runs; `arguments` are those of `parser`."""
    if arguments.id is not None:
        parser.error("--id shows a rollout of one run; give one run")
    selection = _selection(arguments, None if arguments.step is None else parse_steps(arguments.step))
    if arguments.html is None and (selection != Selection() or arguments.limit):
        parser.error("the table of several runs has no rollouts to filter; add --html FILE for a page with rollouts")
    console, groups = _console(), group_runs(arguments.runs)
    if arguments.html is None:
        print_overview(console, groups)
        return
    _write_page(arguments.html, comparison_data(groups, selection, arguments.limit or MAX_ROLLOUTS), console)


def _write_page(target: Path, data: Mapping[str, Any], console: Console) -> None:
    write_page(data, target)
    for line in (f"{target}: {len(data['rollouts'])} rollouts", *data["notes"]):
        console.print(Text(escape_line(line)), soft_wrap=True)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, emoji=False)


def show(arguments: argparse.Namespace, source: StoredRollouts) -> None:
    """Show the rollouts of one run or file; `arguments` are those of `argument_parser`."""
    console = _console()
    steps = None if arguments.step is None else parse_steps(arguments.step)
    if arguments.html is not None:
        data = page_data(source, _selection(arguments, steps), arguments.limit or MAX_ROLLOUTS)
        _write_page(arguments.html, data, console)
        return
    if arguments.id is not None:
        print_rollout(console, find_rollout(source, arguments.id, steps), tokens=arguments.tokens)
        return
    if steps is None and not source.is_file:
        newest = newest_step(source, evaluation=arguments.evaluation)
        if newest is None:
            kind = "evaluation rollouts" if arguments.evaluation else "rollouts"
            message = (
                f"{source.path} has no stored {kind} yet: its first step has not finished, or rollout_store.every is 0 "
                "in its config.yaml"
            )
            console.print(Text(escape_line(message)), soft_wrap=True)
            return
        steps = range(newest, newest + 1)
    listing = list_rollouts(source, _selection(arguments, steps), limit=arguments.limit or 50)
    print_listing(console, listing, _one_in_full(arguments, listing))


def _one_in_full(arguments: argparse.Namespace, listing: Listing) -> str:
    """Return the command that shows the first rollout of a list in full."""
    if not listing.rows:
        return ""
    row = listing.rows[0]
    # Evaluations repeat their ids.
    step = f" --step {row['step']}" if row["purpose"] == EVALUATION else ""
    return escape_line(f"python -m marin_rl.view {shlex.quote(arguments.runs[0])} --id {shlex.quote(row['id'])}{step}")


def _selection(arguments: argparse.Namespace, steps: range | None) -> Selection:
    return Selection(
        steps,
        arguments.evaluation,
        arguments.environment,
        None if arguments.status is None else RolloutStatus(arguments.status),
        arguments.min_reward,
        arguments.max_reward,
    )
