# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Files of a run, in one folder.

```
config.yaml     resolved config with all defaults
metrics.jsonl   one JSON object per step
rollouts/       sampled rollouts
checkpoints/    training state for resuming
tokens.arrow    tokenized rows of supervised training
rows.jsonl      rows that a Python program gave
hf/             trained model in Hugging Face format
log.txt         log messages
curves.png      plots of reward, accuracy and other metrics
profile/        traces of the devices and the host, with `trainer.profiler`
```
"""

import dataclasses
import io
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from marin_rl.utils.errors import RunDirectoryError, UserError, nearest
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.settings.checks import ConfigSection
from marin_rl.utils.settings.fields import flatten, is_within
from marin_rl.utils.settings.yaml_text import MAX_YAML_BYTES, parse_yaml
from marin_rl.utils.storage import StoragePath, check_small, read_small, storage_path, write_bytes, writing

EXPORTED_STEP = "training_step.json"
"""File in `hf/` with the step of the weights."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of an adapter in the format of PEFT."""
MANIFEST = "manifest.json"
"""File of a checkpoint that is written last."""
ROWS = "rows.jsonl"
"""File with the rows that a Python program gave."""
OWN_NAMES = frozenset(
    [
        *("config.yaml", "metrics.jsonl", "rollouts", "checkpoints", "hf", "log.txt", "curves.png", "profile"),
        *("tokens.arrow", "processes", "workers", "job.json", ROWS, ".lock"),
    ]
)
"""Names in a run directory that runs write."""
_HEAD_BYTES = 4096
"""Bytes at the start of a file in which its mark is looked for."""


