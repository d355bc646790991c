# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A training session: run directory, log, signals, metric records, training and export."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

import equinox as eqx
import jax

from marin_rl import multihost
from marin_rl.atomic_files import replace_folder
from marin_rl.closing import Closing
from marin_rl.config.command_line import to_yaml
from marin_rl.config.decode import encode
from marin_rl.config.sections import Mode, module_levels
from marin_rl.config.train_config import TrainConfig
from marin_rl.config_fields import changeable_keys
from marin_rl.distributed.ray_workers import find_cluster
from marin_rl.errors import writing
from marin_rl.learner.critic import policy_of
from marin_rl.learner.devices import join_processes
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.logs import log_to
from marin_rl.training.console import ClosingSummary, Progress, print_closing_table
from marin_rl.training.loop import train
from marin_rl.training.metrics_file import read_records, truncate_records
from marin_rl.training.open_run import open_run
from marin_rl.training.run_directory import RunDirectory, create_or_open, lock
from marin_rl.training.shared_run import require_same_config, require_shared_folder
from marin_rl.training.starting_weights import resolve_model
from marin_rl.training.tracking import StepRecords, make_tracker
from marin_rl.training.training_run import TrainingRun

logger = logging.getLogger(__name__)


def run_session(config: TrainConfig, stream: TextIO) -> None:
    """Start or resume training in the configured run directory.

    Args:
        config: training config; if `model` is None, the architecture is read from `initialize_from`.
        stream: console output.

    Raises:
        NoClusterError: if no Ray cluster answers at `ray_address`; the run directory is not created.
        RunDirectoryError: if the directory belongs to another config, is in use, cannot be written, or differs between
            the training processes.
        CheckpointError: if no checkpoint is usable, or a new one cannot be written.
        NonFiniteUpdateError: if training diverged; the last checkpoint precedes the divergence.
    """
    config = resolve_model(config)
    directory = RunDirectory(Path(config.run_dir))
    join_processes(config.trainer)
    with contextlib.ExitStack() as resources, multihost.exit_on_error():
        multihost.on_main(lambda: _lock(directory, config, resources))
        require_same_config(config, changeable_keys(TrainConfig))
        require_shared_folder(directory.path)
        multihost.on_main(lambda: _create(directory, config))
        main = multihost.is_main()
        file = directory.log if main else directory.path / "processes" / f"{jax.process_index()}.txt"
        log = log_to(file, config.log_level.number, module_levels(config.logging))
        console = stream if main else resources.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        with log, logged_errors(), multihost.explain_errors(), Progress(config.num_steps, console) as progress:
            run = _train(config, directory, progress)
        if main and run.state.progress.step >= config.num_steps:
            print_closing_table(progress.console, _summary(run, directory))


def _lock(directory: RunDirectory, config: TrainConfig, resources: contextlib.ExitStack) -> str:
    if config.mode is Mode.ASYNC and config.ray_address is not None:
        find_cluster(config.ray_address)
    resources.enter_context(lock(directory))
    return str(directory.path)


def _create(directory: RunDirectory, config: TrainConfig) -> str:
    create_or_open(directory.path, to_yaml(config), changeable_keys(TrainConfig))
    return str(directory.path)


def _train(config: TrainConfig, directory: RunDirectory, progress: Progress) -> TrainingRun:
    report = functools.partial(_report, progress)
    run = open_run(config, directory.path, report)
    with Closing(run.close), stop_on_signals(report) as stop:
        records = _open_records(run, directory) if multihost.is_main() else None
        complete = train(run, _Sink(records, progress, stop))
    if multihost.is_main():
        # Imported here because matplotlib takes half a second to import.
        from marin_rl.training.curves import plot_curves

        plot_curves(directory.metrics, directory.curves)
    if complete:
        _export(run, directory)
    else:
        report(
            f"stopped after step {run.state.progress.step} of {config.num_steps}; everything is saved in "
            f"{directory.path}. Run the same command again to resume"
        )
    if records is not None:
        records.finish({"episodes": run.state.progress.episodes})
    return run


def _report(progress: Progress, message: str) -> None:
    logger.info("%s", message)
    progress.say(message)


