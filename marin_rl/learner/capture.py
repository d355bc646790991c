# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A levanter tracker that keeps what it is told until it is asked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter.tracker import Tracker, TrackerConfig


class CapturingTracker(Tracker):
    """Collects the numbers that levanter's trainer logs during a step.

    The run writes one record per update, with everything in it; this is how the trainer's share of it
    gets there.
    """

    name = "capturing"

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}

    def pop(self) -> dict[str, float]:
        """What was logged since the last call."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        """Keep the scalars of `metrics`; the caller knows the step."""
        for name, value in metrics.items():
            self._numbers[name] = float(value)

    def log_hyperparameters(self, hparams: dict[str, Any]) -> None:
        """The run directory holds the configuration; nothing to keep."""

    def log_summary(self, metrics: dict[str, Any]) -> None:
        """The run writes its own summary; nothing to keep."""

    def log_artifact(self, artifact_path: Any, *, name: str | None = None, type: str | None = None) -> None:
        """The run directory holds every artifact; nothing to keep."""

    def finish(self) -> None:
        """Nothing is held open."""


@dataclasses.dataclass
class CapturingTrackerConfig(TrackerConfig):
    """Makes a [`CapturingTracker`][marin_rl.learner.capture.CapturingTracker]."""

    def init(self, run_id: str | None) -> CapturingTracker:
        """A fresh tracker."""
        return CapturingTracker()
