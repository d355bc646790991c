# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the reports of several runs share: a metric over the steps of a run, a picture with a panel for each seed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from marin_rl.training.metrics_file import read_records

SEEDS = (1, 2, 3)


class Curve(NamedTuple):
    """A metric of a run over its steps."""

    steps: Sequence[int]
    """When it was measured."""
    values: Sequence[float]
    """What it was."""

    @property
    def lift(self) -> float:
        """The last value less the first."""
        return self.values[-1] - self.values[0]


def curve(run: Path, ending: str) -> Curve:
    """The metric whose name ends so.

    Raises:
        ValueError: if the run has none.
    """
    points = [
        (int(record["step"]), value)
        for record in read_records(run / "metrics.jsonl")
        for name, value in record.items()
        if name.endswith(ending)
    ]
    if not points:
        raise ValueError(f"{run} has no metric that ends in {ending}; has it run?")
    steps, values = zip(*points, strict=True)
    return Curve(steps, values)


def plot_seeds(picture: Path, draw: Callable[[Axes, int], None], label: str, legend: str | None = None) -> None:
    """Draw a panel for each seed.

    Args:
        picture: PNG to write.
        draw: draws the lines of a seed.
        label: of the vertical axis, from 0 to 1.
        legend: its title.
    """
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(SEEDS), sharex=True, sharey=True)
    for axes, seed in zip(panels, SEEDS, strict=True):
        draw(axes, seed)
        axes.set_title(f"seed {seed}", fontsize=10)
        axes.set_xlabel("steps")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(label)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right", title=legend, title_fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
