# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write the metrics of each training step to `metrics.jsonl` and to trackers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from levanter.tracker import CompositeTracker, Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig

from marin_rl.training.metrics_file import append_record, read_records


class StepRecords:
    """Writes the metrics of each step to `metrics.jsonl` and to trackers such as TensorBoard and wandb.

    Errors of trackers are not caught: they stop the run.
    """

    def __init__(self, path: Path, tracker: Tracker):
        """Open the metrics file; recording continues after its last step.

        Args:
            path: `metrics.jsonl`, without records of steps that will be repeated.
            tracker: tracker that also receives the metrics; see `make_tracker`.
        """
        self._path = path
        self._tracker = tracker
        self._last_step = max((int(record["step"]) for record in read_records(path)), default=-1)

    def record(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Write the metrics of one step.

        Args:
            step: number of the step, greater than that of the last record.
            metrics: values by name.

        Raises:
            ValueError: if the step is not greater than that of the last record.
            RunDirectoryError: if the file cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} cannot be recorded: steps must increase, and step {self._last_step} is recorded already"
            )
        append_record(self._path, step, metrics)
        self._tracker.log(metrics, step=step)
        self._last_step = step

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the run's summary to the trackers, and close them."""
        self._tracker.log_summary(dict(summary))
        self._tracker.finish()


def make_tracker(
    configs: TrackerConfig | Sequence[TrackerConfig],
    run_id: str,
    hyperparameters: Mapping[str, Any],
    last_step: int = 0,
) -> Tracker:
    """Start the configured trackers.

    Args:
        configs: levanter's tracker section: one config or a sequence, which may be empty.
        run_id: id of the run; trackers use it to continue a resumed run.
        hyperparameters: resolved config, as plain values.
        last_step: last step before a resume; TensorBoard then hides events of later steps. 0 for a new run.

    Returns:
        A tracker that forwards to all configured trackers.

    Raises:
        ImportError: if a package of a tracker is missing; the message names the extra to install.
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
    """Flatten to scalars by dotted name, as TensorBoard requires."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
