# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A table (Markdown) and a plot of finished runs; runs that differ only in their seed are one row and one curve.

    python -m experiments.lab.report frozenlake.png runs/frozenlake/*-seed*
    python -m experiments.lab.report staleness.png runs/staleness/lag* --metrics policy/clipfrac_avg

Runs are grouped, and can be named (`NAME=DIR`), as by `python -m marin_rl.view`, which draws all metrics.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.lab.results.runs import SCORE
from marin_rl.runs.metrics_file import points
from marin_rl.runs.run_directory import check_output
from marin_rl.runs.run_groups import Band, RunGroup, band, group_runs

MARK = b"marin_rl experiments.report"
"""Text in the header of every figure, which tells figures from other files."""
LAST = 25
"""Number of final steps over which `--metrics` are averaged."""


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines).replace("| --- ", "|---")


def new_panels(titles: Sequence[str], columns: int) -> list[Axes]:
    """Return a panel for each title, in at most `columns` columns of a figure of at most 10 inches."""
    width, columns = 10 / columns, min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(width * columns, width * 0.85 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("RL steps")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(titles) :]:
        axes.remove()
    return panels[: len(titles)]


def plot_band(axes: Axes, bands: Iterable[Band], label: str, color: str | None = None) -> None:
    """Draw the mean of a group as a line, and its range as a band."""
    steps, mean, low, high = zip(*bands, strict=True)
    [line] = axes.plot(steps, mean, color=color, label=label)
    axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def save(panels: Sequence[Axes], picture: Path, **legend: Any) -> None:
    """Add a legend to the first panel, and save the figure as PNG."""
    panels[0].legend(fontsize=8, frameon=False, **legend)
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    figure.savefig(picture, dpi=110, metadata={"Source": MARK.decode()})


def metric_of(group: RunGroup, kind: str) -> str:
    """Return the name of the held-out score of a group, `sampled` or `greedy`.

    Raises:
        ValueError: if the first run has none, or several environments.
    """
    first = group.runs[0]
    names = {
        name for record in first.records for name in record if (found := SCORE.fullmatch(name)) and found[1] == kind
    }
    if len(names) != 1:
        raise ValueError(f"{first.name} has {len(names)} held-out scores, {kind}, instead of one: {sorted(names)}")
    return names.pop()


def table(groups: Sequence[RunGroup], metrics: Sequence[str]) -> str:
    """Return a row for each group: held-out scores at the first and the last evaluation, and metrics, by run."""
    rows = []
    for group in groups:
        cells = []
        for kind in ("sampled", "greedy"):
            values = [[value for _, value in points(run.records, metric_of(group, kind))] for run in group.runs]
            cells.append(" → ".join(", ".join(f"{one[index]:.3f}" for one in values) for index in (0, -1)))
        for name in metrics:
            ends = [[value for _, value in points(run.records, name)][-LAST:] for run in group.runs]
            cells.append(", ".join(f"{np.mean(end):.3g}" if end else "" for end in ends))
        rows.append([group, *cells])
    return markdown_table(
        ["runs", "held out, sampled", "greedy", *(f"`{name}`, last {LAST} steps" for name in metrics)], rows
    )


def draw(groups: Sequence[RunGroup], picture: Path) -> None:
    """Plot the held-out scores of the groups: mean and range."""
    kinds = ("sampled", "greedy")
    panels = new_panels([f"held out, {kind}" for kind in kinds], 2)
    for axes, kind in zip(panels, kinds, strict=True):
        for group in groups:
            plot_band(axes, band([run.records for run in group.runs], metric_of(group, kind)), str(group))
    picture.parent.mkdir(parents=True, exist_ok=True)
    save(panels, picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and save the plot."""
    parser = argparse.ArgumentParser(description="Table and plot of finished runs.", allow_abbrev=False)
    parser.add_argument("picture", type=Path, help="output file, PNG")
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="run directories")
    parser.add_argument("--metrics", nargs="+", default=[], help=f"metrics to average over the last {LAST} steps")
    arguments = parser.parse_args(argv)
    check_output(arguments.picture, "picture", MARK)
    groups = group_runs(arguments.runs)
    print(table(groups, arguments.metrics))
    draw(groups, arguments.picture)


if __name__ == "__main__":
    main()
