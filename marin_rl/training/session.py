# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A training session: run directory, log, signals, metric records, training and export."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import jax
from levanter.tracker import Tracker

from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.ray_cluster import check_ray, find_cluster
from marin_rl.learner.critic import policy_of
from marin_rl.learner.hf_export import DeviceWeights
from marin_rl.runs.lock import lock
from marin_rl.runs.metrics_file import append_record, format_record, read_records, rewind_records
from marin_rl.runs.run_directory import EXPORTED_STEP, RunDirectory, create_or_open, exported_step
from marin_rl.training.config_changes import describe_learning_rate, plan_changes
from marin_rl.training.config_history import Change, changed_values, record_changes
from marin_rl.training.console import ProgressDisplay, describe_step
from marin_rl.training.export import export_folder
from marin_rl.training.loop import TrainingRun, train
from marin_rl.training.open_run import open_run
from marin_rl.training.profiler import open_profiler
from marin_rl.training.run_state import Progress
from marin_rl.training.shared_run import require_same_config, require_shared_folder
from marin_rl.training.starting_weights import check_weight_files, read_config, resolve_model
from marin_rl.training.summary import print_and_log, say_finished, summary_of
from marin_rl.training.trackers import check_trackers, make_tracker
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import exempt_from_collection, join_processes
from marin_rl.utils.errors import Closing, UserError, explain, writing
from marin_rl.utils.host_status import StopRequestedError, exit_on_error, explain_errors, require_same_software
from marin_rl.utils.logs import log_to, module_levels
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.settings.decode import encode
from marin_rl.utils.settings.yaml_text import to_yaml
from marin_rl.utils.storage import AppendedFile, FileDigest, StoragePath, storage_path
from marin_rl.utils.timing import PhaseTimer, compile_clock

logger = logging.getLogger(__name__)


def run_session(
    config: TrainConfig,
    stream: TextIO,
    *,
    accept_changes: bool = False,
    named: Collection[str] = (),
    started: float | None = None,
) -> None:
    """Start or resume training in the configured run directory. A finished run stays as it is.

    Args:
        config: training config; if `model` is None, the architecture is read from `initialize_from`.
        stream: console output.
        accept_changes: whether to resume although files that the run reads or has written were changed.
        named: dotted keys whose change is intended if the run resumes, as those given on a command line.
        started: `time.perf_counter()` at the start of the command; None for now.

    Raises:
        PolicyModelError: if `initialize_from` cannot be loaded; its files are checked before devices start.
        MissingPackageError: if workers are set, and Ray is not installed.
        NoClusterError: if no Ray cluster answers at `ray_address`; the run directory is not created.
        RunDirectoryError: if the directory belongs to another config, is in use, cannot be written, or differs between
            the training processes.
        CheckpointError: if no checkpoint is usable, or a new one cannot be written.
        NonFiniteUpdateError: if training diverged; the last checkpoint precedes the divergence.
    """
    started = time.perf_counter() if started is None else started
    compiled = compile_clock().seconds
    check_ray(config)
    # First, so that an error of one process ends the others, too.
    join_processes(config.trainer)
    with contextlib.ExitStack() as resources, exit_on_error():
        require_same_software()
        config = resolve_model(config)
        directory = RunDirectory(storage_path(config.run_dir, "run_dir"))
        if multihost.on_main(lambda: say_finished(config, directory, stream, named, accept_changes=accept_changes)):
            return
        if multihost.is_main():
            check_trackers(config.trainer.tracker)
        check_weight_files(config.initialize_from, config.run_dir, config.tokenizer.path)
        cluster = config.ray_address if config.mode is Mode.ASYNC else None
        directory = _lock_on_main(directory, cluster, resources)
        require_same_config(to_yaml(config))
        require_shared_folder(directory.path)
        changes: list[Change] = []
        multihost.on_main(lambda: changes.extend(_open_directory(config, directory, named)))
        main = multihost.is_main()
        file = directory.log if main else directory.path / "processes" / f"{jax.process_index()}.txt"
        log = log_to(file, config.log_level.number, module_levels(config.logging))
        console = stream if main else resources.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        with log, logged_errors(), explain_errors():
            start = _Start(config, directory, changes, accept_changes, started)
            with ProgressDisplay(config.num_steps, console) as display:
                finished = _train(start, display)
            if main and finished is not None:
                command, compiling = start.seconds(finished.command_timer), compile_clock().seconds - compiled
                print_and_log(display.console, summary_of(directory, finished.state.progress, command, compiling))


