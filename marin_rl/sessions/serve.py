# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The servers of both protocols and the chat, without levanter until they load the weights."""

import contextlib
import functools
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.serving.options import CALL_SECONDS, ChatConfig, ServeConfig, TinkerConfig, read_key, require_model
from marin_rl.utils.errors import UserError
from marin_rl.utils.logs import log_to
from marin_rl.utils.output import escape_line, go_on_without_output
from marin_rl.utils.user_code import require_extra

if TYPE_CHECKING:
    from marin_rl.serving.http_server import HttpServer, Worker
    from marin_rl.sessions.served_policy import Policy

CHAT_CALL_SECONDS = 0.05
"""Time after which the next tokens of a reply are printed, about."""


def serve(config: ServeConfig) -> None:
    """Load a policy and serve it over OpenAI's protocol until a signal.

    Raises:
        UserError: if a package is missing, the key that a public address requires, or the folder `model`.
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        ValueError: if the address is not available. See `load_served_policy` for further errors.
    """
    with _listening(config, "serve", "a secret key") as (listener, url, key):
        source = _announce(config)
        from marin_rl.serving.http_server import HttpServer
        from marin_rl.serving.openai.app import Server
        from marin_rl.serving.openai.engine import Engine
        from marin_rl.serving.openai.protocol import RequestLimits

        policy = _open_policy(config, config.max_seqs, config.max_new_tokens, CALL_SECONDS, config.score_prompts)
        limits = RequestLimits(
            max_context=policy.max_context,
            max_new_tokens=policy.sampling.max_new_tokens,
            max_choices=config.max_choices,
            vocab_size=policy.vocab_size,
            stop_token_ids=frozenset(policy.tokenizer.stop_token_ids),
            longest_token=policy.tokenizer.longest_token,
            has_stop_texts=bool(policy.sampling.stop),
        )
        engine = Engine(policy.sampler, policy.tokenizer.decode_reply)
        server = Server(
            engine,
            policy.tokenizer,
            limits,
            model=config.name or Path(source).resolve().name,
            key=key,
            max_sequences=config.max_sequences,
            max_body_bytes=config.max_body_bytes,
            client_seconds=config.client_seconds,
            score=policy.score,
        )
        line = (
            f"serving {escape_line(server.model)} at {url}/v1 ({policy.max_context} tokens of context, "
            f"{policy.sampler.batch_size} sequences together, {'with' if key else 'no'} API key)"
        )
        _run(HttpServer(server.app(), config.client_seconds, config.drain_seconds), engine, listener, line)


def serve_training(config: TinkerConfig) -> None:
    """Load a base model and serve its training over the Tinker protocol until a signal.

    Raises:
        UserError: if a package is missing, the key that a public address requires, or the folder `model`; also if
            `folder` belongs to another server or another base.
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        PolicyModelError: if the model cannot be loaded.
        ValueError: if the address is not available.
    """
    folder = Path(config.folder)
    with _listening(config, "tinker", "a secret key that begins with tml-") as (listener, url, key):
        # A run may be gone that was exported.
        source = _announce(config, checks_run=False)
        from marin_rl.serving.http_server import HttpServer
        from marin_rl.serving.tinker.checkpoints import ServedModel
        from marin_rl.serving.tinker.endpoints import TinkerApp
        from marin_rl.serving.tinker.service import Service
        from marin_rl.serving.tinker.trainer import open_trainer
        from marin_rl.sessions.run_export import export_once

        names, weights = (source,), Path(source).absolute()
        if config.run is not None:
            weights = (folder / "base").absolute()
            step = export_once(config.run, config.step, weights)
            names = source, str(weights)
            source = f"step {step} of {source}"
        with log_to(folder / "log.txt"):
            trainer = open_trainer(str(weights), max_context=config.max_context, max_seqs=config.max_seqs)
            base = ServedModel(
                (*names, *config.names), trainer.base_fingerprint, trainer.max_context, tokenizer=str(weights)
            )
            service = Service(trainer, folder, base)
            service.thread.on_step = functools.partial(print, flush=True)
            app = TinkerApp(service, base, key=key, client_seconds=config.client_seconds)
            line = (
                f"serving {escape_line(source)} to clients of Tinker at {url} ({trainer.max_context} tokens of "
                f"context, {'with' if key else 'any'} API key)"
            )
            _run(HttpServer(app.app(), config.client_seconds), service, listener, line)


