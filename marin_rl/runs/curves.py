# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`curves.png`: plots of the most important metrics of a run over its steps."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from marin_rl.runs.metrics_file import COLORS, Plot, plots_of, points, read_records
from marin_rl.runs.run_directory import write_atomically
from marin_rl.utils.storage import StoragePath

GRID = "#e4e4e4"


def plot_curves(metrics_path: StoragePath, out_png: StoragePath, title: str = "") -> bool:
    """Plot the metrics of a run; `plots_of` selects them.

    Returns whether an image was written, atomically; it is not if no metric has a value.

    Raises:
        RunDirectoryError: if a line is not a record, or the image cannot be written.
    """
    records = read_records(metrics_path)
    plots = plots_of(records)
    if not plots:
        return False
    image = io.BytesIO()
    draw(plots, records, title).savefig(image, format="png")
    write_atomically(out_png, image.getvalue())
    return True


def draw(plots: Sequence[Plot], records: Sequence[Mapping[str, int | float]], title: str = "") -> Figure:
    """Draw plots, at least one, in a grid."""
    columns = min(len(plots), 3 if len(plots) > 4 else 2)
    rows = -(-len(plots) // columns)
    # A Figure without pyplot has no global state that must be closed.
    header = 0.3 if title else 0.0
    width, height = 4.4 * columns, 3.1 * rows + header
    figure = Figure(figsize=(width, height), dpi=110)
    # Margins in inches. Matplotlib's own layout takes as long as drawing.
    figure.subplots_adjust(
        left=0.75 / width,
        right=1 - 0.15 / width,
        bottom=0.5 / height,
        top=1 - (0.35 + header) / height,
        wspace=0.24,
        hspace=0.26,
    )
    FigureCanvasAgg(figure)
    for index, plot in enumerate(plots):
        _draw(figure.add_subplot(rows, columns, index + 1), plot, records, is_lowest=index + columns >= len(plots))
    if title:
        figure.suptitle(title, y=1 - 0.1 / height, fontsize=12, fontweight="bold")
    return figure


def _draw(axes: Axes, plot: Plot, records: Sequence[Mapping[str, int | float]], *, is_lowest: bool) -> None:
    for curve in plot.curves:
        steps, values = np.array(points(records, curve.name), dtype=float).T
        color = COLORS[curve.color]
        if len(values) >= 20 and not curve.name.startswith("eval/"):
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(steps, running_mean(values, len(values) // 20), color=color, linewidth=1.8, label=curve.label)
        else:
            axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=curve.label)
    if plot.span is not None:
        low, high = plot.span
        room = 0.03 * (high - low)
        axes.set_ylim(low - room, high + room)
    axes.set_title(plot.title, fontsize=10, fontweight="bold", loc="left")
    axes.set_ylabel(plot.unit, fontsize=8, color="#555555")
    if plot.has_legend:
        axes.legend(fontsize=8 if len(plot.curves) < 6 else 6.5, framealpha=0.7, edgecolor="none")
    if is_lowest:
        axes.set_xlabel("step", fontsize=8, color="#555555")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    # A factor such as 1e-5 above the axis would push the title into the plot above.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}".replace("-", "\N{MINUS SIGN}")))
    axes.tick_params(labelsize=8, color=GRID, labelcolor="#555555")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Mean over the neighbours within `half_width` positions, fewer at the ends. A `half_width` below 1 counts as 1.

    >>> running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 1).tolist()
    [1.5, 3.0, 6.0, 7.5]
    """
    window = np.ones(2 * max(half_width, 1) + 1)
    counts = np.convolve(np.ones(len(values)), window, mode="same")
    return np.convolve(values, window, mode="same") / counts
