# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""`metrics.jsonl`: one JSON object per training step, sorted by `step`; and the plots of its metrics.

NaN and infinities, which JSON numbers cannot represent, are written as the strings `"NaN"`, `"Infinity"` and
`"-Infinity"`.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marin_rl.runs.run_directory import write_atomically
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.storage import FileDigest, StoragePath, writing


@dataclasses.dataclass(frozen=True)
class Panel:
    """Definition of one plot of `curves.png` and of the HTML page."""

    title: str
    """Title of the plot."""
    names: Mapping[str, str]
    """Labels by metric name, or by a name of `_HELD_OUT`. Metrics without values are omitted."""
    unit: str = ""
    """Unit of the vertical axis."""
    rounding: float = -1.0
    """Magnitude up to which values are only rounding; a curve of such values is not drawn. Below 0: every curve is."""
    is_share: bool = False
    """Whether the vertical axis begins at 0 if all values are in [0, 1], and ends at 1 if one is close to it."""


_ACCURACIES, _REWARDS = "eval/*", "eval/*/reward"
PANELS = (
    Panel(
        "Reward per rollout",
        {"train/rewards": "reward", "train/correct_rewards": "correct", "train/format_rewards": "format"},
        is_share=True,
    ),
    Panel("Held-out accuracy", {_ACCURACIES: ""}, is_share=True),
    Panel("Held-out reward", {_REWARDS: ""}, is_share=True),
    Panel("Cross-entropy", {"loss/ce_avg": "training", "eval/held_out/loss": "held-out"}, "nats per token"),
    Panel("Held-out token accuracy", {"eval/held_out/token_accuracy": "accuracy"}, is_share=True),
    Panel("Loss of pairs", {"loss/dpo": "training", "eval/held_out/loss/dpo": "held-out"}, "nats per pair"),
    Panel(
        "Accuracy of pairs",
        {"rewards/accuracies": "training", "eval/held_out/rewards/accuracies": "held-out"},
        is_share=True,
    ),
    Panel("Rewards of answers", {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}, "β · nats per answer"),
    Panel("Log-probs of answers", {"logps/chosen": "chosen", "logps/rejected": "rejected"}, "nats per answer"),
    Panel("Entropy", {"policy/entropy_avg": "entropy"}, "nats per token"),
    Panel("KL to the reference", {"objective/kl": "KL"}, "nats per rollout", rounding=1e-6),
    Panel("Approximate KL to the old policy", {"policy/approxkl_avg": "change"}, "nats per token", rounding=1e-6),
    # Sums over a layer's inputs in another order change a log-probability by up to about 1e-4 in float32.
    Panel(
        "Sampler against learner, log-probs",
        {"mismatch/logprob_difference_max": "difference"},
        "nats, largest of a step",
        rounding=1e-3,
    ),
    Panel("Loss", {"loss/policy_avg": "policy", "loss/value_avg": "value"}),
    Panel("Output length", {"train/output_length": "tokens"}, "tokens"),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
    Panel(
        "Groups without signal",
        {"groups/all_good_share": "all solved", "groups/all_bad_share": "none solved"},
        "share",
        rounding=0.0,
        is_share=True,
    ),
)
"""Plots of every run, if it has their metrics."""

