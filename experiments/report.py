# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tables (Markdown) and plots of finished runs.

    python -m experiments.report accuracy experiments/curves/rloo.png runs/rloo-seed1 runs/rloo-seed2
    python -m experiments.report frozenlake experiments/curves/frozenlake.png runs/frozenlake
    python -m experiments.report objectives experiments/curves/objectives.png runs/objectives
    python -m experiments.report staleness experiments/curves/staleness.png runs/staleness

`accuracy` plots the held-out accuracy of the given runs; the others report on the folder of the experiment of the same
name. `python -m marin_rl.view runs/staleness/lag*` has means and ranges of the seeds.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.frozenlake import VARIANTS
from experiments.staleness import LAGS
from marin_rl.runs.metrics_file import read_records

SEEDS = (1, 2, 3)
OBJECTIVES = ("rloo", "grpo", "dr_grpo", "gspo", "cispo", "ppo")
MINIMUM_LIFT = 0.30
"""Required increase in sampled accuracy of experiments/rloo.yaml."""
LAST = 25
"""Number of final steps over which metrics of the loss are averaged."""
LAST_GAMES = 20
"""Number of final steps, of 128 rollouts each, over which the training reward on FrozenLake is averaged."""
SMOOTHING = 10
"""Number of steps in the moving average of the plotted reward."""


class Curve(NamedTuple):
    """A metric of a run."""

    steps: Sequence[int]
    """Steps with the metric."""
    values: Sequence[float]
    """Values at these steps."""

    @property
    def lift(self) -> float:
        """The last value minus the first."""
        return self.values[-1] - self.values[0]

    def __str__(self) -> str:
        return f"{self.values[0]:.3f} → {self.values[-1]:.3f}"


def curve(run: Path, ending: str) -> Curve:
    """Return the metric whose name has this ending.

    Raises:
        ValueError: if the run has no such metric.
    """
    points = [
        (int(record["step"]), value)
        for record in read_records(run / "metrics.jsonl")
        for name, value in record.items()
        if name.endswith(ending) and not name.startswith("before_warm_start/")
    ]
    if not points:
        raise ValueError(f"{run} has no metric whose name ends in {ending}; check that the run has finished")
    steps, values = zip(*points, strict=True)
    return Curve(steps, values)


def accuracies(run: Path) -> tuple[Curve, Curve]:
    """Return the held-out accuracy of a run, sampled and greedy."""
    return curve(run, "/accuracy_sampled"), curve(run, "/accuracy_greedy")


def last_mean(run: Path, ending: str, steps: int = LAST) -> float:
    """Return the mean of a metric over the final steps."""
    return float(np.mean(curve(run, ending).values[-steps:]))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines).replace("| --- ", "|---")


