# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Chat with a policy in the terminal: `python -m marin_rl.chat --run runs/rloo`."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

from annotated_types import Ge

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.serving.options import check_source, require_model
from marin_rl.utils.errors import UserError
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.checks import ConfigSection, check_fields

CALL_SECONDS = 0.05
"""Time after which the next tokens of a reply are printed, about."""


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


def chat(config: ChatConfig) -> None:
    """Load the policy, and answer the lines of standard input until its end or `/quit`.

    Raises:
        UserError: if standard input is closed, the folder `model` does not exist, or `max_context` exceeds the model's
            positions.
        RunDirectoryError: if the run does not exist.
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        SamplerError: if the policy has no valid probabilities.
    """
    if sys.stdin is None:
        raise UserError("standard input, which has the messages, is closed; leave it open, or give a file or a pipe")
    if config.run is not None:
        open_with_checkpoint(config.run, config.step)
    else:
        require_model(config.model)
    name = escape_line(str(config.run or config.model))
    print(f"loading the weights of {name}", file=sys.stderr, flush=True)
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.serving.chat import TerminalChat
    from marin_rl.sessions.served_policy import load_policy

    policy = load_policy(
        run=config.run,
        step=config.step,
        folder=config.model,
        max_seqs=1,
        max_new_tokens=config.max_tokens,
        max_context=config.max_context,
        call_seconds=CALL_SECONDS,
    )
    print("compiling the programs; this can take minutes", file=sys.stderr, flush=True)
    policy.sampler.compile()
    temperature = policy.sampling.temperature if config.temperature is None else config.temperature
    has_history = policy.max_turns != 1
    history = "" if has_history else "each line begins a new conversation, as in training (rollouts.max_turns: 1); "
    print(
        f"chat with {name} (step {policy.sampler.version}, {policy.max_context} tokens of context, temperature "
        f"{temperature:g}); {history}/help lists the commands",
        file=sys.stderr,
        flush=True,
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


def input_lines() -> Iterator[str]:
    """Yield the lines of standard input; in a terminal with a prompt, and Ctrl-C discards a line."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        # Editing of the line, and former lines.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            yield input("> " if is_terminal else "")
        except EOFError:
            print(end="\n" if is_terminal else "")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n[Ctrl-D or /quit ends the chat]", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program name; None for `sys.argv`.

    Returns:
        Exit status: 0, 1 after an error, or 130 if it is interrupted while it loads.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    chat(parse_config(ChatConfig, arguments).config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
