# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plot the held-out accuracy of several runs.

python -m experiments.compare_runs experiments/curves/rloo.png runs/rloo-seed1 runs/rloo-seed2
"""

import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from marin_rl.training.metrics_file import read_records


def plot(runs: list[Path], picture: Path) -> None:
    """Plot sampled and greedy accuracy against the number of steps.

    Args:
        runs: run directories.
        picture: output file, PNG.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind, title in zip(panels, ("sampled", "greedy"), ("sampled", "greedy"), strict=True):
        for run in runs:
            records = read_records(run / "metrics.jsonl")
            points = [
                (record["step"], value)
                for record in records
                for name, value in record.items()
                if name.startswith("eval/") and name.endswith(f"/accuracy_{kind}")
            ]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.5, label=run.name)
        axes.set_title(f"held-out accuracy, {title}", fontsize=10)
        axes.set_xlabel("RL steps")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=8, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    plot([Path(argument) for argument in sys.argv[2:]], Path(sys.argv[1]))
