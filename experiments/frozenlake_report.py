# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Table and plot of the runs of experiments/frozenlake.py.

python -m experiments.frozenlake_report runs/frozenlake experiments/curves/frozenlake.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from experiments.report import SEEDS, curve, plot_seeds

VARIANTS = ("gigpo", "grpo", "rloo")
LAST = 20
"""Number of final steps, of 128 rollouts each, over which the training reward is averaged."""
SMOOTHING = 10
"""Number of steps in the moving average of the plotted reward."""


def last_reward(run: Path) -> float:
    """Return the share of training games won at the end of a run, on new maps."""
    return float(np.mean(curve(run, "train/rewards").values[-LAST:]))


def table(folder: Path) -> str:
    """Return a Markdown table of the success rates before and after RL by seed and advantage."""
    lines = [
        "| seed | advantage | held-out, sampled | at step 50 | held-out, greedy | "
        f"training, last {LAST} steps | mean of all steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed in SEEDS:
        for name in VARIANTS:
            run = folder / f"{name}-seed{seed}"
            sampled, greedy = curve(run, "/accuracy_sampled"), curve(run, "/accuracy_greedy")
            half = dict(zip(sampled.steps, sampled.values, strict=True))[50]
            rewards = np.mean(curve(run, "train/rewards").values)
            lines.append(
                f"| {seed} | {name} | {sampled.values[0]:.3f} → {sampled.values[-1]:.3f} | {half:.3f} | "
                f"{greedy.values[0]:.3f} → {greedy.values[-1]:.3f} | {last_reward(run):.3f} | {rewards:.3f} |"
            )
    return "\n".join(lines)


def draw(axes: Axes, folder: Path, seed: int) -> None:
    """Plot training reward as lines and held-out accuracy as points, by advantage."""
    for number, name in enumerate(VARIANTS):
        run = folder / f"{name}-seed{seed}"
        reward, held_out = curve(run, "train/rewards"), curve(run, "/accuracy_sampled")
        smooth = np.convolve(reward.values, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
        axes.plot(reward.steps[SMOOTHING - 1 :], smooth, color=f"C{number}", label=name)
        axes.plot(held_out.steps, held_out.values, "o", color=f"C{number}", markersize=4)


def main() -> None:
    """Print the table and save the plot."""
    folder = Path(sys.argv[1])
    print(table(folder))
    for name in VARIANTS:
        ends = [last_reward(folder / f"{name}-seed{seed}") for seed in SEEDS]
        print(f"{name}: {np.mean(ends):.3f} (min {min(ends):.3f}, max {max(ends):.3f})")
    plot_seeds(Path(sys.argv[2]), lambda axes, seed: draw(axes, folder, seed), "games won")


if __name__ == "__main__":
    main()
