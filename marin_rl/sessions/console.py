# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Progress display of a run, and the summary at its end.

On a terminal, two lines at the bottom are redrawn, and a notebook has a bar. In a pipe or under CI, plain lines are
printed, about `MAX_PLAIN_LINES` per run.
"""

import collections
import html
import io
import itertools
import logging
import math
import os
import shlex
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.runs.metrics_file import read_records
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.training.advice import count_silent
from marin_rl.training.evaluation import is_quality
from marin_rl.training.run_state import Progress
from marin_rl.utils.output import escape, escape_line, report_lost_output
from marin_rl.utils.storage import StoragePath

logger = logging.getLogger(__name__)

MAX_PLAIN_LINES = 50
"""Approximate number of progress lines of a run without a terminal."""

SHOWN = (
    *("reward", "no signal", "KL", "length", "loss", "tok/s", "held-out", "greedy", "held-out reward", "greedy reward"),
    *("pairs", "held-out loss", "held-out token accuracy", "held-out pairs", "rollouts/s", "entropy"),
)
"""Labels of the displayed metrics, most important first. Those that do not fit on the line are omitted."""

EVALUATED = {
    "held-out": "/accuracy_sampled",
    "greedy": "/accuracy_greedy",
    "held-out reward": "/reward_sampled",
    "greedy reward": "/reward_greedy",
    "held-out loss": "/loss",
    "held-out token accuracy": "/token_accuracy",
    "held-out pairs": "/rewards/accuracies",
}
"""Suffixes of the evaluation metrics, by label."""

SEPARATOR = "   "

LOG_WIDTH = 100
"""Characters of a line of a table in the log."""


def is_live(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether lines can be redrawn: on a terminal that is not dumb, and not in a CI job."""
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):
        # A stream of a program, or a closed one.
        return False
    return is_terminal and environment.get("TERM") != "dumb" and not environment.get("CI")


def notebook_output(stream: TextIO) -> Any:
    """Return the handle of an output that can be replaced, if a stream is that of a notebook; otherwise None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if stream is not sys.stdout or not hasattr(shell, "kernel"):
        return None
    from IPython.display import DisplayHandle

    return DisplayHandle()


NOTEBOOK_SECONDS = 0.25
"""Minimum seconds between two changes of a notebook's output."""


