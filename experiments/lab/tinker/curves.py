# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plot a metric of recipes of tinker-cookbook, and of runs of this package.

    python -m experiments.lab.tinker.curves experiments/lab/curves/tinker.png env/all/correct LABEL=FOLDER ...

A folder has the `metrics.jsonl` of a recipe, or is a run directory, whose reward is plotted. Runs with equal labels
have one colour. Prints the first value, the mean of the last five, and the step at which the mean of five reaches 0.9.
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

REWARD = "reward/correct/mean"
"""The metric of this package's own runs."""
WINDOW = 5
TARGET = 0.9


def read(folder: Path, metric: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [
        (record.get("step", index), record[name])
        for index, record in enumerate(records)
        for name in (metric, REWARD)
        if name in record
    ]
    steps, values = zip(*found, strict=True)
    return list(steps), list(values)


def main(output: str, metric: str, *runs: str) -> None:
    """Plot the runs."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors: dict[str, str] = {}
    for run in runs:
        label, _, folder = run.rpartition("=")
        steps, values = read(Path(folder), metric)
        smooth = np.convolve(values, np.ones(WINDOW) / WINDOW, "valid")
        new = label not in colors
        color = colors.setdefault(label, f"C{len(colors)}")
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps[WINDOW - 1 :], smooth, color=color, label=label if new else None)
        reached = next(
            (str(steps[index + WINDOW - 1]) for index, value in enumerate(smooth) if value >= TARGET), "never"
        )
        print(
            f"{label:30} {folder}: {values[0]:.3f} -> {smooth[-1]:.3f} after {len(values)} steps; {TARGET}: {reached}"
        )
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