COLORS = ("#1f5fa8", "#c25a12", "#2f8f5b", "#9a3b7a", "#7a6a2f", "#555e68", "#3c8fa5", "#b0413e", "#6b5bb5")
"""Colors of curves, `--c0` to `--c8` in `runs/viewer/page.css`."""
_HELD_OUT = {
    # pass@1 is the sampled accuracy.
    _ACCURACIES: re.compile(r"eval/(.+)/(?:accuracy_)?(sampled|greedy|pass@(?!1$)([0-9]+))"),
    _REWARDS: re.compile(r"eval/(.+)/reward_(sampled|greedy|pass@([0-9]+))"),
}
"""Metrics of environments: environment, kind, and k of pass@k."""
_CLOSE_TO_1 = 0.8
Record = Mapping[str, int | float]


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of a plot."""

    name: str
    """Metric."""
    label: str
    """Its label; metrics with the same values share a curve, such as `reward = correct`."""
    color: int
    """Index in `COLORS`, which depends on the metric and not on the other curves that are drawn."""


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of a run."""

    title: str
    """Title."""
    unit: str
    """Unit of the vertical axis."""
    curves: Sequence[Curve]
    """Curves, at least one."""
    has_legend: bool
    """Whether the labels are shown: the panel is of several metrics, although fewer may be drawn."""
    span: tuple[float, float] | None
    """Ends of the vertical axis; None: those of the values."""


def plots_of(records: Sequence[Record]) -> list[Plot]:
    """Return the plots of a run.

    A curve is left out if all its values are rounding (`Panel.rounding`), and so is a plot without a curve.

    >>> records = [{"step": 1, "train/rewards": 0.5, "train/correct_rewards": 0.5, "policy/approxkl_avg": 5e-13}]
    >>> [(plot.title, [curve.label for curve in plot.curves], plot.span) for plot in plots_of(records)]
    [('Reward per rollout', ['reward = correct'], (0.0, 0.55))]
    """
    plots = (
        _plot(panel, title, curves, records) for panel in PANELS for title, curves in _curves(panel, records).items()
    )
    return [plot for plot in plots if plot is not None]


