# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Options that the commands of servers share."""

from pathlib import Path

from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.fields import local_path
from marin_rl.utils.storage import storage_path


def check_source(run: str | None, step: int | None, model: str | None) -> None:
    """Check the options that name the weights, without a look at their files.

    Raises:
        ValueError: unless one of `run` and `model` is given, and is a usable path; also if a model has a step.
    """
    if run is not None and model is None:
        storage_path(run, "run")
    elif model is not None and run is None:
        local_path(model, "model")
    else:
        raise ValueError("give either run (a run directory) or model (a folder in Hugging Face format)")
    if step is not None and run is None:
        raise ValueError(f"step is {step}, but only a run has steps; give run, or omit step")


def require_model(model: str | None) -> None:
    """Raise `UserError` unless `model` is a folder."""
    if not Path(str(model)).is_dir():
        raise UserError(f"--model is {model!r}, which is not a folder; give a folder in Hugging Face format")
