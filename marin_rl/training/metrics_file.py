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
from marin_rl.storage import StoragePath
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


def append_record(path: Path, step: int, metrics: Mapping[str, int | float]) -> None:
    """Append the record of a step, and flush it to disk.

    Args:
        path: the file.
        step: the training step.
        metrics: values by name.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    with writing(path), path.open("ab", buffering=0) as file:
        rest = f"{format_record(step, metrics)}\n".encode()
        while rest:
            rest = rest[file.write(rest) or 0 :]
        os.fsync(file.fileno())


def read_records(path: StoragePath) -> list[dict[str, int | float]]:
    """Read all records; empty if the file does not exist.

    An incomplete last line, which was cut off by a crash, is ignored.

    Raises:
        RunDirectoryError: if another line is not a record; the message names the line.
    """
    return [record for _, record in _complete_lines(path)]


def truncate_records(path: StoragePath, after_step: int) -> None:
    """Drop the records of steps after `after_step`, and an incomplete last line.

    A run that resumes from a checkpoint repeats these steps. Its file becomes equal to that of an uninterrupted run.

    Args:
        path: the file; it may be missing.
        after_step: step of the checkpoint.

    Raises:
        RunDirectoryError: if a line is not a record, or the file cannot be written.
    """
    if not path.exists():
        return
    kept = b"".join(line for line, record in _complete_lines(path) if record["step"] <= after_step)
    if kept != path.read_bytes():
        write_atomically(path, kept)


def _complete_lines(path: StoragePath) -> list[tuple[bytes, dict[str, int | float]]]:
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    return [(line, _parse(line, path, number)) for number, line in enumerate(lines, start=1)]


def _parse(line: bytes, path: StoragePath, number: int) -> dict[str, int | float]:
    try:
        record: Any = json.loads(line)
        step = int(record["step"])
        return {**{name: float(value) for name, value in record.items()}, "step": step}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path}:{number} is not the record of a step ({error}); restore the line, or delete the file to "
            "continue without the records of earlier steps"
        ) from error