def _lock_on_main(directory: RunDirectory, cluster: str | None, resources: contextlib.ExitStack) -> RunDirectory:
    """Lock the run directory in the main process, which alone gets the paths that check the lock.

    The Ray cluster at an address must respond first.
    """
    held: list[RunDirectory] = []

    def take() -> None:
        if cluster is not None:
            find_cluster(cluster)
        held.append(resources.enter_context(lock(directory)))

    multihost.on_main(take)
    return held[0] if held else directory


def _open_directory(config: TrainConfig, directory: RunDirectory, named: Collection[str]) -> list[Change]:
    """Create or open the run directory; return the changes of its config, which are not yet written."""
    changes = plan_changes(directory, config, named)
    if exported_step(directory) is not None and read_config(directory).export != config.export:
        # If this start is killed, the next one exports with the new settings.
        with writing(directory.hf):
            (directory.hf / EXPORTED_STEP).unlink(missing_ok=True)
    create_or_open(directory.path, to_yaml(config), keep_config=bool(changes))
    return changes


@dataclasses.dataclass(frozen=True)
class _Start:
    """A start of a run."""

    config: TrainConfig
    directory: RunDirectory
    changes: Sequence[Change]
    """Changes of the config since the last start, not yet written."""
    accept_changes: bool
    started: float
    """Time at which the command started, of `time.perf_counter`."""

    def seconds(self, timer: PhaseTimer) -> dict[str, float]:
        """Seconds of the command by part."""
        parts = {name: timer.seconds[name] for name in COMMAND_PARTS if name in timer.seconds}
        return {**parts, "checkpoints, the rest": time.perf_counter() - self.started - sum(parts.values())}


COMMAND_PARTS = ("start", "warm start", "evaluation", "RL steps", "export, plots")
"""Parts of a command."""


def _train(start: _Start, display: ProgressDisplay) -> TrainingRun | None:
    """Train, export and plot; return the run if it is complete."""
    config, directory = start.config, start.directory
    timer, report = PhaseTimer(), functools.partial(_report, display)
    with contextlib.ExitStack() as closing:
        stop = closing.enter_context(stop_on_signals(report))
        try:
            run = open_run(
                config,
                directory.path,
                report,
                stop.is_set,
                accept_changes=start.accept_changes,
                command_timer=timer,
            )
        except StopRequestedError:
            report("stopped before the first step, of which nothing is saved. Run the same command again to begin anew")
            return None
        closing.enter_context(Closing(run.close))
        timer.seconds["start"] = time.perf_counter() - start.started - sum(timer.seconds.values())
        changed: dict[str, float] = {}
        multihost.on_main(lambda: changed.update(_apply_changes(start, run.state.progress, report)))
        # Only the main process writes records.
        records = _open_records(run, directory) if multihost.is_main() else None
        if records is not None:
            closing.enter_context(Closing(records.close))
            run.store_records = records.flush
        traces = directory.profile / f"process-{jax.process_index()}"
        before_step = closing.enter_context(open_profiler(config.trainer, traces))
        first_step = run.state.progress.step + 1
        before_step(first_step)

        def record(step: int, metrics: dict[str, float]) -> None:
            recorded = metrics | changed if step == first_step else metrics
            multihost.on_main(lambda: cast(StepRecords, records).record(step, recorded))
            logger.info("%s", describe_step(step, config.num_steps, metrics))
            display.update(step, metrics)
            before_step(step + 1)

        with exempt_from_collection():
            complete = train(run, record, stop.is_set)
    if not complete:
        report(
            f"stopped after step {run.state.progress.step} of {config.num_steps}; everything is saved in "
            f"{directory.path}. Run the same command again to resume"
        )
    with timer.phase("export, plots"):
        export = functools.partial(_export, run, directory) if complete else lambda: None
        try:
            if records is not None:
                _plot_and_finish(run, directory, records)
        except Exception:
            # Plots that fail do not cost the model.
            export()
            raise
        # Last, because a run with an export is complete, and is not opened again.
        export()
    return run if complete else None


