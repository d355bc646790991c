# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The runs of experiments/objectives.py as a table and a picture.

python -m experiments.objectives_report runs/objectives experiments/curves/objectives.png
"""

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.report import SEEDS, curve

LEARNERS = ("rloo", "grpo", "dr_grpo", "gspo", "cispo", "ppo")
BAR = 0.30
"""Lift in sampled accuracy that experiments/rloo.yaml is held to."""


def table(folder: Path) -> str:
    """Held-out accuracy before and after, for every objective and seed, in Markdown."""
    lines = ["| objective | seed | sampled | lift | greedy | lift |", "|---|---|---|---|---|---|"]
    for name in LEARNERS:
        for seed in SEEDS:
            run = folder / f"{name}-seed{seed}"
            sampled, greedy = curve(run, "/accuracy_sampled"), curve(run, "/accuracy_greedy")
            cells = [
                f"{measured.values[0]:.3f} → {measured.values[-1]:.3f} | {measured.lift:+.3f}"
                for measured in (sampled, greedy)
            ]
            lines.append(f"| {name} | {seed} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def distances(folder: Path) -> str:
    """What a KL penalty in the reward does to the distance from the start, over the last 25 steps, in Markdown."""
    lines = ["| seed | penalty | KL to the start, nats | reward | sampled |", "|---|---|---|---|---|"]
    for seed in SEEDS:
        for name, penalty in (("rloo_watched", "none"), ("rloo_kl", "β = 0.1")):
            run = folder / f"{name}-seed{seed}"
            kl, reward = (np.mean(curve(run, ending).values[-25:]) for ending in ("objective/kl", "train/rewards"))
            sampled = curve(run, "/accuracy_sampled").values[-1]
            lines.append(f"| {seed} | {penalty} | {kl:.3f} | {reward:.3f} | {sampled:.3f} |")
    return "\n".join(lines)


def plot(folder: Path, picture: Path) -> None:
    """A panel for each objective, a line for each seed."""
    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, name in zip(panels.flat, LEARNERS, strict=True):
        _panel(axes, folder, name)
    for axes in panels[1]:
        axes.set_xlabel("RL steps")
    for axes in panels[:, 0]:
        axes.set_ylabel("held-out accuracy")
    panels[0, 0].legend(fontsize=8, frameon=False, loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _panel(axes: Axes, folder: Path, name: str) -> None:
    for seed in SEEDS:
        for kind, style in (("sampled", "-"), ("greedy", ":")):
            measured = curve(folder / f"{name}-seed{seed}", f"/accuracy_{kind}")
            label = f"seed {seed}, {kind}"
            axes.plot(
                measured.steps, measured.values, style, color=f"C{seed - 1}", marker="o", markersize=3, label=label
            )
    axes.set_title(name, fontsize=10)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Print the tables and draw the picture."""
    folder = Path(sys.argv[1])
    print(table(folder), distances(folder), sep="\n\n")
    lifts = [curve(folder / f"{name}-seed{seed}", "/accuracy_sampled").lift for name in LEARNERS for seed in SEEDS]
    print(f"\nleast lift {min(lifts):+.3f}, bar {BAR:+.2f}")
    plot(folder, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
