# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Isolation levels of the sandbox."""

import enum


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
