# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Measure the held-out accuracy and loss of a run: `python -m marin_rl.evaluate --run runs/rloo`."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.environments.base import EnvironmentConfig
from marin_rl.sessions.evaluate_checkpoint import EvaluateConfig, run_evaluation
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.decode import encode

FLAGS = {"json": "Print one JSON object instead of lines."}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 after an interrupt.
    """
    return run_command(_run, argv)


def _run(arguments: Sequence[str]) -> int:
    parsed = parse_config(EvaluateConfig, arguments, FLAGS)
    step, metrics = run_evaluation(parsed.config)
    from marin_rl.utils import multihost

    if not multihost.is_main():
        return 0
    if "json" in parsed.flags:
        print(json.dumps({"run": parsed.config.run, "step": step, **_data(parsed.config), **metrics}))
        return 0
    print(f"{escape_line(parsed.config.run)}, after step {step}")
    if parsed.config.environment is not None:
        print(f"  environment  {json.dumps(_data(parsed.config)['environment'])}")
    shown = {escape_line(name): value for name, value in metrics.items()}
    width = max(map(len, shown))
    for name, value in shown.items():
        print(f"  {name:<{width}}  {value:g}")
    return 0


def _data(config: EvaluateConfig) -> dict[str, Any]:
    """Split and environment for the output; the environment is null if it is the run's."""
    return {"split": config.split.value, "environment": encode(config.environment, EnvironmentConfig | None)}


if __name__ == "__main__":
    sys.exit(main())
