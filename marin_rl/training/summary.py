# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Summary of a complete run, after its last step and when it is started again."""

import io
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TextIO

from rich.console import Console

from marin_rl.config.train_config import TrainConfig
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.metrics_file import read_records
from marin_rl.runs.run_directory import CheckpointError, RunDirectory, exported_step, folder_name
from marin_rl.runs.saved_checkpoint import read_manifest
from marin_rl.training.config_changes import plan_changes
from marin_rl.training.console import Compiling, ProgressDisplay, print_closing_table
from marin_rl.training.run_state import Progress
from marin_rl.training.starting_weights import read_config
from marin_rl.utils.errors import writing

logger = logging.getLogger(__name__)

LOG_WIDTH = 100
"""Characters of a line of a table in the log."""


def say_finished(
    config: TrainConfig, directory: RunDirectory, stream: TextIO, named: Collection[str], *, accept_changes: bool
) -> str | None:
    """Print the results of a run that is complete, and return that; None if it is not complete. Changes no file."""
    progress = finished_progress(config, directory, named, accept_changes=accept_changes)
    if progress is None:
        return None
    message = (
        f"the run in {str(directory.path)!r} is complete after step {progress.step}, and nothing is changed. To make "
        f"it longer, add --num_steps N with N above {progress.step} to the command"
    )
    display = ProgressDisplay(config.num_steps, stream)
    display.say(message)
    summary_of(directory, progress, {})(display.console)
    return message


def finished_progress(
    config: TrainConfig, directory: RunDirectory, named: Collection[str], *, accept_changes: bool
) -> Progress | None:
    """Return the progress of a run that is complete, so that another start does nothing; None if it is not."""
    with writing(directory.path):
        if accept_changes or not directory.config.is_file() or plan_changes(directory, config, named):
            return None
        steps = Checkpoints(directory.checkpoints, config.checkpoint).steps()
        progress = _last_progress(directory, config.num_steps) if steps[-1:] == [config.num_steps] else None
        return None if progress is None or read_config(directory).export != config.export else progress


def _last_progress(directory: RunDirectory, step: int) -> Progress | None:
    """Return the progress in the checkpoint of the last step of a run, None if the run is not complete and exported."""
    last = directory.checkpoints / folder_name(step)
    if exported_step(directory) != step:
        return None
    if not any(directory.hf.glob("*.safetensors")):
        return None
    try:
        progress = Progress(**read_manifest(last).progress)
    except (CheckpointError, TypeError):
        # The run is opened, which explains it.
        return None
    return None if progress.unrecorded else progress


def summary_of(
    directory: RunDirectory, progress: Progress, command: Mapping[str, float], compiling: float = 0.0
) -> Callable[[Console], None]:
    """Return a function that prints the summary of a complete run.

    Args:
        directory: run directory.
        progress: counts and evaluations.
        command: seconds of this command by part; empty if it has not trained.
        compiling: seconds of this command in which programs were compiled.
    """
    records = read_records(directory.metrics)
    prefix = "seconds/"
    names = dict.fromkeys(name for name in itertools.chain(*records) if name.startswith(prefix))
    seconds = {name.removeprefix(prefix): sum(record.get(name, 0.0) for record in records) for name in names}
    seconds.pop("total", None)
    compilation = Compiling(seconds.pop("compile", 0.0), compiling)
    totals = {"updates": progress.updates, "rollouts": progress.episodes, "tokens sampled": progress.sampled_tokens}
    return lambda console: print_closing_table(
        console, directory.path, progress.evaluations, seconds, totals, command, compilation
    )


def print_and_log(console: Console, print_to: Callable[[Console], None]) -> None:
    """Print a summary to the console, and write its lines to the log."""
    print_to(console)
    text = io.StringIO()
    print_to(Console(file=text, width=LOG_WIDTH, highlight=False))
    for line in filter(str.strip, text.getvalue().splitlines()):
        logger.info("%s", line.rstrip())
