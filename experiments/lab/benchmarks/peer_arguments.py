# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Command line of the programs that are compared with marin_rl, without dependencies, so that each can import it."""

import argparse
from pathlib import Path


def parse_peer(description: str, *, steps: bool) -> argparse.Namespace:
    """Parse the command line of a program's run.

    Args:
        description: of the program.
        steps: whether the command line has the number of steps; otherwise the problem has it.

    Returns:
        `problem`, the folder of the problem; `output`, the file of the steps; `rows`, the rollouts in a forward and
        backward pass; and `steps`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--problem", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    if steps:
        parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args()
