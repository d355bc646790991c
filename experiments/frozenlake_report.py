# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The runs of experiments/frozenlake.py as a table and a picture.

python -m experiments.frozenlake_report runs/frozenlake experiments/curves/frozenlake.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from experiments.report import SEEDS, curve, plot_seeds

TWINS = ("gigpo", "grpo", "rloo")
LAST = 20
"""Steps at the end of a run over which its training reward is averaged: 20 steps of 128 rollouts."""
SMOOTHING = 10
"""Steps that a point of a drawn curve of the reward is the mean of."""


def last_reward(run: Path) -> float:
    """Share of games won in training at the end of a run, on maps that it had not seen."""
    return float(np.mean(curve(run, "train/rewards").values[-LAST:]))


def table(folder: Path) -> str:
    """Success before and after, for every seed and advantage, in Markdown."""
    lines = [
        "| seed | advantage | held-out, sampled | at step 50 | held-out, greedy | "
        f"training, last {LAST} steps | mean of all steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed in SEEDS:
        for name in TWINS:
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
    """A line for each advantage in training, points for what was held out."""
    for number, name in enumerate(TWINS):
        run = folder / f"{name}-seed{seed}"
        reward, held_out = curve(run, "train/rewards"), curve(run, "/accuracy_sampled")
        smooth = np.convolve(reward.values, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
        axes.plot(reward.steps[SMOOTHING - 1 :], smooth, color=f"C{number}", label=name)
        axes.plot(held_out.steps, held_out.values, "o", color=f"C{number}", markersize=4)


def main() -> None:
    """Print the table and draw the picture."""
    folder = Path(sys.argv[1])
    print(table(folder))
    for name in TWINS:
        ends = [last_reward(folder / f"{name}-seed{seed}") for seed in SEEDS]
        print(f"{name}: {np.mean(ends):.3f} (least {min(ends):.3f}, most {max(ends):.3f})")
    plot_seeds(Path(sys.argv[2]), lambda axes, seed: draw(axes, folder, seed), "games won")


if __name__ == "__main__":
    main()
