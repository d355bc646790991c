# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs that have started: their config, their checkpoints and their exports."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from marin_rl.config.input_files import Inputs
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.hf_export import WeightParts
from marin_rl.learner.policy_model import read_hf_architecture, save_hf_folder
from marin_rl.learner.starting_weights import hf_folder, is_hub_name, tokenizer_of
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.run_directory import (
    ADAPTER_CONFIG,
    EXPORTED_STEP,
    RunDirectory,
    open_with_checkpoint,
    own_rows,
    read_config_text,
)
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.sessions.recipes import as_rl, config_class
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.training.run_state import warn_of_changed_inputs
from marin_rl.utils import multihost
from marin_rl.utils.errors import USER_ERRORS, RunDirectoryError
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, parse_yaml
from marin_rl.utils.storage import StoragePath, replace_folder, storage_path, upload_folder

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=AbstractRunConfig)

MARKERS = ("config.json", ADAPTER_CONFIG)
"""Files that are written last, so that an export in an object store is complete if it has one."""


def read_config(directory: RunDirectory) -> AbstractRunConfig:
    """Read the config of an earlier run, whose keys determine the class.

    Raises:
        ConfigError: if it is invalid; the message names the file.
    """
    text, name = read_config_text(directory), str(directory.config)
    try:
        return _with_own_rows(from_yaml(config_class(parse_yaml(text, name)), text, name), directory)
    except ConfigError as error:
        if not any("unknown key" in problem or "is not one of its types" in problem for problem in error.problems):
            raise
        remedy = (
            "these keys or types are of another version of marin_rl or levanter; use the version that wrote the run, "
            "which checkpoints/*/run_files.json names, or start another run with --run_dir NEW"
        )
        raise ConfigError(*error.problems, remedy) from error


def _with_own_rows(config: AbstractRunConfig, directory: RunDirectory) -> AbstractRunConfig:
    """Name the rows in the run directory where it is now: it may have been moved."""
    source: Any = getattr(config, config.source_key)
    if getattr(source, "path", None) != own_rows(config.run_dir):
        return config
    moved = dataclasses.replace(source, path=own_rows(str(directory.path)))
    return dataclasses.replace(config, **{config.source_key: moved})


def require_rl(config: AbstractRunConfig, run: str, purpose: str) -> TrainConfig:
    """Return the config of an earlier run if it is one of RL.

    Args:
        config: config of the run.
        run: run directory, for the message.
        purpose: what is not possible with another run, for the message.

    Raises:
        RunDirectoryError: if the run is one of supervised training.
    """
    if (rl := as_rl(config)) is not None:
        return rl
    raise RunDirectoryError(
        f"{run!r} is a run of marin_rl.{config.command}, which has no environment and no rollouts, so "
        f"{purpose}; serve it with python -m marin_rl.serve --run, or start RL from it with initialize_from"
    )


def resolve_model(config: ConfigT) -> ConfigT:
    """Read `model` and `tokenizer.path` from the starting weights if they are not set; check a `model` that is.

    A run that was started with `model` set resumes from its checkpoints and does not read `initialize_from` again. One
    that was started without reads architecture and tokenizer in its directory if the starting weights are gone.

    Returns:
        The config with `model` set, unless both `model` and `initialize_from` are None, and with the path of the
        tokenizer if there is an `initialize_from`.

    Raises:
        HubError: if `initialize_from` is neither a folder nor the name of a repository that can be loaded.
        PolicyModelError: if `initialize_from` cannot be loaded, or differs from `model`.
        TokenizerLoadError: if `initialize_from` has no tokenizer and `tokenizer.path` is not set.
        ValueError: if `initialize_from` is the directory of an unfinished run, or does not fit the config.
    """
    if config.initialize_from is None:
        return config
    directory, recorded, model = RunDirectory(storage_path(config.run_dir)), None, config.model
    if model is None or not directory.config.exists():
        try:
            model = read_hf_architecture(hf_folder(config.initialize_from), model)
        except USER_ERRORS:
            # They may be deleted when the run has a checkpoint.
            if not _has_checkpoint(directory):
                raise
            recorded = read_config(directory)
            model = recorded.model
    path = config.tokenizer.path
    if path is None:
        # A hub name needs no access to the run directory; see `check_weight_files`.
        if recorded is None and (config.model is not None or not is_hub_name(config.initialize_from)):
            recorded = read_config(directory) if _has_checkpoint(directory) else None
        path = tokenizer_of(config.initialize_from) if recorded is None else recorded.tokenizer.path
    tokenizer = dataclasses.replace(config.tokenizer, path=path)
    return dataclasses.replace(config, model=config.model or model, tokenizer=tokenizer)


def _has_checkpoint(directory: RunDirectory) -> bool:
    return directory.config.exists() and any(directory.checkpoints.glob("step-*"))


def load_run(run: str, step: int | None) -> tuple[AbstractRunConfig, Checkpoints]:
    """Return the config and the checkpoints of an earlier run, whose directory is not changed.

    Args:
        run: run directory, a path or an address.
        step: step of a checkpoint that must exist; None for any.

    Raises:
        RunDirectoryError: if the run does not exist.
        CheckpointError: if it has no such checkpoint.
    """
    directory = open_with_checkpoint(run, step)
    config = read_config(directory)
    return config, Checkpoints(directory.checkpoints, config.checkpoint)


def restore_checkpoint(
    checkpoints: Checkpoints, step: int | None, inputs: Inputs, restore: Callable[[Checkpoint], T]
) -> tuple[int, T]:
    """Load a part of a checkpoint, and warn of changed inputs; see `open_with_checkpoint`.

    Args:
        checkpoints: checkpoints of the run.
        step: step of the checkpoint; None for the newest one that is not damaged.
        inputs: checksums of the inputs that the command reads.
        restore: loads the part.

    Returns:
        The step, and the part.
    """

    def load(checkpoint: Checkpoint) -> tuple[int, T]:
        warn_of_changed_inputs(checkpoint, inputs)
        return checkpoint.step, restore(checkpoint)

    restored = checkpoints.restore_newest(load) if step is None else load(checkpoints.open(step))
    assert restored is not None
    return restored


def export_folder(
    weights: WeightParts, tokenizer: ChatTokenizer, output: StoragePath, step: int, stop: Sequence[str] = ()
) -> None:
    """Write a policy in Hugging Face format, in place of a former export; collective over all processes.

    Args:
        weights: weights of the policy.
        tokenizer: its tokenizer.
        output: the folder. One in an object store is written to a temporary folder of the main host and uploaded.
        step: step of the weights, stored in `training_step.json`.
        stop: texts that end a generation.

    Raises:
        OSError: if it cannot be written.
    """
    replace_export(output, step, lambda folder: save_hf_folder(weights, tokenizer, folder, stop))


def replace_export(output: StoragePath, step: int, save: Callable[[Path], None]) -> None:
    """Replace an export by what `save` writes to a folder; arguments and errors are those of `export_folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        partial = output.with_name(f".{output.name}.partial") if isinstance(output, Path) else Path(temporary)
        if multihost.is_main():
            shutil.rmtree(partial, ignore_errors=True)
        save(partial)
        multihost.on_main(lambda: _publish(output, partial, step))


def _publish(output: StoragePath, partial: Path, step: int) -> None:
    (partial / EXPORTED_STEP).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    if isinstance(output, Path):
        replace_folder(output, partial)
    else:
        upload_folder(output, partial, next(name for name in MARKERS if (partial / name).exists()))
