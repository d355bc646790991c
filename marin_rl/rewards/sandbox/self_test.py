# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Test program that tries to escape from the sandbox, run once for each isolation level."""

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
    """Expectations on the test program's results."""

    secret: str
    """Path of a file outside the sandbox, which must not be readable."""
    processes: int
    """Number of processes that the sandbox allows."""
    has_namespaces: bool
    """Whether the file must not even be visible."""

    @property
    def program(self) -> str:
        """The program to run in the sandbox."""
        return f"SECRET = {self.secret!r}\n{_PROGRAM}"

    def holes(self, printed: str) -> list[str]:
        """Return the forbidden actions that succeeded.

        Args:
            printed: the standard output of the program.

        Raises:
            ValueError: if the output is not that of the program.
        """
        results = json.loads(printed)
        allowed = {"starts processes"} if self.processes else set()
        if not self.has_namespaces:
            allowed.add("sees a file outside")
        return [name for name, succeeded in results.items() if succeeded and name not in allowed]
