# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Isolation levels of the sandbox, and the program that tests them."""

import dataclasses
import enum
import json


class Isolation(enum.StrEnum):
    """Isolation of user code from the trainer and the machine. Resource limits apply at every level."""

    FULL = "full"
    """Bubblewrap and seccomp: no network, a read-only file system that contains only Python and the function's folder,
    a writable folder for each call, other processes are invisible."""
    PARTIAL = "partial"
    """Landlock and seccomp, in the machine's own namespaces: no network, no signals, no new processes; the same files
    can be read and written, but names and sizes of other files are visible."""
    NONE = "none"
    """Only processes with resource limits: user code has the permissions of the trainer's user."""

    @property
    def rank(self) -> int:
        """Strength of the level: 0 for `none`, 1 for partial, 2 for full."""
        return (Isolation.NONE, Isolation.PARTIAL, Isolation.FULL).index(self)


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
