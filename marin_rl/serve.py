# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Serve a policy over OpenAI's HTTP protocol: `python -m marin_rl.serve --run runs/rloo`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.serving.options import ServeConfig
from marin_rl.sessions.serve import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0 after SIGTERM or Ctrl-C, 1 after an error, 130 if it is interrupted while it loads.
    """
    return run_command(lambda arguments: serve(parse_config(ServeConfig, arguments).config), argv)


if __name__ == "__main__":
    sys.exit(main())
