# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A training session: run directory, log, signals, metric records, training and export."""

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import jax

from marin_rl.config.command_line import ParsedConfig
from marin_rl.config.ray_cluster import check_engine, find_cluster
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.learner.critic import assemble, policy_of
from marin_rl.learner.hf_export import DeviceWeights
from marin_rl.learner.starting_weights import check_weight_files
from marin_rl.runs.lock import lock
from marin_rl.runs.run_directory import EXPORTED_STEP, RunDirectory, create_or_open, exported_step
from marin_rl.sessions.config_changes import (
    Change,
    changed_values,
    finished_progress,
    plan_changes,
    record_changes,
    refuse_moved_runs,
)
from marin_rl.sessions.console import ProgressDisplay, describe_step, print_and_log, report_finished
from marin_rl.sessions.earlier_run import export_folder, read_config, resolve_model
from marin_rl.sessions.recipes import as_rl, recipe_of
from marin_rl.sessions.step_records import StepRecords, check_trackers, open_profiler, open_records
from marin_rl.training.loop import AbstractRun, train
from marin_rl.training.open_run import Start
from marin_rl.training.shared_run import require_same_config, require_shared_folder
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import collect_rarely, exempt_from_collection, join_processes
from marin_rl.utils.errors import Closing, UserError, explain
from marin_rl.utils.host_status import StopRequestedError, exit_on_error, explain_errors, require_same_software
from marin_rl.utils.logs import log_to, module_levels
from marin_rl.utils.output import escape, go_on_without_output
from marin_rl.utils.settings.yaml_text import to_yaml
from marin_rl.utils.signals import stop_signals
from marin_rl.utils.storage import storage_path, writing
from marin_rl.utils.timing import PhaseTimer, compile_clock

logger = logging.getLogger(__name__)


def run_parsed(parsed: ParsedConfig[Any], started: float) -> int:
    """Do what the flags of a command that trains ask for: print the config, check it, or train.

    Args:
        parsed: config and flags.
        started: `time.perf_counter()` at the start of the command.

    Returns:
        Exit status.
    """
    if "print_config" in parsed.flags:
        print(to_yaml(resolve_model(parsed.config)), end="")
        return 0
    refuse_moved_runs(parsed.arguments.config_paths, parsed.config.run_dir)
    # Epochs set the number of steps.
    named = parsed.named | {"num_steps"} if "epochs" in parsed.named else parsed.named
    choices = {"accept_changes": "accept_changes" in parsed.flags, "named": named}
    if "dry_run" not in parsed.flags:
        go_on_without_output()
        run_session(parsed.config, sys.stdout, **choices, started=started)
        return 0
    # The accelerators may be those of a running job, or absent.
    jax.config.update("jax_platforms", "cpu")

    def report(text: str) -> None:
        print(escape(text), flush=True)

    problems = recipe_of(parsed.config).check(parsed.config, report, **choices)
    for problem in problems:
        print(f"error: {escape(problem)}", file=sys.stderr)
    return 1 if problems else 0


