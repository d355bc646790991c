# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Plan a run without its hardware: `python -m marin_rl.plan --config FILE --topology v5p:2x2x4`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from marin_rl.config.command_line import CommandParser, check_command_line, positive, run_command
from marin_rl.runs.run_directory import check_output
from marin_rl.utils.output import escape
from marin_rl.utils.settings.decode import ConfigError

FITS, DOES_NOT_FIT = 0, 2
"""Exit statuses of a plan."""
MARK = b'{\n  "topology": "'
"""Start of the file of a plan, which tells it from other files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None for the arguments of the process.

    Returns:
        Exit status: 0 if every program compiles and fits, 2 if one does not, 1 after an error, 130 after an interrupt.
    """
    return run_command(_run, argv)


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's own arguments; all others are those of marin_rl.train."""
    parser = CommandParser(
        "python -m marin_rl.plan",
        description="Compile every program of a run for a topology, and report its memory.",
        epilog="All other arguments are those of the command that trains: --config FILE and --key value.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--topology", required=True, metavar="NAME", help="v5p-32 or v5p:2x2x4, 2xv5p-32 (two slices), h100:8 or cpu:8"
    )
    parser.add_argument("--worker_topology", metavar="NAME", help="of a rollout worker, which is one host")
    parser.add_argument(
        "--vocab_size", type=positive, help="tokens of the model (default: of initialize_from or the tokenizer)"
    )
    parser.add_argument("--prompt_tokens", type=positive, help="tokens of every prompt (default: the longest)")
    parser.add_argument("--answer_tokens", type=positive, help="sampled tokens of every rollout (default: the longest)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to a file")
    return parser


def _run(argv: Sequence[str]) -> int:
    arguments, rest = argument_parser().parse_known_args(argv)
    # Imported here because jax and levanter take seconds to import.
    from marin_rl.pods.chips import parse_topology

    topology = parse_topology(arguments.topology)
    worker_topology = None if arguments.worker_topology is None else parse_topology(arguments.worker_topology)

    checked = check_command_line(rest, {}, command=None, reads_files=False)
    for name in ("worker_topology", "prompt_tokens", "answer_tokens"):
        if not checked.config.samples and getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name} is of runs of marin_rl.train, but this config is of marin_rl.{checked.config.command}; "
                "leave it out"
            )
    # Compilation takes minutes.
    if arguments.json is not None:
        if not arguments.json.parent.is_dir():
            raise ConfigError(f"--json {arguments.json} cannot be written; give a file in an existing folder")
        check_output(arguments.json, "--json", MARK)

    from marin_rl.parts.model import Lengths
    from marin_rl.parts.rl import longest_rollout
    from marin_rl.pods.report import describe, to_json
    from marin_rl.pods.run_plan import complete_model, make_plan

    config, vocab_size = complete_model(checked.complete().config, arguments.vocab_size)
    lengths = None
    if config.samples:
        longest = longest_rollout(config)
        lengths = Lengths(arguments.prompt_tokens or longest.prompt, arguments.answer_tokens or longest.answer)
        if sum(lengths) > config.rollouts.max_length:
            raise ValueError(
                f"{lengths.prompt} prompt tokens and {lengths.answer} answer tokens exceed rollouts.max_length, "
                f"{config.rollouts.max_length}; lower --prompt_tokens or --answer_tokens"
            )
    plan = make_plan(
        config,
        topology,
        vocab_size=vocab_size,
        worker_topology=worker_topology,
        lengths=lengths,
        report=lambda name: print(f"compiling {name}", file=sys.stderr, flush=True),
    )
    print(escape(describe(plan)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(to_json(plan), indent=2, allow_nan=False) + "\n")
    return FITS if plan.fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