def new_panels(size: tuple[float, float], rows: int, titles: Sequence[str], x_label: str) -> list[Axes]:
    """Return one panel for each title, with vertical axes from 0 to 1.

    Args:
        size: width and height of the figure in inches.
        rows: number of rows of panels.
        titles: titles, row by row.
        x_label: label of the horizontal axis.
    """
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, len(titles) // rows, sharex=True, sharey=True, squeeze=False)
    for axes, title in zip(panels.flat, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel(x_label)
    return list(panels.flat)


def save(panels: Sequence[Axes], picture: Path, **legend: Any) -> None:
    """Add a legend to the first panel and save the figure as PNG."""
    panels[0].legend(fontsize=8, frameon=False, **legend)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure = panels[0].get_figure(root=True)
    assert figure is not None
    figure.savefig(picture, dpi=110)


def plot_seeds(picture: Path, draw: Callable[[Axes, int], None], y_label: str, legend: str | None = None) -> None:
    """Plot one panel for each seed.

    Args:
        picture: output file, PNG.
        draw: draws the lines of a seed.
        y_label: label of the vertical axis.
        legend: title of the legend.
    """
    panels = new_panels((9.5, 3.4), 1, [f"seed {seed}" for seed in SEEDS], "steps")
    for axes, seed in zip(panels, SEEDS, strict=True):
        draw(axes, seed)
    panels[0].set_ylabel(y_label)
    save(panels, picture, loc="lower right", title=legend, title_fontsize=8)


def report_accuracy(picture: Path, runs: Sequence[Path]) -> None:
    """Plot sampled and greedy held-out accuracy of several runs."""
    kinds = ("sampled", "greedy")
    panels = new_panels((9, 3.6), 1, [f"held-out accuracy, {kind}" for kind in kinds], "RL steps")
    for run in runs:
        for axes, measured in zip(panels, accuracies(run), strict=True):
            axes.plot(measured.steps, measured.values, marker="o", markersize=3.5, linewidth=1.5, label=run.name)
    save(panels, picture)


def report_frozenlake(picture: Path, folder: Path) -> None:
    """Report success rates before and after RL by seed and advantage."""
    rows = []
    for seed in SEEDS:
        for name in VARIANTS:
            run = folder / f"{name}-seed{seed}"
            sampled, greedy = accuracies(run)
            half = dict(zip(sampled.steps, sampled.values, strict=True))[50]
            last, mean = (last_mean(run, "train/rewards", steps) for steps in (LAST_GAMES, 0))
            rows.append([seed, name, sampled, f"{half:.3f}", greedy, f"{last:.3f}", f"{mean:.3f}"])
    columns = ["seed", "advantage", "held-out, sampled", "at step 50", "held-out, greedy"]
    print(markdown_table([*columns, f"training, last {LAST_GAMES} steps", "mean of all steps"], rows))
    for name in VARIANTS:
        ends = [last_mean(folder / f"{name}-seed{seed}", "train/rewards", LAST_GAMES) for seed in SEEDS]
        print(f"{name}: {np.mean(ends):.3f} (min {min(ends):.3f}, max {max(ends):.3f})")

    def draw(axes: Axes, seed: int) -> None:
        """Draw the training reward as lines and the held-out accuracy as points."""
        for number, name in enumerate(VARIANTS):
            run = folder / f"{name}-seed{seed}"
            reward, (held_out, _) = curve(run, "train/rewards"), accuracies(run)
            smooth = np.convolve(reward.values, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
            axes.plot(reward.steps[SMOOTHING - 1 :], smooth, color=f"C{number}", label=name)
            axes.plot(held_out.steps, held_out.values, "o", color=f"C{number}", markersize=4)

    plot_seeds(picture, draw, "games won")


def report_objectives(picture: Path, folder: Path) -> None:
    """Report held-out accuracy by objective and seed, and the effect of a KL penalty on the distance to the start."""
    rows, lifts = [], []
    for name in OBJECTIVES:
        for seed in SEEDS:
            measured = accuracies(folder / f"{name}-seed{seed}")
            lifts.append(measured[0].lift)
            rows.append([name, seed, *(cell for one in measured for cell in (one, f"{one.lift:+.3f}"))])
    print(markdown_table(["objective", "seed", "sampled", "lift", "greedy", "lift"], rows), end="\n\n")
    rows = []
    for seed in SEEDS:
        for name, penalty in (("rloo_watched", "none"), ("rloo_kl", "β = 0.1")):
            run = folder / f"{name}-seed{seed}"
            figures = (last_mean(run, "objective/kl"), last_mean(run, "train/rewards"), accuracies(run)[0].values[-1])
            rows.append([seed, penalty, *(f"{figure:.3f}" for figure in figures)])
    print(markdown_table(["seed", "penalty", "KL to the start, nats", "reward", "sampled"], rows))
    print(f"\nsmallest lift {min(lifts):+.3f}, required {MINIMUM_LIFT:+.2f}")
    panels = new_panels((9.5, 5.6), 2, OBJECTIVES, "RL steps")
    for axes, name in zip(panels, OBJECTIVES, strict=True):
        for seed in SEEDS:
            measured = accuracies(folder / f"{name}-seed{seed}")
            for kind, style, one in zip(("sampled", "greedy"), "-:", measured, strict=True):
                label, color = f"seed {seed}, {kind}", f"C{seed - 1}"
                axes.plot(one.steps, one.values, style, color=color, marker="o", markersize=3, label=label)
    for axes in panels[::3]:
        axes.set_ylabel("held-out accuracy")
    save(panels, picture, loc="lower right")


def report_staleness(picture: Path, folder: Path) -> None:
    """Report held-out accuracy and the distance between old and new weights by staleness and seed."""
    rows = []
    for lag in LAGS:
        for seed in SEEDS:
            run = folder / f"lag{lag}-seed{seed}"
            sampled, greedy = accuracies(run)
            half = dict(zip(sampled.steps, sampled.values, strict=True))[50]
            reward, clipped = last_mean(run, "train/rewards", 0), last_mean(run, "policy/clipfrac_avg")
            cells = [f"{half:.3f}", greedy, f"{reward:.3f}", f"{clipped:.3f}", f"{last_mean(run, 'mismatch/k3'):.4f}"]
            rows.append([lag, seed, sampled, *cells])
    columns = ["steps old", "seed", "held-out, sampled", "at step 50", "held-out, greedy", "mean training reward"]
    print(markdown_table([*columns, f"clipped tokens, last {LAST} steps", "KL to the sampling weights, nats"], rows))

    def draw(axes: Axes, seed: int) -> None:
        for number, lag in enumerate(LAGS):
            measured, _ = accuracies(folder / f"lag{lag}-seed{seed}")
            axes.plot(measured.steps, measured.values, "o-", color=f"C{number}", markersize=3.5, label=str(lag))

    plot_seeds(picture, draw, "held-out accuracy, sampled", "steps old")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of a report and save its plot."""
    reports = {"frozenlake": report_frozenlake, "objectives": report_objectives, "staleness": report_staleness}
    parser = argparse.ArgumentParser(description="Tables and plots of finished runs.")
    parser.add_argument("report", choices=["accuracy", *reports])
    parser.add_argument("picture", type=Path, help="output file, PNG")
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of `accuracy`; otherwise their folder")
    arguments = parser.parse_args(argv)
    if arguments.report == "accuracy":
        report_accuracy(arguments.picture, arguments.runs)
    elif len(arguments.runs) > 1:
        parser.error(f"{arguments.report} takes one folder, got {len(arguments.runs)}")
    else:
        reports[arguments.report](arguments.picture, arguments.runs[0])


if __name__ == "__main__":
    main()