class ProgressDisplay:
    """Progress display of a run. Used as a context manager."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        *,
        live: bool | None = None,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Create the display without printing anything.

        Args:
            total_steps: number of steps of the run.
            stream: output stream.
            live: whether to redraw lines; None: detected by `is_live`.
            width: characters per line; None: the terminal's width.
            clock: returns seconds, for the remaining time.
        """
        self._live_lines = is_live(stream, os.environ) if live is None else live
        self.console = Console(file=stream, width=width, highlight=False, force_jupyter=False)
        self._total = total_steps
        self._every = max(1, math.ceil(total_steps / MAX_PLAIN_LINES))
        self._clock = clock
        self._times: collections.deque[float] = collections.deque(maxlen=MAX_PLAIN_LINES)
        self._step = 0
        self._shown: dict[str, str] = {}
        self._live = Live(console=self.console, get_renderable=self._draw, refresh_per_second=4)
        self._cell = notebook_output(stream)
        self._cell_time = -math.inf

    def __enter__(self) -> "ProgressDisplay":
        if self._cell is not None:
            self._cell.display(self._cell_content(), raw=True)
        if self._live_lines:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live_lines:
            self._live.stop()
        report_lost_output()

    def say(self, message: str) -> None:
        """Print a permanent line."""
        self.console.print(Text(escape(message)), soft_wrap=True)
        report_lost_output()

    def update(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Display a finished step.

        Args:
            step: number of the step, starting at 1.
            metrics: metrics of the step.
        """
        self._step = step
        self._times.append(self._clock())
        self._shown.pop("no signal", None)
        shown = self._shown | _shown_metrics(metrics)
        self._shown = {name: shown[name] for name in SHOWN if name in shown}
        evaluated = any(name.startswith("eval/") for name in metrics)
        if self._cell is not None:
            if step == self._total or self._clock() - self._cell_time >= NOTEBOOK_SECONDS:
                self._cell.update(self._cell_content(), raw=True)
                self._cell_time = self._clock()
        elif self._live_lines:
            self._live.refresh()
            report_lost_output()
        elif evaluated or step in (1, self._total) or step % self._every == 0:
            parts = [f"{name} {text}" for name, text in self._shown.items() if evaluated or name not in EVALUATED]
            remaining = [f"left {left}"] if (left := self._remaining()) else []
            self.say(SEPARATOR.join([f"step {step}/{self._total}", *parts, *remaining]))

    def _remaining(self) -> str:
        """Expected remaining time, estimated from the last steps.

        Empty after the first step, whose duration is mostly that of compilation.
        """
        if len(self._times) < 2:
            return ""
        return format_seconds((self._times[-1] - self._times[0]) / (len(self._times) - 1) * (self._total - self._step))

    def _cell_content(self) -> dict[str, str]:
        """Progress as text and as HTML, by MIME type."""
        remaining = [f"{left} left"] if (left := self._remaining()) else []
        parts = [f"step {self._step}/{self._total}", *(f"{name} {text}" for name, text in self._shown.items())]
        text = SEPARATOR.join(parts + remaining)
        bar = f'<progress max="{max(self._total, 1)}" value="{self._step}"></progress>'
        return {"text/plain": text, "text/html": f"{bar} {html.escape(text).replace(SEPARATOR, ' &ensp; ')}"}

    def _draw(self) -> RenderableType:
        width = self.console.width
        remaining = self._remaining()
        ends = f"step {self._step}/{self._total}", f"{remaining} left" if remaining else ""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(Text(ends[0], "bold"), Bar(max(self._total, 1), 0, self._step, color="green"), Text(ends[1], "dim"))
        line = Text(no_wrap=True, overflow="ellipsis")
        for name, text in self._shown.items():
            part = Text.assemble((f"{name} ", "dim"), (text, "bold"))
            if line.cell_len + len(SEPARATOR) + part.cell_len <= width:
                line.append_text(Text(SEPARATOR if line else "")).append_text(part)
        return Group(bar, line)


LOGGED = ("reward", "no signal", "KL", "length", "loss", "pairs", *EVALUATED)
"""Labels of the metrics in the log's line of a step."""


def describe_step(step: int, total_steps: int, metrics: Mapping[str, int | float]) -> str:
    """Describe a finished step in one line, for the log.

    >>> describe_step(3, 12, {"train/rewards": 0.5, "train/output_length": 4.0, "seconds/total": 1.25})
    'step 3/12: reward 0.500, length 4.0, 1.2s'
    """
    shown = _shown_metrics(metrics)
    parts = [f"{name} {shown[name]}" for name in LOGGED if name in shown]
    if "seconds/total" in metrics:
        parts.append(format_seconds(metrics["seconds/total"]))
    return f"step {step}/{total_steps}: {', '.join(parts)}"


def _shown_metrics(metrics: Mapping[str, int | float]) -> dict[str, str]:
    """Formatted values of the displayed metrics, by the labels in `SHOWN`."""
    shown = {}
    for name, key, form in (
        ("reward", "train/rewards", format_fraction),
        ("KL", "objective/kl", format_fraction),
        ("length", "train/output_length", lambda value: f"{value:.1f}"),
        ("rollouts/s", "eps", format_count),
        ("loss", "loss/ce_avg", format_fraction),
        ("loss", "loss/dpo", format_fraction),
        ("pairs", "rewards/accuracies", format_fraction),
        ("tok/s", "tokens/sampled_per_second", format_count),
        ("entropy", "policy/entropy_avg", format_fraction),
    ):
        if key in metrics:
            shown[name] = form(metrics[key])
    silent, groups = count_silent(metrics)
    if 2 * silent > groups:
        shown["no signal"] = f"in {silent:,} of {groups:,} groups"
    for name, kind in EVALUATED.items():
        if values := [value for key, value in metrics.items() if key.startswith("eval/") and key.endswith(kind)]:
            shown[name] = " ".join(map(format_fraction, values))
    return shown


def print_closing_table(
    console: Console,
    run_directory: StoragePath,
    evaluations: Mapping[str, Mapping[str, int | float]],
    seconds: Mapping[str, int | float],
    totals: Mapping[str, int | float | str],
    command: Mapping[str, float] = types.MappingProxyType({}),
    compiling_steps: float = 0.0,
    compiling_command: float = 0.0,
    trained_with: str = "train",
) -> None:
    """Print the summary of a run: accuracy before and after, time by phase, counts and next commands.

    Commands are not wrapped, so that they can be copied.

    Args:
        console: output.
        run_directory: the run directory.
        evaluations: evaluation metrics by time (`before RL`, …), in order; accuracies and pass@k are displayed.
        seconds: total seconds by phase.
        totals: total counts by name, or their texts.
        command: seconds of this command by part.
        compiling_steps: seconds of compilation in the steps, a part of `seconds`.
        compiling_command: seconds of compilation in this command, a part of `command`.
        trained_with: the command of the run, after `python -m marin_rl.`.
    """
    console.print()
    if evaluations:
        console.print(_accuracy_table(evaluations))
    if any(seconds.values()):
        console.print(_time_table("Time of the steps", "phase", seconds, compiling_steps))
    if any(command.values()):
        console.print(_time_table("Time of this command", "part", command, compiling_command))
    facts = {name: value if isinstance(value, str) else f"{value:,.0f}" for name, value in totals.items()}
    facts["run directory"] = escape_line(str(run_directory))
    column = max(map(len, facts))
    for name, text in facts.items():
        console.print(Text.assemble((f"{name:{column}}  ", "dim"), escape(text)), soft_wrap=True)
    # A leading dash would be read as an option.
    path = f"./{run_directory}" if str(run_directory).startswith("-") else str(run_directory)
    quoted = escape_line(shlex.quote(path))
    train = "python -m marin_rl.train --config CONFIG"
    next_commands = {
        "View its rollouts": f"python -m marin_rl.view {quoted}",
        "Evaluate it again": f"python -m marin_rl.evaluate --run {quoted}",
        "Talk to it": f"python -m marin_rl.chat --run {quoted}",
        "Train from its weights": f"{train} --run_dir NEW --initialize_from {quoted} --warm_start.max_steps 0",
        "Train it longer": f"python -m marin_rl.{trained_with} --config CONFIG --run_dir {quoted} --num_steps N",
    }
    if trained_with != "train":
        del next_commands["View its rollouts"], next_commands["Evaluate it again"]
    for purpose, line in next_commands.items():
        console.print(Text.assemble((f"\n{purpose}\n", "dim"), (f"  {escape(line)}", "bold")), soft_wrap=True)


def _accuracy_table(evaluations: Mapping[str, Mapping[str, int | float]]) -> Table:
    """Return a table with a row for each metric and a column for each evaluation.

    pass@1 equals the sampled accuracy, and is omitted.
    """
    names = dict.fromkeys(
        name
        for metrics in evaluations.values()
        for name in metrics
        if is_quality(name) or (name.startswith("eval/") and "/pass@" in name and not name.endswith("/pass@1"))
    )
    environments = {name.removeprefix("eval/").rpartition("/")[0] for name in names}
    kinds = [kind for kind in ("accuracy", "reward", "loss") if any(f"/{kind}" in name for name in names)]
    table = _empty_table(f"Held-out {[*kinds, 'accuracy'][0]}")
    table.add_column("", overflow="fold")
    for column in (*evaluations, *(["change"] if len(evaluations) > 1 else [])):
        table.add_column(column, justify="right", no_wrap=True, style="bold" if column == "change" else None)
    for name in names:
        environment, _, kind = name.removeprefix("eval/").rpartition("/")
        label = kind.removeprefix("accuracy_")
        values = [metrics.get(name) for metrics in evaluations.values()]
        cells = ["" if value is None else format_fraction(value) for value in values]
        if len(values) > 1:
            before, after = values[-2:]
            cells.append("" if before is None or after is None else f"{after - before:+.3f}")
        table.add_row(Text(escape_line(f"{environment} {label}" if len(environments) > 1 else label)), *cells)
    return table


def _empty_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _time_table(title: str, column: str, seconds: Mapping[str, int | float], compiling: float) -> Table:
    """Return a table of seconds, largest first, with their total and the part of it that is compilation."""
    total = sum(seconds.values())
    table = _empty_table(title)
    for name in (column, "time", "share"):
        table.add_column(name, justify="left" if name == column else "right")
    for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, format_seconds(value), f"{value / total:.0%}")
    table.add_section()
    table.add_row("total", format_seconds(total), "", style="bold")
    if compiling:
        # Another thread may have compiled since before the first step.
        compiling = min(compiling, total)
        table.add_row("of which compilation", format_seconds(compiling), f"{compiling / total:.0%}", style="dim")
    return table


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> format_seconds(7.4), format_seconds(83.0), format_seconds(7384.0)
    ('7.4s', '1:23', '2:03:04')
    """
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(value: float) -> str:
    """Format a count or a rate with two or three significant digits.

    >>> format_count(0.123), format_count(4.56), format_count(8123.0), format_count(999_960.0), format_count(1.25e6)
    ('0.12', '4.6', '8.1k', '1.0M', '1.2M')
    """
    if value < 10:
        return f"{value:.1f}" if value >= 1 else f"{value:.2f}"
    if round(value) < 1000:
        return f"{value:.0f}"
    for size, suffix in ((1e3, "k"), (1e6, "M")):
        if round(value / size, 1) < 1000:
            return f"{value / size:.1f}{suffix}"
    return f"{value / 1e9:.1f}G"


def format_fraction(value: float) -> str:
    """Format a reward, probability or nats with three decimals, or in exponent form if they would be zeros.

    >>> format_fraction(0.53125), format_fraction(0.00021), format_fraction(0.0)
    ('0.531', '2.1e-04', '0.000')
    """
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3f}"


def report_finished(directory: RunDirectory, config: AbstractRunConfig, progress: Progress, stream: TextIO) -> str:
    """Print the results of a run that is complete; return the first line."""
    message = (
        f"the run in {str(directory.path)!r} is complete after step {progress.step}, and nothing is changed. To make "
        f"it longer, add --num_steps N with N above {progress.step} to the command"
    )
    display = ProgressDisplay(progress.step, stream)
    display.say(message)
    print_summary(display.console, directory, config, progress, {})
    return message


def print_and_log(
    console: Console,
    directory: RunDirectory,
    config: AbstractRunConfig,
    progress: Progress,
    command: Mapping[str, float],
    compiling: float,
) -> None:
    """Print a summary to the console, and write its lines to the log; see `print_summary`."""
    print_summary(console, directory, config, progress, command, compiling)
    text = io.StringIO()
    log = Console(file=text, width=LOG_WIDTH, highlight=False, force_jupyter=False)
    print_summary(log, directory, config, progress, command, compiling)
    for line in filter(str.strip, text.getvalue().splitlines()):
        logger.info("%s", line.rstrip())


def print_summary(
    console: Console,
    directory: RunDirectory,
    config: AbstractRunConfig,
    progress: Progress,
    command: Mapping[str, float],
    compiling: float = 0.0,
) -> None:
    """Print the summary of a complete run.

    Args:
        console: output.
        directory: run directory.
        config: config of the run.
        progress: counts and evaluations.
        command: seconds of this command by part; empty if it has not trained.
        compiling: seconds of this command in which programs were compiled.
    """
    records = read_records(directory.metrics)
    prefix = "seconds/"
    names = dict.fromkeys(name for name in itertools.chain(*records) if name.startswith(prefix))
    seconds = {name.removeprefix(prefix): sum(record.get(name, 0.0) for record in records) for name in names}
    seconds.pop("total", None)
    in_steps = seconds.pop("compile", 0.0)
    totals: dict[str, int | float | str] = {"updates": progress.updates}
    if skipped := sum(record.get("updates/skipped", 0) for record in records):
        totals["updates"] = f"{progress.updates:,}; {skipped:,.0f} without a gradient were left out"
    silent, groups = (sum(counts) for counts in zip(*map(count_silent, records), (0, 0), strict=True))
    if 2 * silent > groups:
        totals["no signal"] = f"in {silent:,} of {groups:,} groups"
    if config.samples:
        totals |= {"rollouts": progress.episodes, "tokens sampled": progress.sampled_tokens}
    else:
        totals |= {"tokens trained": progress.trained_tokens}
    print_closing_table(
        console, directory.path, progress.evaluations, seconds, totals, command, in_steps, compiling, config.command
    )