class OutputExistsError(UserError):
    """A command would overwrite what it did not write; the message names the setting, the path and the reason."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or read; the message names the folder and the problem."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(ConfigSection):
    """When to save checkpoints, and which ones to keep."""

    every: Annotated[int, Ge(0)] = 50
    """Steps between checkpoints; the last step is always saved. 0 saves only the last step."""
    keep_last: Annotated[int, Ge(2), "one to fall back to"] = 2
    """Number of newest checkpoints to keep: an undamaged one remains if the newest is damaged."""
    keep_every: Annotated[int, Ge(0)] = 0
    """Keep the checkpoints of all steps divisible by this number; 0 keeps only the last `keep_last`."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Paths of the files of a run."""

    path: StoragePath
    """The run directory."""

    @property
    def config(self) -> StoragePath:
        """Resolved config."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> StoragePath:
        """Metrics, one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> StoragePath:
        """Folder of sampled rollouts."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> StoragePath:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def hf(self) -> StoragePath:
        """Folder of the trained model in Hugging Face format."""
        return self.path / "hf"

    @property
    def log(self) -> StoragePath:
        """Log messages."""
        return self.path / "log.txt"

    @property
    def curves(self) -> StoragePath:
        """Plots of the metrics."""
        return self.path / "curves.png"

    @property
    def profile(self) -> StoragePath:
        """Folder of traces of the devices and the host."""
        return self.path / "profile"

    def has_results(self) -> bool:
        """Return whether a start of the run has written records or a checkpoint."""
        return self.metrics.exists() or any(self.checkpoints.glob("step-*"))


def own_rows(run_dir: str | Path) -> str:
    """Return the path of the rows in a run directory, as a config has it."""
    return str(storage_path(str(run_dir), "run_dir") / ROWS)


def create_or_open(path: StoragePath, config_yaml: str, *, stores_rollouts: bool = True) -> RunDirectory:
    """Create a run directory, or open the directory of the same run.

    The caller has compared the configs; see [`plan_changes`][marin_rl.sessions.config_changes.plan_changes].

    Args:
        path: the run directory.
        config_yaml: resolved config; it replaces that of an earlier start without results. The config of a run with
            results stays, because this start may still fail; `record_changes` replaces it.
        stores_rollouts: whether the run has a folder of rollouts.

    Raises:
        RunDirectoryError: if the directory contains a run without a config, or cannot be written.
    """
    directory = RunDirectory(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        old_yaml = require_config(directory)
        for folder in (directory.checkpoints, *([directory.rollouts] if stores_rollouts else [])):
            folder.mkdir(exist_ok=True)
    if old_yaml != config_yaml and not directory.has_results():
        write_atomically(directory.config, config_yaml)
    return directory


def require_config(directory: RunDirectory) -> str | None:
    """Return the config in a run directory, and check that it is that of an earlier start.

    Returns:
        The text; None if there is none.

    Raises:
        RunDirectoryError: if there are results without a config, or a config that a run has not written or that cannot
            be read.
    """
    if not directory.config.exists():
        if directory.has_results():
            raise RunDirectoryError(
                f"run directory {str(directory.path)!r} contains a run without config.yaml, so its config is unknown; "
                "restore the file, or choose another run_dir"
            )
        return None
    text = read_config_text(directory)
    # A start creates this folder before its config. Object stores have no empty folders.
    if isinstance(directory.checkpoints, Path) and not directory.checkpoints.exists():
        raise RunDirectoryError(
            f"run directory {str(directory.path)!r} contains a config.yaml, but no run, and the run would overwrite "
            "this file; rename it, or choose another run_dir"
        )
    return text


def check_output(path: StoragePath, setting: str, mark: bytes | None = None) -> None:
    """Check that a command may write a path that the user names: no command overwrites what it did not write.

    Args:
        path: the file or folder.
        setting: the setting of the path, such as `--html`.
        mark: text at the start of every file of this kind that the command writes, so that it may write the file
            again; None if it writes a folder, which may exist if it is empty.

    Raises:
        OutputExistsError: if something else is there (also a link, with or without its target), if a folder above is
            a file, or if runs write the path themselves.
    """
    if problem := _output_problem(path, mark):
        kind = "folder" if mark is None else "file"
        raise OutputExistsError(f"{setting} is {str(path)!r}, {problem} and is not replaced; name another {kind}")


def _output_problem(path: StoragePath, mark: bytes | None) -> str:
    if isinstance(path, RemotePath):
        return _problem_of_run(path) or ("which exists" if path.exists() and not _has_mark(path, mark) else "")
    if path.name in ("", ".."):
        return "which is no name of its own"
    if path.is_symlink():
        return "which is a link"
    if problem := _problem_of_run(Path(os.path.realpath(path))):
        return problem
    if os.path.lexists(path):
        is_empty = mark is None and path.is_dir() and not any(path.iterdir())
        return "" if is_empty or _has_mark(path, mark) else "which exists"
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    return "" if above.is_dir() else f"but {str(above)!r} is not a folder"


def _has_mark(path: StoragePath, mark: bytes | None) -> bool:
    if mark is None or not path.is_file():
        return False
    with path.open("rb") if isinstance(path, Path) else io.BytesIO(path.read_bytes()) as file:
        return mark in file.read(_HEAD_BYTES)


def _problem_of_run(path: StoragePath) -> str:
    while path.parent != path:
        run = RunDirectory(path.parent)
        if path.name in OWN_NAMES and run.config.is_file() and run.checkpoints.exists():
            return f"which the run in {str(run.path)!r} writes itself"
        path = path.parent
    return ""


def comments_of(config_yaml: str) -> str:
    """Return the comments at the top of a config, such as its history, with the empty lines among them."""
    lines = config_yaml.splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("#") or line.isspace(), lines))


def exported_step(directory: RunDirectory) -> int | None:
    """Return the step whose weights are in `hf/`, None if they are absent or of an unknown step."""
    try:
        if not (directory.hf / "config.json").is_file():
            return None
        return int(json.loads(read_small(directory.hf / EXPORTED_STEP))["step"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def open_existing(path: StoragePath) -> RunDirectory:
    """Open the directory of an earlier run.

    Raises:
        RunDirectoryError: if the path is not a run directory.
    """
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise RunDirectoryError(f"{str(path)!r} is not a run directory: {_reason(path)}")
    return directory


def open_with_checkpoint(run: str, step: int | None) -> RunDirectory:
    """Open the directory of an earlier run that has a checkpoint.

    Args:
        run: run directory, a path or an address.
        step: step of the checkpoint; None for any.

    Raises:
        RunDirectoryError: if the run does not exist.
        CheckpointError: if it has no such checkpoint.
    """
    directory = open_existing(storage_path(run, "run"))
    require_checkpoint(run, directory.checkpoints, step)
    return directory


def folder_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step-{step:08d}"


def step_of(path: StoragePath) -> int | None:
    """Parse the step from a checkpoint folder's name; None if the name has another format."""
    digits = path.name.removeprefix("step-")
    is_name = digits.isascii() and digits.isdecimal() and path.name == folder_name(int(digits))
    return int(digits) if is_name else None


def is_committed(path: StoragePath) -> bool:
    """Whether the save was not interrupted; locally the name itself tells."""
    return not isinstance(path, RemotePath) or (path / MANIFEST).is_file()


