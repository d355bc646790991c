# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A plan from the options of its command, which are checked before jax and levanter are imported."""

import argparse
import json
import sys
from collections.abc import Sequence

from marin_rl.pods.chips import parse_topology
from marin_rl.runs.run_directory import check_output
from marin_rl.sessions.command import check_command_line
from marin_rl.utils.output import escape
from marin_rl.utils.settings.decode import ConfigError

MARK = b'{\n  "topology": "'
"""Start of the file of a plan, which tells it from other files."""


def print_plan(arguments: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Plan a run, print the plan, and write it to the file that `arguments.json` names.

    Args:
        arguments: options of `marin_rl.plan`.
        rest: arguments of the command that trains.

    Returns:
        Whether every program compiles and fits.
    """
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

    # Imported here because jax and levanter take seconds to import.
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
    return plan.fits