def _apply_changes(start: _Start, progress: Progress, report: Callable[[str], None]) -> dict[str, float]:
    """Write and report the changes of the config; return the values changed at this step, as metrics."""
    former = read_config(start.directory) if start.changes else start.config
    history = record_changes(start.directory, start.changes, to_yaml(start.config), progress.step)
    for change in start.changes:
        report(f"changed from step {progress.step + 1} on: {change}")
    if start.changes and (rates := describe_learning_rate(former, start.config, progress.updates)):
        report(rates)
    return changed_values(history, progress.step)


def _report(display: ProgressDisplay, message: str) -> None:
    logger.info("%s", message)
    display.say(message)


@contextlib.contextmanager
def logged_errors() -> Iterator[None]:
    """Log an exception that ends the run, with its traceback unless the message names the cause and the remedy."""
    try:
        yield
    except UserError as error:
        logger.error("the run ended with an error: %s", explain(error, str(error)))
        raise
    except BaseException:
        logger.exception("the run ended with an error")
        raise


@contextlib.contextmanager
def stop_on_signals(report: Callable[[str], None]) -> Iterator[threading.Event]:
    """Turn the first SIGINT (Ctrl-C) or SIGTERM into a request to stop and save the last finished step.

    A second signal ends the process immediately, as by default.

    Args:
        report: prints a message; called in a thread, because the signal may interrupt a write to the same stream, and
            Python rejects a nested write.

    Yields:
        The event that the first signal sets.
    """
    stop = threading.Event()
    threads: list[threading.Thread] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()
        message = (
            f"{signal.Signals(number).name}: stopping and saving; a step that is still being sampled is discarded, one "
            "that is being trained on is finished first (send the signal again to exit immediately)"
        )
        threads.append(threading.Thread(target=report, args=(message,), name="stop message", daemon=True))
        threads[-1].start()

    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()
        for thread in threads:
            # Keep the order of the output; the timeout is for a stream that blocks.
            thread.join(1.0)


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


def _open_records(run: TrainingRun, directory: RunDirectory) -> StepRecords:
    """Open the metric records, truncated to the steps of the run's state; a new run gets a record of step 0."""
    progress, evaluations = run.state.progress, run.state.progress.evaluations
    step = progress.step - bool(progress.unrecorded)
    rewind_records(directory.metrics, run.files.metrics, step)
    with writing(run.store.folder):
        run.store.truncate(progress.step, run.files.rollouts)
    tracker = make_tracker(run.config.trainer.tracker, run.config.run_name, encode(run.config), last_step=step)
    records = StepRecords(directory.metrics, tracker)
    if progress.step == 0:
        before = evaluations.get("before warm start", {})
        start = {f"before_warm_start/{name}": value for name, value in before.items()}
        records.record(0, {**start, **evaluations.get("before RL", {})})
    return records


def _plot_and_finish(run: TrainingRun, directory: RunDirectory, records: StepRecords) -> None:
    """Plot the metrics, and close the trackers."""
    # Imported here because matplotlib takes half a second to import.
    from marin_rl.runs.curves import plot_curves

    plot_curves(directory.metrics, directory.curves)
    records.finish({"episodes": run.state.progress.episodes})


def _export(run: TrainingRun, directory: RunDirectory) -> None:
    """Write the final weights in Hugging Face format, atomically."""
    policy, trainer = policy_of(run.trainer_state.model), run.learner.trainer
    weights = DeviceWeights(policy, trainer, run.config.export.numeric_dtype)
    with writing(directory.hf):
        export_folder(weights, run.runner.tokenizer, directory.hf, run.state.progress.step, run.config.sampling.stop)
