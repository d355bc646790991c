# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Train on stored or synthetic rollouts, without a sampler: `python -m marin_rl.replay --run runs/rloo --step 20`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from marin_rl.config.command_line import (
    CommandParser,
    check_command_line,
    parse_arguments,
    read_arguments,
    run_command,
)
from marin_rl.runs.run_directory import open_with_checkpoint
from marin_rl.utils.output import escape_line

if TYPE_CHECKING:
    from marin_rl.sessions.replay import FakeRun, ReplayedStep


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(argv: Sequence[str]) -> int:
    print(_replay(*argument_parser().parse_known_args(argv)))
    return 0


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options."""
    parser = CommandParser(
        "python -m marin_rl.replay",
        description="Train on the stored rollouts of a step of a run, or on synthetic ones, without a sampler.",
        epilog="All other arguments are those of marin_rl.train, and change the config of the run.",
        allow_abbrev=False,
    )
    parser.add_argument("--run", metavar="DIR", help="run directory, a path or an address; no file in it is changed")
    parser.add_argument("--step", type=int, metavar="N", help="step to replay")
    parser.add_argument(
        "--fake",
        metavar="SHAPE",
        help="synthetic rollouts instead: prompt=32,completion=16-64,steps=4",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser


def _replay(arguments: argparse.Namespace, rest: Sequence[str]) -> str:
    directory = None if arguments.run is None else open_with_checkpoint(arguments.run, None)
    if arguments.fake is None and (directory is None or arguments.step is None):
        raise ValueError("give --run DIR and --step N to replay a step, or --fake SHAPE for synthetic rollouts")
    if arguments.fake is not None and arguments.step is not None:
        raise ValueError(f"--step is {arguments.step}, but --fake replays no step; omit one of them")
    # The config of a run is checked first, below, so that its problems name its file.
    given = read_arguments(rest, {})
    checked = check_command_line(rest, {}, reads_files=False) if directory is None else None
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.config.train_config import TrainConfig
    from marin_rl.sessions.config_changes import values_of_step
    from marin_rl.sessions.earlier_run import read_config, require_rl, resolve_model
    from marin_rl.sessions.replay import parse_shape, replay_step, train_on_fake

    if checked is not None:
        config = checked.complete().config
    else:
        assert directory is not None
        # Errors in the file name the file; later ones are those of arguments.
        require_rl(read_config(directory), str(directory.path), "no step of it can be replayed")
        values = values_of_step(directory, sys.maxsize if arguments.step is None else arguments.step)
        # One process replays a run of several.
        trainer = {**values.get("trainer", {}), "distributed": {"initialize_jax_distributed": False}}
        defaults = {**values, "trainer": trainer}
        config = parse_arguments(TrainConfig, given, {}, defaults).config
    if arguments.fake is not None:
        shape = parse_shape(arguments.fake, config.rollouts.max_length)
        fake = train_on_fake(config if directory is not None else resolve_model(config), shape)
        return json.dumps(fake._asdict()) if arguments.json else _describe_fake(fake, shape.steps)
    assert directory is not None
    replayed = replay_step(directory, config, arguments.step)
    if arguments.json:
        return json.dumps({"run": arguments.run, "step": arguments.step, **replayed._asdict()})
    return _describe_step(str(arguments.run), arguments.step, replayed)


def _describe_step(run: str, step: int, replayed: "ReplayedStep") -> str:
    lines = [f"{escape_line(run)}, step {step}, from the checkpoint of step {replayed.start}"]
    width = max(map(len, replayed.metrics))
    lines.append(f"  {'':<{width}}  {'replayed':>14}  {'recorded':>14}")
    for name, value in replayed.metrics.items():
        recorded = replayed.recorded.get(name)
        lines.append(f"  {name:<{width}}  {value:>14.7g}  {'-' if recorded is None else format(recorded, '.7g'):>14}")
    if replayed.weight_difference is None:
        lines.append(f"the run has no checkpoint of step {step}, so the weights cannot be compared")
    elif replayed.weight_difference == 0:
        lines.append(f"the weights after the step equal those of the checkpoint of step {step}")
    else:
        lines.append(
            f"the weights after the step differ from the checkpoint of step {step} by at most "
            f"{replayed.weight_difference:.3g}"
        )
    return "\n".join(lines)


def _describe_fake(fake: "FakeRun", steps: int) -> str:
    width = max(map(len, fake.median))
    device = fake.device_peak_bytes
    peak = "not tracked on this platform" if device is None else f"{device / 2**30:.2f} GiB"
    return "\n".join(
        [
            f"{fake.rollouts} rollouts, {fake.tokens:,} tokens",
            f"first step, with compilation: {fake.first_step_seconds:.3g} s",
            f"medians of the other {steps - 1} steps:" if steps > 1 else "this step:",
            *(f"  {name:<{width}}  {value:.6g}" for name, value in fake.median.items()),
            f"tokens per second, prompts included: {fake.tokens_per_second:,.0f}",
            f"peak memory: device {peak}, host {fake.host_peak_bytes / 2**30:.2f} GiB",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
