# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tables and plots of `docs/pages/results.md`, from the records alone."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from experiments.report import markdown_table
from experiments.results.runs import ROOT, Record, read
from experiments.results.tasks import COMPARED, CONTROL, TASKS

PAGE = ROOT / "docs" / "pages" / "results.md"
PICTURES = ROOT / "docs" / "pages" / "images"
BASELINE = "rloo"
"""The objective with which the others are compared."""


def by_label(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records of each label."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.label, []).append(record)
    return groups


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Return the mean of independent values and the half width of its confidence interval, by Student's t."""
    spread = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(np.mean(values)), float(stats.t.ppf((1 + share) / 2, len(values) - 1) * spread)


def task_table() -> str:
    """Return one row for each task: before and after, sampled and greedy, by seed, and the control."""
    rows = []
    for name in TASKS:
        for label, records in by_label(read(name)).items():
            sampled, greedy = _change([one.sampled for one in records]), _change([one.greedy for one in records])
            steps, minutes = records[0].steps[-1], np.mean([record.cpu_seconds for record in records]) / 60
            rows.append([f"`{name}`", label, len(records), sampled, greedy, steps, f"{minutes:.1f}"])
    return markdown_table(["task", "rewards", "seeds", "held out, sampled", "greedy", "steps", "CPU minutes"], rows)


def objective_table(task: str) -> str:
    """Return one row for each objective: mean and interval at the end and over the run, and the paired difference."""
    groups = by_label(read(task))
    ends = {label: {record.seed: record.sampled[-1] for record in records} for label, records in groups.items()}
    base = ends.get(BASELINE, {})
    wide = 1 - 0.05 / max(len(ends.keys() - {BASELINE}), 1)
    rows = []
    for label, records in groups.items():
        cells = [
            _plus_minus(*interval([*ends[label].values()])),
            _plus_minus(*interval([float(np.mean(one.sampled)) for one in records])),
        ]
        # Runs of a seed have the same start; until all runs are recorded, some have no counterpart.
        pairs = [(end, base[seed]) for seed, end in ends[label].items() if seed in base]
        if label == BASELINE or not pairs:
            difference = ""
        else:
            mean, half = interval([end - other for end, other in pairs], wide)
            difference = f"{mean:+.3f} ± {half:.3f}, {'real' if abs(mean) > half else 'not told apart from 0'}"
        rows.append([f"`{label}`", *cells, difference])
    columns = ["objective", "accuracy after the last step", "mean over the run", f"difference from `{BASELINE}`"]
    return markdown_table(columns, rows)


def draw_tasks(picture: Path) -> None:
    """Plot the held-out score of every task: mean and range of its seeds, and the control."""
    names = [name for name in TASKS if read(name)]
    figure, panels = new_panels(names, 4)
    for axes, name in zip(panels, names, strict=True):
        for label, records in by_label(read(name)).items():
            plot_band(axes, records, label, "#888888" if label == CONTROL else "C0")
    panels[0].legend(fontsize=8, frameon=False, title="rewards", title_fontsize=8)
    figure.savefig(picture, dpi=110)


def draw_objectives(picture: Path) -> None:
    """Plot the held-out score of every objective on each task: mean and range of the seeds."""
    figure, panels = new_panels(list(COMPARED), 2)
    for axes, name in zip(panels, COMPARED, strict=True):
        for number, (label, records) in enumerate(by_label(read(name)).items()):
            plot_band(axes, records, label, f"C{number}")
    panels[0].legend(fontsize=8, frameon=False, ncols=2)
    figure.savefig(picture, dpi=110)


def new_panels(titles: Sequence[str], columns: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of at most 10 inches with a panel for each title, in at most `columns` columns."""
    width, columns = 10 / columns, min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(width * columns, width * 0.85 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="RL steps", ylabel="held out, sampled")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(titles) :]:
        axes.remove()
    return figure, panels[: len(titles)]


def plot_band(axes: Axes, records: Sequence[Record], label: str, color: str) -> None:
    """Draw the mean of the seeds as a line, and their range as a band."""
    values = np.array([record.sampled for record in records])
    axes.plot(records[0].steps, values.mean(0), color=color, label=label)
    axes.fill_between(records[0].steps, values.min(0), values.max(0), color=color, alpha=0.15, linewidth=0)


def update() -> None:
    """Draw the pictures, and write the tables between their markers in the page."""
    PICTURES.mkdir(exist_ok=True)
    draw_tasks(PICTURES / "tasks.png")
    if all(map(read, COMPARED)):
        draw_objectives(PICTURES / "objectives.png")
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(page: str) -> str:
    """Return a page with the tables of the records between their markers.

    Raises:
        ValueError: if the end of a table is not marked.
    """
    tables = {"tasks": task_table(), **{task: objective_table(task) for task in COMPARED}}
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, after = page.partition(begin)
        if found and end not in after:
            raise ValueError(f"the page has no {end!r} after {begin!r}; add it behind the table")
        if found:
            page = before + begin + table + "\n" + end + after.partition(end)[2]
    return page


def _change(values: Sequence[Sequence[float]]) -> str:
    first, last = (", ".join(f"{one[index]:.2f}" for one in values) for index in (0, -1))
    return f"{first} → {last}"


def _plus_minus(mean: float, half: float) -> str:
    return f"{mean:.3f} ± {half:.3f}"
