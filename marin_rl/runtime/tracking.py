# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One record per training step, to every place that keeps them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from levanter.tracker import CompositeTracker, Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig

from marin_rl.runtime.metrics_file import append_record, read_records


class StepRecords:
    """Writes each step's record to `metrics.jsonl`, and to trackers such as TensorBoard and wandb.

    A tracker's failure stops the run like any other error: a record is in all places or the run says why not.
    """

    def __init__(self, path: Path, tracker: Tracker):
        """Begin, or go on after the step that the file has last.

        Args:
            path: `metrics.jsonl`, already without records of steps that will be made again.
            tracker: what else gets the records; see `make_tracker`.
        """
        self._path = path
        self._tracker = tracker
        self._last_step = max((int(record["step"]) for record in read_records(path)), default=-1)

    def record(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Write the complete record of one step.

        Args:
            step: the step's number; greater than that of every record before it.
            metrics: name to value.

        Raises:
            ValueError: if the step has a record already.
            RunDirectoryError: if the file cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} cannot be recorded: step {self._last_step} has been, and each has one record"
            )
        append_record(self._path, step, metrics)
        self._tracker.log(metrics, step=step)
        self._last_step = step

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand the trackers the run's summary, and close them."""
        self._tracker.log_summary(dict(summary))
        self._tracker.finish()


def make_tracker(
    configs: TrackerConfig | Sequence[TrackerConfig],
    run_id: str,
    hyperparameters: Mapping[str, Any],
    last_step: int = 0,
) -> Tracker:
    """Start the configured trackers; none at all is fine.

    Args:
        configs: levanter's tracker section: one, or several.
        run_id: under which a resumed run goes on in the same place.
        hyperparameters: the resolved config, as plain values.
        last_step: the step that the run goes on after; TensorBoard then hides what it was told of later
            ones before the interruption.

    Raises:
        ImportError: if a tracker's package is missing; the message names the extra to install.
    """
    trackers = []
    for config in [configs] if isinstance(configs, TrackerConfig) else configs:
        if isinstance(config, TensorboardConfig) and config.purge_step is None and last_step:
            config = dataclasses.replace(config, purge_step=last_step + 1)
        try:
            trackers.append(config.init(run_id))
        except ImportError as error:
            name = TrackerConfig.get_choice_name(type(config))
            raise ImportError(
                f"tracker {name!r} needs a package that is not installed ({error}); pip install 'marin_rl[{name}]'"
            ) from error
    tracker = CompositeTracker(trackers)
    tracker.log_hyperparameters(_flat(hyperparameters))
    return tracker


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Dotted names and scalars, which is all that TensorBoard takes."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