def list_steps(folder: StoragePath) -> list[int]:
    """Return the steps of all checkpoints, damaged ones included, oldest first; ignores names such as `step-1`."""
    steps = [(step_of(path), path) for path in folder.glob("step-*")]
    return sorted(step for step, path in steps if step is not None and is_committed(path))


def require_checkpoint(run: str, folder: StoragePath, step: int | None) -> None:
    """Check that a run has a checkpoint.

    Args:
        run: the run, for the error message.
        folder: folder of its checkpoints.
        step: step of the checkpoint; None for any.

    Raises:
        CheckpointError: if it has none.
    """
    steps = list_steps(folder)
    if steps and step is not None and step not in steps:
        raise CheckpointError(f"run {run!r} has no checkpoint of step {step}; it has {steps}; give one of these")
    if not steps:
        raise CheckpointError(
            f"run {run!r} has no checkpoint yet; it saves one every checkpoint.every steps, and at its last step"
        )


def mistaken_for(path: StoragePath) -> str | None:
    """Say what a path is that is no run directory or no model, with the option that takes it; None if unknown."""
    for run in map(RunDirectory, (path, path.parent, path.parent.parent)):
        if run.config.is_file() and run.has_results():
            if run.path == path:
                return "it is a run directory; give it as --run"
            step = "" if step_of(path) is None else f" --step {step_of(path)}"
            return f"it is a part of a run; give --run {str(run.path)!r}{step}"
    if (path / ADAPTER_CONFIG).is_file():
        return "it is an adapter, not a whole model; give its run as --run, or export that without --adapter"
    if (path / "config.json").is_file():
        return "it is a model in Hugging Face format; give it as --model, which serve, tinker and chat have"
    if isinstance(path, Path) and path.is_symlink() and not path.exists():
        return f"it is a link to {str(path.readlink())!r}, which does not exist"
    return None


def _reason(path: StoragePath) -> str:
    """Explain why a path is not a run directory, with the run directories that may be meant."""
    if (mistake := mistaken_for(path)) is not None:
        return mistake
    reason, remedy = "it has no config.yaml" if path.exists() else "it does not exist", "give the run_dir of a run"
    if isinstance(path, Path):
        folder = path if path.is_dir() else path.parent
        if runs := sorted(str(config.parent) for config in folder.glob("*/config.yaml")):
            remedy = nearest(str(path), runs, heading=f"Run directories in {str(folder)!r}")
    return f"{reason}; {remedy}"


def read_config_text(directory: RunDirectory) -> str:
    """Read the resolved config of a run directory.

    Raises:
        RunDirectoryError: if it cannot be read, or is not UTF-8 text.
    """
    try:
        if not directory.config.is_file():
            raise OSError("it is not a file")
        if isinstance(directory.config, Path):
            check_small(directory.config, MAX_YAML_BYTES)
        return directory.config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunDirectoryError(
            f"cannot read {str(directory.config)!r}: {reason}; repair the file, or choose another run_dir"
        ) from error


def config_differences(
    old_yaml: str, new_yaml: str, may_differ: Sequence[str], name: str = "the config of the main process"
) -> list[str]:
    """List the differences between two resolved configs.

    Args:
        old_yaml: the existing config.
        new_yaml: the new config.
        may_differ: dotted keys or sections to ignore.
        name: name of the existing config, for the error message if it is not valid YAML.

    Returns:
        A line for each key that differs.
    """
    old, new = flatten(parse_yaml(old_yaml, name)), flatten(parse_yaml(new_yaml, "the new config"))
    return [
        f"  {key}: {show_value(old, key)} there, {show_value(new, key)} now"
        for key in differing_keys(old, new)
        if not is_within(key, may_differ)
    ]


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys that only one of two flat mappings has, or that have other values."""
    return [key for key in dict.fromkeys([*old, *new]) if key not in old or key not in new or old[key] != new[key]]


def show_value(values: Mapping[str, Any], key: str) -> str:
    """Format the value of a key as JSON, or as `not set`."""
    return json.dumps(values[key], default=str) if key in values else "not set"


def write_atomically(path: StoragePath, data: str | bytes) -> None:
    """Write a file atomically: after a crash, the file is either the old one or complete.

    Args:
        path: the file.
        data: complete content; text is encoded as UTF-8.

    Raises:
        RunDirectoryError: if the file cannot be written; an existing file is not changed.
    """
    with writing(path):
        write_bytes(path, data.encode() if isinstance(data, str) else data)