def chat(config: ChatConfig) -> None:
    """Load a policy, and answer the lines of standard input until its end or `/quit`.

    Raises:
        UserError: if standard input is closed, the folder `model` does not exist, or `max_context` exceeds the model's
            positions.
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        SamplerError: if the policy has no valid probabilities.
    """
    if sys.stdin is None:
        raise UserError("standard input, which has the messages, is closed; leave it open, or give a file or a pipe")
    source = _announce(config)
    from marin_rl.serving.chat import TerminalChat, input_lines

    policy = _open_policy(config, 1, config.max_tokens, CHAT_CALL_SECONDS, note="; this can take minutes")
    temperature = policy.sampling.temperature if config.temperature is None else config.temperature
    has_history = policy.max_turns != 1
    history = "" if has_history else "each line begins a new conversation, as in training (rollouts.max_turns: 1); "
    _note(
        f"chat with {source} (step {policy.sampler.version}, {policy.max_context} tokens of context, temperature "
        f"{temperature:g}); {history}/help lists the commands"
    )
    terminal = TerminalChat(
        policy.sampler,
        policy.tokenizer,
        policy.max_context,
        policy.sampling.max_new_tokens,
        temperature,
        config.system,
        config.seed,
        has_history,
    )
    terminal.run(input_lines())


@contextlib.contextmanager
def _listening(
    config: ServeConfig | TinkerConfig, extra: str, form: str
) -> Iterator[tuple[socket.socket, str, str | None]]:
    """Open the socket of a server; yield it with its URL and the API key, whose `form` error messages name."""
    require_extra(extra, f"marin_rl.{extra}")
    # Imported here because the extra is optional.
    from marin_rl.serving.http_server import listen, url_of

    key = read_key(config.host, config.api_key_env, form)
    # Before the weights are loaded, which may take minutes.
    go_on_without_output()
    with listen(config.host, config.port, config.client_seconds) as listener:
        yield listener, url_of(listener), key


def _announce(config: ServeConfig | TinkerConfig | ChatConfig, *, checks_run: bool = True) -> str:
    """Check that the weights exist, report that they are loaded, and return the path of their run or model.

    Levanter is imported after it, because it takes seconds, and most mistakes can be reported without it.
    """
    if config.run is None:
        require_model(config.model)
    elif checks_run:
        open_with_checkpoint(config.run, config.step)
    source = str(config.run or config.model)
    _note(f"loading the weights of {source}")
    return source


def _open_policy(
    config: ServeConfig | ChatConfig,
    max_seqs: int | None,
    max_new_tokens: int | None,
    call_seconds: float,
    score_prompts: bool = False,
    note: str = "",
) -> "Policy":
    """Load a policy and compile its programs; the arguments are those of `load_served_policy`."""
    from marin_rl.sessions.served_policy import load_served_policy

    policy = load_served_policy(
        run=config.run,
        step=config.step,
        folder=config.model,
        max_seqs=max_seqs,
        max_new_tokens=max_new_tokens,
        max_context=config.max_context,
        call_seconds=call_seconds,
        score_prompts=score_prompts,
    )
    _note(f"compiling the programs{note}")
    policy.sampler.compile()
    if policy.score is not None:
        policy.score([(0, 0)])
    return policy


def _run(server: "HttpServer", worker: "Worker", listener: socket.socket, line: str) -> None:
    """Print the line with the address, and serve until a signal."""
    from marin_rl.utils.devices.setup import exempt_from_collection

    print(line, flush=True)
    with exempt_from_collection():
        server.run(worker, listener)


def _note(text: str) -> None:
    print(escape_line(text), file=sys.stderr, flush=True)