def points(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Return the steps and finite values of a metric."""
    found = ((int(record["step"]), record.get(name, math.nan)) for record in records)
    return [(step, value) for step, value in found if math.isfinite(value)]


def _plot(panel: Panel, title: str, curves: Sequence[Curve], records: Sequence[Record]) -> Plot | None:
    """The plot of a panel with some of these curves; None if it has none."""
    drawn: list[tuple[Curve, list[tuple[int, float]]]] = []
    for curve in curves:
        series = points(records, curve.name)
        if all(abs(value) <= panel.rounding for _, value in series):
            continue
        # A curve over an equal one would hide it.
        same = next((place for place, (_, other) in enumerate(drawn) if _are_equal(other, series)), None)
        if same is None:
            drawn.append((curve, series))
        else:
            first, _ = drawn[same]
            drawn[same] = dataclasses.replace(first, label=f"{first.label} = {curve.label}"), series
    if not drawn:
        return None
    has_legend = len(panel.names) > 1 or panel.names.keys() <= _HELD_OUT.keys()
    span = _span([value for _, series in drawn for _, value in series]) if panel.is_share else None
    return Plot(title, panel.unit, tuple(curve for curve, _ in drawn), has_legend, span)


def _span(values: Sequence[float]) -> tuple[float, float] | None:
    highest = max(values)
    if min(values) < 0 or highest > 1:
        return None
    return 0.0, 1.0 if highest > _CLOSE_TO_1 or highest == 0 else 1.1 * highest


def _are_equal(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    return len(one) == len(other) and all(
        step == other_step and math.isclose(value, other_value, rel_tol=1e-6, abs_tol=1e-9)
        for (step, value), (other_step, other_value) in zip(one, other, strict=True)
    )


def _curves(panel: Panel, records: Sequence[Record]) -> Mapping[str, Sequence[Curve]]:
    """The curves of a panel by title of the plot; those of several environments have a plot for each kind."""
    pattern = _HELD_OUT.get(next(iter(panel.names)))
    if pattern is None:
        return {panel.title: [_curve(name, label, index) for index, (name, label) in enumerate(panel.names.items())]}
    names = {name for record in records for name in record}
    matches = [match for name in names if (match := pattern.fullmatch(name)) is not None]
    # The order, and thereby the color, of sampled and greedy accuracy does not depend on the measured pass@k.
    matches.sort(key=lambda match: (int(match[3] or ["sampled", "greedy"].index(match[2])), match[1]))
    kinds, environments = (list(dict.fromkeys(match[group] for match in matches)) for group in (2, 1))
    if len(environments) < 2:
        return {panel.title: [_curve(match[0], match[2], index) for index, match in enumerate(matches)]}
    order = sorted(environments)
    return {
        f"{panel.title}, {kind}": [
            _curve(match[0], match[1], order.index(match[1])) for match in matches if match[2] == kind
        ]
        for kind in kinds
    }


def _curve(name: str, label: str, color: int) -> Curve:
    return Curve(name, label, color % len(COLORS))


def format_record(step: int, metrics: Mapping[str, int | float]) -> str:
    """Format the record of a step as one line, without the newline.

    >>> format_record(3, {"train/rewards": 0.5, "loss/policy_avg": float("nan")})
    '{"step": 3, "train/rewards": 0.5, "loss/policy_avg": "NaN"}'
    """
    return json.dumps({"step": step, **{name: _writable(float(value)) for name, value in metrics.items()}})


def _writable(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def append_record(path: Path, step: int, metrics: Mapping[str, int | float]) -> bytes:
    """Append the record of a step, flush it to disk, and return its line.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    with writing(path), path.open("ab", buffering=0) as file:
        rest = line = f"{format_record(step, metrics)}\n".encode()
        while rest:
            rest = rest[file.write(rest) or 0 :]
        os.fsync(file.fileno())
    return line


def read_records(path: StoragePath) -> list[dict[str, int | float]]:
    """Read all records; empty if the file does not exist.

    An incomplete last line, which was cut off by a crash, is ignored.

    Raises:
        RunDirectoryError: if another line is not a record; the message names the line.
    """
    lines = _lines(path.read_bytes()) if path.exists() else []
    return [_parse(line, path, number) for number, line in enumerate(lines, start=1)]


def rewind_records(path: StoragePath, written: FileDigest | None, after_step: int) -> None:
    """Drop the records of steps after `after_step`, which a run that resumes from a checkpoint repeats.

    The file becomes equal to that of an uninterrupted run. The file may be missing. It begins with the records
    `written` at the checkpoint; None if it was changed: then all lines that are records, in increasing order, are kept.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    data = path.read_bytes() if path.exists() else b""
    kept = _records_until(data, after_step) if written is None else data[: written.size]
    if kept != data:
        write_atomically(path, kept)


def _records_until(data: bytes, step: int) -> bytes:
    kept, last = list[bytes](), -1
    for line in _lines(data):
        found = _step_of(line)
        if found is not None and last < found <= step:
            kept.append(line + b"\n")
            last = found
    return b"".join(kept)


def first_odd_line(data: bytes) -> int | None:
    """Return the number of the first line that is not the record of the next step; None if there is none."""
    steps = map(_step_of, _lines(data))
    return next((number for number, step in enumerate(steps, start=1) if step != number - 1), None)


def _step_of(line: bytes) -> int | None:
    """The step of a line; None if the line is not a record."""
    try:
        return int(_record(line)["step"])
    except _NO_RECORD:
        return None


def _lines(data: bytes) -> list[bytes]:
    """The complete lines, without their newlines."""
    return data.split(b"\n")[:-1]


def _record(line: bytes) -> dict[str, int | float]:
    # Bytes could be in another encoding.
    record: Any = json.loads(line.decode())
    step = int(record["step"])
    return {**{name: float(value) for name, value in record.items()}, "step": step}


def _parse(line: bytes, path: StoragePath, number: int) -> dict[str, int | float]:
    try:
        return _record(line)
    except _NO_RECORD as error:
        raise RunDirectoryError(
            f"{path}:{number} is not the record of a step ({error}); restore the line, or resume the run with "
            "--accept_changes, which removes the lines that are not records"
        ) from error


_NO_RECORD = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Errors of `_record` for a line that is not the record of a step."""
