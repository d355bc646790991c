# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The runs of experiments/staleness.py as a table and a picture.

python -m experiments.staleness_report runs/staleness experiments/curves/staleness.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from experiments.report import SEEDS, curve, plot_seeds
from experiments.staleness import LAGS

LAST = 25
"""Steps at the end of a run over which what the loss measures is averaged."""


def table(folder: Path) -> str:
    """Held-out accuracy and distance between old and new weights, for every lag and seed, in Markdown."""
    lines = [
        "| steps old | seed | held-out, sampled | at step 50 | held-out, greedy | mean training reward | "
        f"clipped tokens, last {LAST} steps | KL to the sampling weights, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lag in LAGS:
        for seed in SEEDS:
            run = folder / f"lag{lag}-seed{seed}"
            sampled, greedy = curve(run, "/accuracy_sampled"), curve(run, "/accuracy_greedy")
            half = dict(zip(sampled.steps, sampled.values, strict=True))[50]
            reward = np.mean(curve(run, "train/rewards").values)
            clipped, distance = (
                np.mean(curve(run, ending).values[-LAST:]) for ending in ("policy/clipfrac_avg", "mismatch/k3")
            )
            lines.append(
                f"| {lag} | {seed} | {sampled.values[0]:.3f} → {sampled.values[-1]:.3f} | {half:.3f} | "
                f"{greedy.values[0]:.3f} → {greedy.values[-1]:.3f} | {reward:.3f} | {clipped:.3f} | {distance:.4f} |"
            )
    return "\n".join(lines)


def draw(axes: Axes, folder: Path, seed: int) -> None:
    """A line for each lag."""
    for number, lag in enumerate(LAGS):
        measured = curve(folder / f"lag{lag}-seed{seed}", "/accuracy_sampled")
        axes.plot(measured.steps, measured.values, "o-", color=f"C{number}", markersize=3.5, label=str(lag))


def main() -> None:
    """Print the table and draw the picture."""
    folder = Path(sys.argv[1])
    print(table(folder))
    for lag in LAGS:
        ends = [curve(folder / f"lag{lag}-seed{seed}", "/accuracy_sampled").values[-1] for seed in SEEDS]
        print(f"{lag} steps old: {np.mean(ends):.3f} (least {min(ends):.3f}, most {max(ends):.3f})")
    plot_seeds(
        Path(sys.argv[2]), lambda axes, seed: draw(axes, folder, seed), "held-out accuracy, sampled", "steps old"
    )


if __name__ == "__main__":
    main()
