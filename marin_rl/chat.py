# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Chat with a policy in the terminal: `python -m marin_rl.chat --run runs/rloo`."""

import sys
from collections.abc import Sequence

from marin_rl.config.command_line import parse_config, run_command
from marin_rl.serving.options import ChatConfig
from marin_rl.sessions.serve import chat


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process.

    Exit status: 0, 1 after an error, or 130 if it is interrupted while it loads.
    """
    return run_command(lambda arguments: chat(parse_config(ChatConfig, arguments).config), argv)


if __name__ == "__main__":
    sys.exit(main())
