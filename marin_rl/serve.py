# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serve a policy over OpenAI's HTTP protocol: `python -m marin_rl.serve --run runs/rloo`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.serving.options import CALL_SECONDS, check_source, read_key, require_model
from marin_rl.utils.output import escape_line, go_on_without_output
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.user_code import require_extra


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


def serve(config: ServeConfig) -> None:
    """Load the policy and serve it until a signal.

    Raises:
        UserError: if a package is missing, the key that a public address requires, or the folder `model`.
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        ValueError: if the address is not available. See `training.earlier_run` for further errors.
    """
    require_extra("serve", "marin_rl.serve")
    # Imported here because the extra is optional.
    from marin_rl.serving.http_server import HttpServer, listen, url_of

    key = read_key(config.host, config.api_key_env)
    # Before the weights are loaded, which may take minutes.
    go_on_without_output()
    listener = listen(config.host, config.port, config.client_seconds)
    with listener:
        if config.run is not None:
            open_with_checkpoint(config.run, config.step)
        else:
            require_model(config.model)
        print(f"loading the weights of {escape_line(str(config.run or config.model))}", file=sys.stderr, flush=True)
        # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
        from marin_rl.serving.openai.app import Server
        from marin_rl.serving.openai.engine import Engine
        from marin_rl.serving.openai.protocol import RequestLimits
        from marin_rl.sessions.served_policy import load_policy
        from marin_rl.utils.devices.setup import exempt_from_collection

        policy = load_policy(
            run=config.run,
            step=config.step,
            folder=config.model,
            max_seqs=config.max_seqs,
            max_new_tokens=config.max_new_tokens,
            max_context=config.max_context,
            call_seconds=CALL_SECONDS,
            score_prompts=config.score_prompts,
        )
        name = config.name or Path(str(config.run or config.model)).resolve().name
        limits = RequestLimits(
            max_context=policy.max_context,
            max_new_tokens=policy.sampling.max_new_tokens,
            max_choices=config.max_choices,
            vocab_size=policy.vocab_size,
            stop_token_ids=frozenset(policy.tokenizer.stop_token_ids),
            longest_token=policy.tokenizer.longest_token,
            has_stop_texts=bool(policy.sampling.stop),
        )
        print("compiling the programs", file=sys.stderr, flush=True)
        policy.sampler.compile()
        if policy.score is not None:
            policy.score([(0, 0)])
        engine = Engine(policy.sampler, policy.tokenizer.decode_reply)
        app = Server(
            engine,
            policy.tokenizer,
            limits,
            model=name,
            key=key,
            max_sequences=config.max_sequences,
            max_body_bytes=config.max_body_bytes,
            client_seconds=config.client_seconds,
            score=policy.score,
        )
        server = HttpServer(app.app(), config.client_seconds, config.drain_seconds)
        print(
            f"serving {escape_line(name)} at {url_of(listener)}/v1 ({policy.max_context} tokens of context, "
            f"{policy.sampler.batch_size} sequences together, {'with' if key else 'no'} API key)",
            flush=True,
        )
        with exempt_from_collection():
            server.run(engine, listener)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 after an error, 130 if it is interrupted while it loads.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    serve(parse_config(ServeConfig, arguments).config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
