# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How well user code is kept apart from the machine, and what that is called."""

import enum


class Isolation(enum.StrEnum):
    """What keeps user code apart from the trainer and the machine; limits on what a call uses are always in force."""

    FULL = "full"
    """Bubblewrap and seccomp: no network, a read-only file system that holds Python and the function's folder and
    nothing else, a folder of the call's own to write in, no other process in sight."""
    PARTIAL = "partial"
    """Landlock and seccomp, in the machine's own namespaces: no network, no signals, no new processes; the same files
    can be read and written, but names and sizes of others can be seen."""
    NONE = "none"
    """Processes with limits, nothing else: user code can do what the trainer's user can."""

    @property
    def rank(self) -> int:
        """0 for none, 1 for partial, 2 for full."""
        return (Isolation.NONE, Isolation.PARTIAL, Isolation.FULL).index(self)