def run_session(
    config: AbstractRunConfig,
    stream: TextIO,
    *,
    accept_changes: bool = False,
    named: Collection[str] = (),
    started: float | None = None,
) -> bool:
    """Start or resume training in the configured run directory. A finished run stays as it is.

    Args:
        config: training config; if `model` is None, the architecture is read from `initialize_from`.
        stream: console output.
        accept_changes: whether to resume although files that the run reads or has written were changed.
        named: dotted keys whose change is intended if the run resumes, as those given on a command line.
        started: `time.perf_counter()` at the start of the command; None for now.

    Returns:
        Whether the run is complete; False after a signal, after which another start resumes it.

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
    cluster = _required_cluster(config)
    # First, so that an error of one process ends the others, too.
    join_processes(config.trainer)
    with contextlib.ExitStack() as resources, exit_on_error():
        require_same_software()
        recipe = recipe_of(config)
        config, data = recipe.read(resolve_model(config))
        directory = RunDirectory(storage_path(config.run_dir, "run_dir"))

        def report_if_finished() -> str | None:
            progress = finished_progress(config, directory, named, accept_changes=accept_changes)
            return None if progress is None else report_finished(directory, config, progress, stream)

        if multihost.on_main(report_if_finished):
            return True
        if multihost.is_main():
            check_trackers(config.trainer.tracker)
        check_weight_files(config.initialize_from, config.run_dir, config.tokenizer.path)
        directory = _lock_on_main(directory, cluster, resources)
        require_same_config(to_yaml(config))
        require_shared_folder(directory.path)
        changes: list[Change] = []
        multihost.on_main(lambda: changes.extend(_open_directory(config, directory, named)))
        main = multihost.is_main()
        file = directory.log if main else directory.path / "processes" / f"{jax.process_index()}.txt"
        log = log_to(file, config.log_level.number, module_levels(config.logging))
        console = stream if main else resources.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        timer = PhaseTimer()
        with log, logged_errors(), explain_errors():
            with ProgressDisplay(config.num_steps, console) as display:
                open_this_run = functools.partial(recipe.open, recipe.parts, config, data)
                report = functools.partial(_report, display)
                start = Start(directory.path, report, accept_changes=accept_changes, timer=timer)
                finished = _train(open_this_run, start, directory, changes, display, started)
            if main and finished is not None:
                parts = {name: timer.seconds[name] for name in COMMAND_PARTS if name in timer.seconds}
                parts["checkpoints, the rest"] = time.perf_counter() - started - sum(parts.values())
                compiling = compile_clock().seconds - compiled
                print_and_log(display.console, directory, config, finished.progress, parts, compiling)
            return finished is not None


def _required_cluster(config: AbstractRunConfig) -> str | None:
    """Return the address of the Ray cluster that must answer, and check that Ray is installed if it is needed."""
    if (rl := as_rl(config)) is None:
        return None
    check_engine(rl.mode, rl.workers)
    return rl.ray_address if rl.is_async else None


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


def _open_directory(config: AbstractRunConfig, directory: RunDirectory, named: Collection[str]) -> list[Change]:
    """Create or open the run directory; return the changes of its config, which are not yet written."""
    changes = plan_changes(directory, config, named)
    if exported_step(directory) is not None and read_config(directory).export != config.export:
        # If this start is killed, the next one exports with the new settings.
        with writing(directory.hf):
            (directory.hf / EXPORTED_STEP).unlink(missing_ok=True)
    create_or_open(directory.path, to_yaml(config), stores_rollouts=config.samples)
    return changes


COMMAND_PARTS = ("start", "warm start", "evaluation", "steps", "export, plots")
"""Parts of a command."""


def _train(
    open_this_run: Callable[[Start], AbstractRun],
    start: Start,
    directory: RunDirectory,
    changes: Sequence[Change],
    display: ProgressDisplay,
    started: float,
) -> AbstractRun | None:
    """Train, export and plot; return the run if it is complete.

    Args:
        open_this_run: opens the run with its config and data.
        start: what this command gives.
        directory: the run directory.
        changes: changes of the config since the last start, not yet written.
        display: shows the progress.
        started: time at which the command started, of `time.perf_counter`.
    """
    report = start.report
    with contextlib.ExitStack() as closing:
        stop = closing.enter_context(stop_on_signals(report))
        try:
            with collect_rarely():
                run = open_this_run(dataclasses.replace(start, stop_requested=stop.is_set))
        except StopRequestedError:
            report("stopped before the first step, of which nothing is saved. Run the same command again to begin anew")
            return None
        closing.enter_context(Closing(run.close))
        config, timer, progress = run.config, run.command_timer, run.progress
        timer.seconds["start"] = time.perf_counter() - started - sum(timer.seconds.values())
        # Only the main process writes records.
        records = open_records(run, directory) if multihost.is_main() else None
        if records is not None:
            closing.enter_context(Closing(records.close))
            run.store_records = records.flush
        traces = directory.profile / f"process-{jax.process_index()}"
        before_step = closing.enter_context(open_profiler(config.trainer, traces))
        first_step = progress.step + 1
        before_step(first_step)

        def record(step: int, metrics: dict[str, float]) -> None:
            recorded = metrics | changed if step == first_step else metrics
            multihost.on_main(lambda: cast(StepRecords, records).record(step, recorded))
            logger.info("%s", describe_step(step, config.num_steps, metrics))
            display.update(step, metrics)
            before_step(step + 1)

        changed: dict[str, float] = {}
        # Last, because a start that fails does not change the config of the run.
        multihost.on_main(lambda: changed.update(_apply_changes(run, directory, changes, report)))
        with exempt_from_collection():
            complete = train(run, record, stop.is_set)
    if not complete:
        report(
            f"stopped after step {progress.step} of {config.num_steps}; everything is saved in "
            f"{directory.path}. Run the same command again to resume"
        )
    with timer.phase("export, plots"):
        export = functools.partial(_export, run, directory) if complete else lambda: None
        try:
            if records is not None:
                # Imported here because matplotlib takes half a second to import.
                from marin_rl.runs.curves import plot_curves

                plot_curves(directory.metrics, directory.curves)
                records.finish({"episodes": progress.episodes})
        except Exception:
            # Plots that fail do not cost the model.
            export()
            raise
        # Last, because a run with an export is complete, and is not opened again.
        export()
    return run if complete else None


def _apply_changes(
    run: AbstractRun, directory: RunDirectory, changes: Sequence[Change], report: Callable[[str], None]
) -> dict[str, float]:
    """Write and report the changes of the config; return the values changed at this step, as metrics."""
    step = run.progress.step
    history = record_changes(directory, changes, to_yaml(run.config), step)
    for change in changes:
        report(f"changed from step {step + 1} on: {change}")
    return changed_values(history, step)


def _export(run: AbstractRun, directory: RunDirectory) -> None:
    """Write the final weights in Hugging Face format, atomically."""
    policy, trainer = assemble(policy_of(run.trainer_state.model), run.base), run.learner.trainer
    weights = DeviceWeights(policy, trainer, run.config.export.numeric_dtype)
    with writing(directory.hf):
        export_folder(weights, run.tokenizer, directory.hf, run.progress.step, run.config.stop_texts)


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
    previous = {number: signal.getsignal(number) for number in stop_signals()}

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
