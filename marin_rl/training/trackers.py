# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Trackers such as TensorBoard and wandb, which receive the metrics of a run that may repeat steps after a resume."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from levanter.tracker import CompositeTracker, Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.wandb import WandbConfig, WandbTracker

from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.fields import flatten

STEP = "step"
"""Metric of wandb that is the horizontal axis of all others."""


_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
"""Packages of trackers."""


def check_trackers(configs: TrackerConfig | Sequence[TrackerConfig]) -> None:
    """Check that the packages of trackers are installed, and that wandb has an account, without a request.

    Args:
        configs: levanter's tracker section.

    Raises:
        UserError: if one is missing; the message names the tracker and the remedy.
    """
    for config in [configs] if isinstance(configs, TrackerConfig) else configs:
        name = TrackerConfig.get_choice_name(type(config))
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            extra = package if name == "trackio" else f"marin_rl[{name}]"
            raise UserError(
                f"trainer.tracker is {name!r}, but the package {package} is not installed; pip install '{extra}', or "
                "leave out the tracker (metrics.jsonl has the same metrics)"
            )
        if isinstance(config, WandbConfig):
            _check_wandb_account(config)


def _check_wandb_account(config: WandbConfig) -> None:
    import wandb
    from requests.utils import get_netrc_auth

    settings = wandb.setup().settings
    mode = config.mode or settings.mode
    keys = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if mode != "online" or any(os.environ.get(key) for key in keys) or get_netrc_auth(settings.base_url):
        return
    raise UserError(
        "trainer.tracker is 'wandb', but there is no login for it on this machine; run `wandb login`, set "
        "WANDB_API_KEY, or set trainer.tracker.mode to offline"
    )


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
    trackers: list[Tracker] = []
    for config in [configs] if isinstance(configs, TrackerConfig) else configs:
        if isinstance(config, TensorboardConfig) and config.purge_step is None and last_step:
            config = dataclasses.replace(config, purge_step=last_step + 1)
        try:
            tracker = config.init(run_id)
        except ImportError as error:
            name = TrackerConfig.get_choice_name(type(config))
            raise ImportError(
                f"tracker {name!r} needs a package that is not installed ({error}); pip install 'marin_rl[{name}]'"
            ) from error
        trackers.append(_RepeatableWandb(tracker) if isinstance(tracker, WandbTracker) else tracker)
    every = CompositeTracker(trackers)
    # TensorBoard requires scalars.
    scalars = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flatten(hyperparameters).items()
        if value != {}
    }
    every.log_hyperparameters(scalars)
    return every


class _RepeatableWandb(Tracker):
    """Logs repeated steps to wandb, which drops values of steps lower than its own.

    wandb counts its own steps on; the training step is a metric, and the horizontal axis of all others. Rewinding a run
    would also remove the former values, but needs wandb's cloud.
    """

    name = "wandb"

    def __init__(self, tracker: WandbTracker) -> None:
        self._tracker = tracker
        tracker.run.define_metric(STEP)
        tracker.run.define_metric("*", step_metric=STEP)

    def log_hyperparameters(self, hparams: dict[str, Any]) -> None:
        self._tracker.log_hyperparameters(hparams)

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        assert step is not None
        # wandb's own step is higher after a resume, and lower in a resumed run that is offline.
        self._tracker.log({**metrics, STEP: step}, step=max(step, self._tracker.run.step), commit=True)

    def log_summary(self, metrics: Mapping[str, Any]) -> None:
        self._tracker.log_summary(metrics)

    def log_artifact(self, artifact_path: Any, *, name: str | None = None, type: str | None = None) -> None:
        self._tracker.log_artifact(artifact_path, name=name, type=type)

    def finish(self) -> None:
        self._tracker.finish()
