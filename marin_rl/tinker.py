# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serve training over the Tinker protocol: `python -m marin_rl.tinker --model models/smollm2-135m-instruct`."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.serving.options import check_source, read_key, require_model
from marin_rl.utils.logs import log_to
from marin_rl.utils.output import escape_line, go_on_without_output
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import local_path
from marin_rl.utils.user_code import require_extra


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


def serve(config: TinkerConfig) -> None:
    """Load the base and serve it until a signal.

    Raises:
        UserError: if a package is missing, the key that a public address requires, or the folder `model`; also if
            `folder` belongs to another server or another base.
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        PolicyModelError: if the model cannot be loaded.
        ValueError: if the address is not available.
    """
    require_extra("tinker", "marin_rl.tinker")
    # Imported here because the extra is optional.
    from marin_rl.serving.http_server import HttpServer, listen, url_of

    key = read_key(config.host, config.api_key_env, "a secret key that begins with tml-")
    if config.run is None:
        require_model(config.model)
    source = str(config.run or config.model)
    # Before the weights are loaded, which may take minutes.
    go_on_without_output()
    with listen(config.host, config.port, config.client_seconds) as listener:
        print(f"loading the weights of {escape_line(source)}", file=sys.stderr, flush=True)
        # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
        from marin_rl.serving.tinker.checkpoints import ServedModel
        from marin_rl.serving.tinker.endpoints import TinkerApp
        from marin_rl.serving.tinker.service import Service
        from marin_rl.serving.tinker.trainer import open_trainer
        from marin_rl.sessions.run_export import export_once
        from marin_rl.utils.devices.setup import exempt_from_collection

        names, weights = (source,), Path(source).absolute()
        if config.run is not None:
            weights = Path(config.folder, "base").absolute()
            step = export_once(config.run, config.step, weights)
            names = source, str(weights)
            source = f"step {step} of {source}"
        with log_to(Path(config.folder, "log.txt")):
            trainer = open_trainer(str(weights), max_context=config.max_context, max_seqs=config.max_seqs)
            base = ServedModel(
                (*names, *config.names), trainer.base_fingerprint, trainer.max_context, tokenizer=str(weights)
            )
            service = Service(trainer, Path(config.folder), base)
            service.on_step = functools.partial(print, flush=True)
            app = TinkerApp(service, base, key=key, client_seconds=config.client_seconds)
            server = HttpServer(app.app(), config.client_seconds)
            print(
                f"serving {escape_line(source)} to clients of Tinker at {url_of(listener)} ({trainer.max_context} "
                f"tokens of context, {'with' if key else 'any'} API key)",
                flush=True,
            )
            with exempt_from_collection():
                server.run(service, listener)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 after an error, 130 if it is interrupted while it loads.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    serve(parse_config(TinkerConfig, arguments).config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
