# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Options of the servers and of the chat, without the packages that serve."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from marin_rl.runs.run_directory import mistaken_for
from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import is_loopback, local_path, read_api_key
from marin_rl.utils.storage import storage_path

CALL_SECONDS = 0.1
"""Time after which a server's sampler accepts further requests, and returns the next tokens of streams."""
_DEFAULT_CONTEXT = 4096


@dataclasses.dataclass(frozen=True)
class ServeConfig(ConfigSection):
    """A server for the policy of a run, or for a model in Hugging Face format."""

    run: str | None = None
    """Run directory whose policy is served, with the run's tokenizer and sampling limits; the server changes no file in
    it."""
    step: int | None = None
    """Step of the run's checkpoint; the newest valid checkpoint by default."""
    model: str | None = None
    """Folder in Hugging Face format, instead of `run`."""
    name: str | None = None
    """Name of the model in requests; the name of the folder by default."""
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach requires an API key."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port to listen on; 0 for any free one."""
    api_key_env: str = "MARIN_RL_API_KEY"
    """Environment variable with the API key. If it is not set, requests need no key."""
    max_seqs: Annotated[int, Ge(1)] | None = None
    """Number of sequences that are decoded together; null: `sampling.max_seqs` of the run, or 64."""
    max_context: Annotated[int, Ge(2)] | None = None
    """Maximum number of prompt and new tokens of a sequence, at most the model's positions; null:
    `rollouts.max_length` of the run, or the model's positions up to 4,096."""
    max_new_tokens: Annotated[int, Ge(1)] | None = None
    """Maximum number of new tokens of a sequence; null: `sampling.max_new_tokens` of the run, or all that fit."""
    score_prompts: bool = False
    """Whether requests with `echo` and `max_tokens: 0` get the log-probabilities of their prompts, as a teacher of
    other runs needs. It keeps a second copy of the weights, and compiles another program."""
    max_choices: Annotated[int, Ge(1)] = 128
    """Maximum number of sequences of a request: prompts times `n`."""
    max_sequences: Annotated[int, Ge(1)] = 1024
    """Maximum number of sequences in progress and waiting; further requests get status 429."""
    max_body_bytes: Annotated[int, Ge(1)] = 4 * 2**20
    """Maximum size of a request's body."""
    client_seconds: Annotated[float, Gt(0), Lt(10**6)] = 60.0
    """Seconds after which a client is disconnected that does not send the body of its request (it gets status 408), or
    does not read its response (on Linux); one that does not send the head, after at most twice as many."""
    drain_seconds: Annotated[float, Gt(0), Lt(10**6)] = 60.0
    """Seconds that requests in progress have after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_source(self.run, self.step, self.model)


@dataclasses.dataclass(frozen=True)
class TinkerConfig(ConfigSection):
    """A server of the Tinker protocol, which trains one model at a time for the loops of other packages."""

    model: str | None = None
    """Folder of the base model in Hugging Face format, such as the `hf` of a run."""
    run: str | None = None
    """Run directory whose policy is the base, instead of `model`. The first start exports it to `base` in `folder`, and
    later starts use this export, whatever became of the run."""
    step: int | None = None
    """Step of the run's checkpoint; the newest valid checkpoint by default."""
    names: tuple[str, ...] = ()
    """Further names of the model for clients, such as one that decides about a recipe's chat format. `model` is always
    one; so are `run` and the absolute path of its export."""
    folder: str = "runs/tinker"
    """Folder of checkpoints, `log.txt`, and what a restart needs. A server that is started again with it goes on."""
    host: str = "127.0.0.1"
    """Address to listen on. One that other machines can reach requires an API key."""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """Port to listen on; 0 for any free one."""
    api_key_env: str = "MARIN_RL_TINKER_KEY"
    """Environment variable with the API key, which clients have in `TINKER_API_KEY` and which begins with `tml-`. If it
    is not set, any key is accepted."""
    max_context: Annotated[int, Ge(2)] | None = None
    """Maximum number of tokens of a sequence; null: the model's positions, up to 4,096."""
    max_seqs: Annotated[int, Ge(1)] = 64
    """Number of samples that are decoded together."""
    client_seconds: Annotated[float, Gt(0), Lt(10**6)] = 60.0
    """Seconds after which a client is disconnected that does not send the rest of a request."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_source(self.run, self.step, self.model)
        local_path(self.folder, "folder")


@dataclasses.dataclass(frozen=True)
class ChatConfig(ConfigSection):
    """A chat with the policy of a run, or with a model in Hugging Face format. Each line of the input is a message."""

    run: str | None = None
    """Run directory whose policy answers, with the run's tokenizer and sampling limits; no file in it is changed."""
    step: int | None = None
    """Step of the run's checkpoint; the newest valid checkpoint by default."""
    model: str | None = None
    """Folder in Hugging Face format, instead of `run`."""
    system: str = ""
    """System prompt; empty for none."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Sampling temperature; 0 is greedy. Null: `sampling.temperature` of the run, or 1."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """Maximum number of tokens of a reply; null: `sampling.max_new_tokens` of the run, or all that fit."""
    max_context: Annotated[int, Ge(2)] | None = None
    """Maximum number of tokens of the conversation, at most the model's positions; null: `rollouts.max_length` of the
    run, or the model's positions up to 4,096."""
    seed: Annotated[int, Ge(0)] = 0
    """The same messages with the same seed get the same replies."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_source(self.run, self.step, self.model)
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}")


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
