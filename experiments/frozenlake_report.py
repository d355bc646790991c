# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The runs of experiments/frozenlake.py as a table and a picture.

python -m experiments.frozenlake_report runs/frozenlake experiments/curves/frozenlake.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.objectives_report import SEEDS, curve

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


def plot(folder: Path, picture: Path) -> None:
    """A panel for each seed, a line for each advantage."""
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(SEEDS), sharex=True, sharey=True)
    for axes, seed in zip(panels, SEEDS, strict=True):
        _panel(axes, folder, seed)
    panels[0].set_ylabel("games won")
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _panel(axes: Axes, folder: Path, seed: int) -> None:
    for number, name in enumerate(TWINS):
        run = folder / f"{name}-seed{seed}"
        reward, held_out = curve(run, "train/rewards"), curve(run, "/accuracy_sampled")
        smooth = np.convolve(reward.values, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
        axes.plot(reward.steps[SMOOTHING - 1 :], smooth, color=f"C{number}", label=name)
        axes.plot(held_out.steps, held_out.values, "o", color=f"C{number}", markersize=4)
    axes.set_title(f"seed {seed}", fontsize=10)
    axes.set_xlabel("steps")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Print the table and draw the picture."""
    folder = Path(sys.argv[1])
    print(table(folder))
    for name in TWINS:
        ends = [last_reward(folder / f"{name}-seed{seed}") for seed in SEEDS]
        print(f"{name}: {np.mean(ends):.3f} (least {min(ends):.3f}, most {max(ends):.3f})")
    plot(folder, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
