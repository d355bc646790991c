# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The tables of `comparisons.md`, and the plots of `docs/pages/results.md` and README.md, from the records alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.lab.report import markdown_table, new_panels, plot_band, save
from experiments.lab.results.runs import AGAINST, OURS, ROOT, Record, read
from experiments.lab.results.tasks import COMPARED, CONTROL, FIRST_RUN, TASKS
from marin_rl.runs.run_groups import Band, band

PAGE = Path(__file__).with_name("comparisons.md")
PICTURES = ROOT / "docs" / "pages" / "images"
BASELINE = "rloo"
"""The objective with which the others are compared."""
TARGET = 0.6
"""Held-out accuracy, sampled, to which the time is measured."""


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
    """Return one row for each objective: accuracy at the end and its mean over the run, and differences from RLOO.

    Intervals are of 95%. A difference is that of runs with equal seeds, which have the same start. It is significant if
    its interval excludes 0; the intervals of all differences of a table together are of 95% (Bonferroni).
    """
    groups = by_label(read(task))
    outcomes: list[Callable[[Record], float]] = [
        lambda record: record.sampled[-1],
        lambda record: float(np.mean(record.sampled)),
    ]
    wide = 1 - 0.05 / max(len(outcomes) * len(groups.keys() - {BASELINE}), 1)
    rows = []
    for label, records in groups.items():
        cells = [f"`{label}`"]
        for outcome in outcomes:
            base = {record.seed: outcome(record) for record in groups.get(BASELINE, [])}
            values = {record.seed: outcome(record) for record in records}
            cells.append("{:.3f} ± {:.3f}".format(*interval([*values.values()])))
            # Until all runs are recorded, some have no counterpart.
            differences = [value - base[seed] for seed, value in values.items() if seed in base]
            if label == BASELINE or not differences:
                cells.append("")
            else:
                mean, half = interval(differences, wide)
                cells.append(f"{mean:+.3f} ± {half:.3f}, {'significant' if abs(mean) > half else 'not significant'}")
        rows.append([*cells, f"{np.mean([record.cpu_seconds for record in records]):.0f}"])
    minus = f"minus `{BASELINE}`"
    return markdown_table(["objective", "at the end", minus, "mean over the run", minus, "CPU seconds"], rows)


def time_to(record: Record, target: float) -> tuple[int, float, float] | None:
    """Return step, seconds and CPU seconds at the first evaluation with at least the target, or None."""
    later = zip(record.steps[1:], record.sampled[1:], record.times, strict=True)
    return next(((step, *times) for step, value, times in later if value >= target), None)


def peer_table(name: str) -> str:
    """Return one row for each program: step and time at the target by seed, and the time of pairs by that of ours."""
    groups = by_label(read(name))
    reached = {label: {one.seed: time_to(one, TARGET) for one in records} for label, records in groups.items()}
    ours = reached.get(OURS, {})
    rows = []
    for label, records in groups.items():
        columns = [
            ", ".join("never" if one is None else f"{one[index]:.0f}" for one in reached[label].values())
            for index in range(3)
        ]
        pairs = [] if label == OURS else [(one, ours.get(seed)) for seed, one in reached[label].items()]
        ratios = [", ".join(f"{one[index] / own[index]:.2f}" for one, own in pairs if one and own) for index in (1, 2)]
        rows.append([label, *columns, *ratios, _last([one.sampled for one in records])])
    names = [
        "program",
        f"step at {TARGET}",
        "seconds",
        "CPU seconds",
        "seconds / ours",
        "CPU / ours",
        "after the last step",
    ]
    return markdown_table(names, rows)


def draw_peer(name: str, picture: Path) -> None:
    """Plot the held-out accuracy of both programs by step, as mean and range of the seeds, and by CPU seconds."""
    by_step, by_time = new_panels(["same start, tasks and settings", "with start-up and evaluations"], 2)
    by_time.set_xlabel("CPU seconds")
    for number, (label, records) in enumerate(by_label(read(name)).items()):
        plot_band(by_step, bands(records), label, f"C{number}")
        for record in records:
            by_time.plot([cpu for _, cpu in record.times], record.sampled[1:], color=f"C{number}", linewidth=1)
    for axes in (by_step, by_time):
        axes.axhline(TARGET, color="#888888", linewidth=0.8, linestyle=":")
    by_step.set_ylabel("held out, sampled")
    save([by_step], picture)


def draw_tasks(picture: Path) -> None:
    """Plot the held-out score of every task: mean and range of its seeds, and the control."""
    names = [name for name in TASKS if read(name)]
    panels = new_panels(names, 4)
    for axes, name in zip(panels, names, strict=True):
        for label, records in by_label(read(name)).items():
            plot_band(axes, bands(records), label, "#888888" if label == CONTROL else "C0")
    panels[0].set_ylabel("held out, sampled")
    save(panels, picture, title="rewards", title_fontsize=8)


def draw_first_run(picture: Path) -> None:
    """Plot the held-out accuracy of README's first run and of `sums`, sampled and greedy: seeds and the control."""
    kinds = ("sampled", "greedy")
    panels = new_panels([f"held-out accuracy, {kind}" for kind in kinds], 2)
    for axes, kind in zip(panels, kinds, strict=True):
        for record in [*read(FIRST_RUN), *read("sums")]:
            is_control = record.label == CONTROL
            label, color = ("random rewards", "#888888") if is_control else (f"seed {record.seed}", None)
            axes.plot(record.steps, getattr(record, kind), marker="o", markersize=3.5, label=label, color=color)
        axes.set_ylim(0, 1)
    save(panels, picture)


def draw_objectives(picture: Path) -> None:
    """Plot the held-out score of every objective on each task: mean and range of the seeds."""
    panels = new_panels(list(COMPARED), 2)
    for axes, name in zip(panels, COMPARED, strict=True):
        for number, (label, records) in enumerate(by_label(read(name)).items()):
            plot_band(axes, bands(records), label, f"C{number}")
    panels[0].set_ylabel("held out, sampled")
    save(panels, picture, ncols=2)


def bands(records: Sequence[Record]) -> list[Band]:
    """Return mean and range of the sampled scores of the seeds at each evaluation."""
    curves = (zip(record.steps, record.sampled, strict=True) for record in records)
    return band([[{"step": step, "score": score} for step, score in curve] for curve in curves], "score")


def update() -> None:
    """Draw the pictures, and write the tables between their markers in the page."""
    PICTURES.mkdir(exist_ok=True)
    draw_first_run(PICTURES / "rloo.png")
    draw_tasks(PICTURES / "tasks.png")
    if all(map(read, COMPARED)):
        draw_objectives(PICTURES / "objectives.png")
    for name in filter(read, AGAINST.values()):
        draw_peer(name, PICTURES / f"{name}.png")
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(page: str) -> str:
    """Return a page with the tables of the records between their markers.

    Raises:
        ValueError: if the end of a table is not marked.
    """
    tables = {
        "tasks": task_table(),
        **{task: objective_table(task) for task in COMPARED},
        **{name: peer_table(name) for name in AGAINST.values()},
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, after = page.partition(begin)
        if found and end not in after:
            raise ValueError(f"the page has no {end!r} after {begin!r}; add it behind the table")
        if found:
            page = before + begin + table + "\n" + end + after.partition(end)[2]
    return page


def _change(values: Sequence[Sequence[float]]) -> str:
    return f"{', '.join(f'{one[0]:.2f}' for one in values)} → {_last(values)}"


def _last(values: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{one[-1]:.2f}" for one in values)
