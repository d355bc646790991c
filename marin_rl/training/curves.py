# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`curves.png`: plots of the most important metrics of a run over its steps."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from marin_rl.storage import StoragePath
from marin_rl.training.metrics_file import PANELS, Panel, read_records
from marin_rl.training.run_directory import write_atomically

COLORS = ("#1f5fa8", "#d1701f", "#2f8f5b", "#9a3b7a", "#7a6a2f", "#555555")
GRID = "#e4e4e4"


def plot_curves(metrics_path: StoragePath, out_png: StoragePath, title: str = "") -> bool:
    """Plot the metrics of a run. Panels without values are omitted.

    Args:
        metrics_path: the run's `metrics.jsonl`.
        out_png: output image, replaced atomically.
        title: title of the figure, such as the name of the run.

    Returns:
        Whether an image was written; it is not if no metric has a value.

    Raises:
        RunDirectoryError: if a line is not a record, or the image cannot be written.
    """
    records = read_records(metrics_path)
    panels = [
        panel
        for panel in (accuracy_panel(records) if "eval/*" in panel.names else panel for panel in PANELS)
        if any(_has(records, name) for name in panel.names)
    ]
    if not panels:
        return False
    columns = min(len(panels), 3 if len(panels) > 4 else 2)
    rows = -(-len(panels) // columns)
    # A Figure without pyplot has no global state that must be closed.
    width, height = 4.4 * columns, 3.1 * rows + 0.3
    figure = Figure(figsize=(width, height), dpi=110)
    # Margins in inches. Matplotlib's own layout takes as long as drawing.
    figure.subplots_adjust(
        left=0.75 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.65 / height, wspace=0.24, hspace=0.26
    )
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(rows, columns, index + 1), panel, records, is_lowest=index + columns >= len(panels))
    if title:
        figure.suptitle(title, y=1 - 0.1 / height, fontsize=12, fontweight="bold")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(out_png, image.getvalue())
    return True


def accuracy_panel(records: Sequence[Mapping[str, int | float]]) -> Panel:
    """Return the panel of the held-out accuracies in the records, labelled by environment if there are several."""
    names = dict.fromkeys(
        name for record in records for name in record if name.startswith("eval/") and "/accuracy_" in name
    )
    parts = {name: name.removeprefix("eval/").rpartition("/") for name in names}
    several = len({environment for environment, _, _ in parts.values()}) > 1
    labels = {}
    for name, (environment, _, kind) in parts.items():
        kind = kind.removeprefix("accuracy_")
        labels[name] = f"{environment}, {kind}" if several else kind
    return Panel("Held-out accuracy", labels)


def _has(records: Sequence[Mapping[str, int | float]], name: str) -> bool:
    return bool(_series(records, name)[0].size)


def _series(records: Sequence[Mapping[str, int | float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of a metric."""
    points = [(record["step"], record[name]) for record in records if np.isfinite(record.get(name, np.nan))]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def _draw(axes: Axes, panel: Panel, records: Sequence[Mapping[str, int | float]], *, is_lowest: bool) -> None:
    is_evaluation = any(name.startswith("eval/") for name in panel.names)
    shown = [(label, *_series(records, name)) for name, label in panel.names.items() if _has(records, name)]
    for (label, steps, values), color in zip(shown, COLORS * len(shown), strict=False):
        if len(values) >= 20 and not is_evaluation:
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(steps, running_mean(values, len(values) // 20), color=color, linewidth=1.8, label=label)
        else:
            axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
    axes.set_title(panel.title, fontsize=10, fontweight="bold", loc="left")
    axes.set_ylabel(panel.unit, fontsize=8, color="#555555")
    if len(shown) > 1 or is_evaluation:
        axes.legend(fontsize=8, frameon=False)
    if is_lowest:
        axes.set_xlabel("step", fontsize=8, color="#555555")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.tick_params(labelsize=8, color=GRID, labelcolor="#555555")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Mean over the neighbours within `half_width` positions, fewer at the ends.

    Args:
        values: values, shape `[length]`.
        half_width: neighbours on each side; values below 1 count as 1.

    Returns:
        Running mean, shape `[length]`.

    >>> running_mean(np.array([0.0, 3.0, 6.0, 9.0]), 1).tolist()
    [1.5, 3.0, 6.0, 7.5]
    """
    window = np.ones(2 * max(half_width, 1) + 1)
    counts = np.convolve(np.ones(len(values)), window, mode="same")
    return np.convolve(values, window, mode="same") / counts
