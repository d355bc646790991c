# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A program that tries to leave the sandbox, run once in each kind of it to see whether it holds."""

import dataclasses
import json

_PROGRAM = """
import json, os, socket

def works(attempt):
    try:
        attempt()
    except OSError:
        return False
    return True

def fork():
    if os.fork() == 0:
        os._exit(0)

print(json.dumps({
    "reads a file outside": works(lambda: open(SECRET).read()),
    "changes files outside": works(lambda: open(SECRET + ".new", "w").close()),
    "opens sockets": works(lambda: socket.socket().close()),
    "starts processes": works(fork),
    "sees a file outside": os.path.exists(SECRET),
}))
"""


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """What is tried."""

    secret: str
    """A file outside, which must not be readable."""
    processes: int
    """Processes that the sandbox allows."""
    has_namespaces: bool
    """Whether the file must not even be visible."""

    @property
    def program(self) -> str:
        """The program to run in the sandbox."""
        return f"SECRET = {self.secret!r}\n{_PROGRAM}"

    def holes(self, printed: str) -> list[str]:
        """What the program could do and should not.

        Args:
            printed: what it printed.

        Raises:
            ValueError: if that is not what the program prints.
        """
        tried = json.loads(printed)
        allowed = {"starts processes"} if self.processes else set()
        if not self.has_namespaces:
            allowed.add("sees a file outside")
        return [name for name, worked in tried.items() if worked and name not in allowed]
