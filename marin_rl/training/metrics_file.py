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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marin_rl.errors import RunDirectoryError, writing
from marin_rl.storage import FileDigest, StoragePath
from marin_rl.training.run_directory import write_atomically


@dataclasses.dataclass(frozen=True)
class Panel:
    """Definition of one plot of `curves.png` and of the HTML page."""

    title: str
    """Title of the plot."""
    names: Mapping[str, str]
    """Labels by metric name; a trailing `*` matches any suffix. Metrics without values are omitted."""
    unit: str = ""
    """Unit of the vertical axis."""


PANELS = (
    Panel(
        "Reward per rollout",
        {"train/rewards": "reward", "train/correct_rewards": "correct", "train/format_rewards": "format"},
    ),
    Panel("Held-out accuracy", {"eval/*": ""}),
    Panel("Entropy", {"policy/entropy_avg": "entropy"}, "nats per token"),
    Panel("KL to the reference", {"objective/kl": "KL"}, "nats per rollout"),
    Panel("Approximate KL to the policy before the update", {"policy/approxkl_avg": "change"}, "nats per token"),
    Panel("Sampler against learner, log-probs", {"mismatch/logprob_difference_max": "largest difference"}, "nats"),
    Panel("Loss", {"loss/policy_avg": "policy", "loss/value_avg": "value"}),
    Panel("Output length", {"train/output_length": "tokens"}, "tokens"),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
    Panel(
        "Groups without signal", {"groups/all_good_share": "all solved", "groups/all_bad_share": "none solved"}, "share"
    ),
)
"""Plots of every run, if it has their metrics."""


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
    """Append the record of a step, and flush it to disk.

    Args:
        path: the file.
        step: the training step.
        metrics: values by name.

    Returns:
        The appended line.

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

    The file becomes equal to that of an uninterrupted run.

    Args:
        path: the file; it may be missing.
        written: the records at the checkpoint, which the file begins with; None if the file was changed: then all lines
            that are records, in increasing order, are kept.
        after_step: step of the checkpoint.

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
