# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Folders of checkpoints and their steps, without jax and levanter, which take seconds to import."""

from marin_rl.utils.errors import UserError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import StoragePath

MANIFEST = "manifest.json"


class CheckpointError(UserError):
    """A checkpoint cannot be written or read; the message names the folder and the problem."""


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
