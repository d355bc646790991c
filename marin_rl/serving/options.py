# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Options that the commands of servers share."""

import os
from pathlib import Path

from marin_rl.runs.run_directory import mistaken_for
from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.fields import is_loopback, local_path, read_api_key
from marin_rl.utils.storage import storage_path

CALL_SECONDS = 0.1
"""Time after which a server's sampler accepts further requests, and returns the next tokens of streams."""
_DEFAULT_CONTEXT = 4096


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
    """Raise `UserError` unless `model` is a folder with a model."""
    path = Path(str(model))
    if (path / "config.json").is_file():
        return
    reason = mistaken_for(path)
    if reason is None:
        kind = "has no config.json" if path.is_dir() else "is not a folder"
        reason = f"which {kind}; give a folder in Hugging Face format"
    raise UserError(f"--model is {model!r}, {reason.removeprefix('it is ')}")


def read_key(host: str, variable: str, form: str = "a secret key") -> str | None:
    """Return the API key that clients must send; None if clients need none.

    Args:
        host: address of the server.
        variable: environment variable with the key.
        form: what the key must be, for the error message.

    Raises:
        UserError: if the variable is not set, and other machines can reach the server.
        ValueError: if the key has characters that clients cannot send.
    """
    if os.environ.get(variable):
        return read_api_key(variable)
    if is_loopback(host):
        return None
    raise UserError(
        f"host is {host!r}, which other machines can reach, but {variable} is not set; set it to {form}, or use host "
        "127.0.0.1"
    )


def choose_context(max_context: int | None, positions: int, default: int | None = None) -> int:
    """Return the maximum number of tokens of a sequence.

    Args:
        max_context: the option; None for `default`.
        positions: number of the model's positions.
        default: None for `positions`, up to 4,096.

    Raises:
        UserError: if it exceeds `positions`.

    >>> choose_context(None, 2048), choose_context(None, 8192), choose_context(5000, 8192), choose_context(None, 64, 12)
    (2048, 4096, 5000, 12)
    """
    context = max_context or default or min(positions, _DEFAULT_CONTEXT)
    if context > positions:
        raise UserError(f"--max_context is {context}, but the model has {positions} positions; use at most that many")
    return context
