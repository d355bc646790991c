# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Records of the steps: `metrics.jsonl`, trackers such as TensorBoard and wandb, and traces of devices and host."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
from levanter.tracker import CompositeTracker, Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.wandb import WandbConfig, WandbTracker

from marin_rl.runs.metrics_file import append_record, format_record, read_records, rewind_records
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.training.loop import AbstractRun
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import Closing, UserError, install_command
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.settings.decode import encode
from marin_rl.utils.settings.fields import flatten
from marin_rl.utils.storage import AppendedFile, FileDigest, StoragePath, remove, writing

logger = logging.getLogger(__name__)

STEP = "step"
"""Metric of wandb that is the horizontal axis of all others."""
_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio"}
"""Packages of trackers."""


class StepRecords:
    """Writes the metrics of each step to `metrics.jsonl` and to trackers such as TensorBoard and wandb.

    Errors of trackers are not caught: they stop the run.
    """

    def __init__(self, path: StoragePath, tracker: Tracker):
        """Open `metrics.jsonl`, which holds no records of steps that will be repeated, and continue after its end.

        Args:
            path: the file.
            tracker: receives the same metrics.
        """
        self._path = path
        self._tracker = tracker
        self._uploaded = AppendedFile(path) if isinstance(path, RemotePath) else None
        self._last_step = max((int(record["step"]) for record in read_records(path)), default=-1)
        data = path.read_bytes() if path.exists() else b""
        self._size, self._digest = len(data), hashlib.sha256(data)

    def record(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Write the metrics of one step.

        Raises:
            ValueError: if the step is not greater than that of the last record.
            RunDirectoryError: if the file cannot be written.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} cannot be recorded: steps must increase, and step {self._last_step} is recorded already"
            )
        if isinstance(self._path, Path):
            line = append_record(self._path, step, metrics)
        else:
            line = f"{format_record(step, metrics)}\n".encode()
            cast(AppendedFile, self._uploaded).write(line)
        self._size += len(line)
        self._digest.update(line)
        self._tracker.log(metrics, step=step)
        self._last_step = step

    def flush(self) -> FileDigest:
        """Upload the records to the object store, if the run is in one; a local file is complete after every record.

        Returns:
            Size and checksum of the records, of what was written and not of the file.

        Raises:
            RunDirectoryError: if the file cannot be written, or another process continues the run.
        """
        if self._uploaded is not None:
            with writing(self._path):
                self._uploaded.flush()
        return FileDigest(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Upload the last records; raises RunDirectoryError like `flush`."""
        if self._uploaded is not None:
            with writing(self._path):
                self._uploaded.close()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send the run's summary to the trackers, and close them."""
        self._tracker.log_summary(dict(summary))
        self._tracker.finish()


def open_records(run: AbstractRun, directory: RunDirectory) -> StepRecords:
    """Open the metric records, truncated to the steps of the run's state; a new run gets a record of step 0."""
    progress, evaluations = run.progress, run.progress.evaluations
    step = progress.step - bool(progress.unrecorded)
    rewind_records(directory.metrics, run.files.metrics, step)
    run.rewind()
    tracker = make_tracker(run.config.trainer.tracker, run.config.run_name, encode(run.config), last_step=step)
    records = StepRecords(directory.metrics, tracker)
    if progress.step == 0:
        before = evaluations.get("before warm start", {})
        start = {f"before_warm_start/{name}": value for name, value in before.items()}
        records.record(0, {**start, **evaluations.get(run.milestones[0], {})})
    return records


def check_trackers(configs: TrackerConfig | Sequence[TrackerConfig]) -> None:
    """Check that the packages of trackers are installed, and that wandb has an account, without a request.

    Raises:
        UserError: if one is missing; the message names the tracker and the remedy.
    """
    for config in [configs] if isinstance(configs, TrackerConfig) else configs:
        name = TrackerConfig.get_choice_name(type(config))
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            install = "pip install trackio" if name == "trackio" else install_command(name)
            raise UserError(
                f"trainer.tracker is {name!r}, but the package {package} is not installed; {install}, or leave "
                "out the tracker (metrics.jsonl has the same metrics)"
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
    """
    trackers: list[Tracker] = []
    for config in [configs] if isinstance(configs, TrackerConfig) else configs:
        if isinstance(config, TensorboardConfig) and config.purge_step is None and last_step:
            config = dataclasses.replace(config, purge_step=last_step + 1)
        tracker = config.init(run_id)
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


@contextlib.contextmanager
def open_profiler(config: TrainerConfig, folder: StoragePath) -> Iterator[Callable[[int], None]]:
    """Trace the steps `profiler_start_step` to `profiler_start_step + profiler_num_steps - 1`, if `profiler` is set.

    A trace is written when its last step or the run ends. TensorBoard's profile plugin shows it, and Perfetto
    `perfetto_trace.json.gz`. The phases of a step are in it by name. A process that resumes after the first of these
    steps traces none. `folder` is that of the trace of this process.

    Yields:
        A function that must be called with the number of each step before it begins.

    Raises:
        RunDirectoryError: if the trace cannot be written.
    """
    first, last = config.profiler_start_step, config.profiler_start_step + config.profiler_num_steps - 1
    with contextlib.ExitStack() as trace:

        def before_step(step: int) -> None:
            if config.profiler and step == first:
                # The profiler writes to local folders only.
                local = folder if isinstance(folder, Path) else Path(tempfile.mkdtemp())
                options = jax.profiler.ProfileOptions()
                # Tracing every Python call makes the host several times slower, and hides the devices' idle time.
                options.python_tracer_level = 0
                jax.profiler.start_trace(local, create_perfetto_trace=True, profiler_options=options)
                trace.enter_context(Closing(functools.partial(_write_trace, folder, local)))
            if step == last + 1:
                trace.close()

        yield before_step


def _write_trace(folder: StoragePath, local: Path) -> None:
    """End the trace, which jax writes to the local folder, and upload it if the run is in an object store."""
    with writing(folder):
        jax.profiler.stop_trace()
        if isinstance(folder, RemotePath):
            for file in sorted(path for path in local.rglob("*") if path.is_file()):
                (folder / file.relative_to(local).as_posix()).upload(file)
            remove(local)
    logger.info("the trace is in %s", folder)