@contextlib.contextmanager
def logged_errors() -> Iterator[None]:
    """Log the traceback of an exception that ends the run."""
    try:
        yield
    except BaseException:
        logger.exception("the run ended with an error")
        raise


@dataclasses.dataclass
class StopRequest:
    """Flag that asks the training loop to stop."""

    requested: bool = False
    """Set by the first SIGINT or SIGTERM."""


@contextlib.contextmanager
def stop_on_signals(report: Callable[[str], None]) -> Iterator[StopRequest]:
    """Turn the first SIGINT (Ctrl-C) or SIGTERM into a request to stop and save the last finished step.

    A second signal ends the process immediately, as by default.

    Args:
        report: prints a message; called in a thread, because the signal may interrupt a write to the same stream, and
            Python rejects a nested write.

    Yields:
        The flag that the first signal sets.
    """
    stop = StopRequest()
    threads: list[threading.Thread] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.requested = True
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


@dataclasses.dataclass(frozen=True)
class _Sink:
    records: StepRecords | None
    """None if another process writes the records."""
    progress: Progress
    stop: StopRequest

    def record(self, step: int, metrics: dict[str, float]) -> None:
        multihost.on_main(lambda: self._write(step, metrics))
        self.progress.update(step, metrics)

    def _write(self, step: int, metrics: dict[str, float]) -> str:
        assert self.records is not None
        self.records.record(step, metrics)
        return str(step)

    def stop_requested(self) -> bool:
        return multihost.any_process(self.stop.requested)


def _open_records(run: TrainingRun, directory: RunDirectory) -> StepRecords:
    """Open the metric records, truncated to the steps of the run's state; a new run gets a record of step 0."""
    step = run.state.progress.step
    truncate_records(directory.metrics, step if step else -1)
    run.recorder.truncate(step)
    tracker = make_tracker(run.config.trainer.tracker, run.learner.trainer.run_id, encode(run.config), last_step=step)
    records = StepRecords(directory.metrics, tracker)
    if step == 0:
        before = run.state.progress.evaluations.get("before warm start", {})
        start = {f"before_warm_start/{name}": value for name, value in before.items()}
        records.record(0, {**start, **run.state.progress.evaluations.get("before RL", {})})
    return records


def _export(run: TrainingRun, directory: RunDirectory) -> None:
    """Write the final weights in Hugging Face format, atomically."""
    policy = policy_of(run.trainer_state.model)
    if multihost.is_multihost():
        policy = jax.tree.map(lambda leaf: multihost.fetch(leaf) if eqx.is_array(leaf) else leaf, policy)
    with tempfile.TemporaryDirectory() as discarded:
        # All processes take part in the export; only the files of the main process are kept.
        partial = directory.path / ".hf.partial" if multihost.is_main() else Path(discarded)
        shutil.rmtree(partial, ignore_errors=True)
        with writing(directory.hf):
            save_hf_policy(policy, run.runner.tokenizer, partial, run.learner.trainer.config)
            multihost.on_main(lambda: _replace(directory.hf, partial))


def _replace(folder: Path, partial: Path) -> str:
    replace_folder(folder, partial)
    return str(folder)


def _summary(run: TrainingRun, directory: RunDirectory) -> ClosingSummary:
    records = read_records(directory.metrics)
    prefix = "seconds/"
    names = dict.fromkeys(name for name in itertools.chain(*records) if name.startswith(prefix))
    seconds = {name.removeprefix(prefix): sum(record.get(name, 0.0) for record in records) for name in names}
    seconds.pop("total", None)
    return ClosingSummary(
        run_directory=directory.path,
        evaluations={landmark: run.state.progress.evaluations[landmark] for landmark in run.state.progress.evaluations},
        seconds=seconds,
        totals={
            "updates": run.state.progress.updates,
            "rollouts": run.state.progress.episodes,
            "tokens sampled": run.state.progress.sampled_tokens,
        },
        next_commands={
            "Evaluate it again": f"python -m marin_rl.evaluate --run {directory.path}",
            "Train from its weights": (
                f"python -m marin_rl.train --config CONFIG --run_dir NEW --initialize_from {directory.path} "
                "--warm_start.max_steps 0"
            ),
        },
    )
