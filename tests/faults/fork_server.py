# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run commands of `marin_rl.train` in processes forked after all imports, and kill them at given file events.

`python fork_server.py` reads orders from stdin, a JSON object a line, and answers each with two lines: the
process id, then the exit status. An order names the command's arguments, a file for its output, and optionally a
moment: the process gets SIGKILL at file event number `count` from the first one on that matches `pattern`. So a kill
falls exactly inside a write, however busy the machine is.
"""

import json
import os
import re
import signal
import sys

# Imported before the forks to save time. Jax starts its threads with its first computation; until then a fork is
# safe.
import marin_rl.training.session  # noqa: F401
from marin_rl.train import main

EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}
"""Python audit events of file operations."""


def kill_at(pattern: str, count: int) -> None:
    """End this process with SIGKILL at a file event.

    Args:
        pattern: is searched in `<event> <path>` (`open <mode> <path>`).
        count: which event from the first match on; 0 is the match itself.
    """
    matches = re.compile(pattern).search
    left = -1

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in EVENTS:
            return
        if left < 0:
            mode = f"{arguments[1]} " if event == "open" else ""
            if not matches(f"{event} {mode}{arguments[0]}"):
                return
            left = count
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    sys.addaudithook(hook)


def run(order: dict) -> None:
    """Run a command in a forked process; never returns."""
    with open(order["output"], "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if order.get("pattern") is not None:
        kill_at(order["pattern"], order["count"])
    status = main(order["argv"])
    sys.stdout.flush()
    os._exit(status)


def serve() -> None:
    """Run commands until the input ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
