# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Landlock: restrict the file access of a process, without root.

Constants from the kernel's `include/uapi/linux/landlock.h`; see landlock(7).
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from marin_rl.rewards.sandbox.kernel import IS_LINUX, PR_SET_NO_NEW_PRIVS, prctl, system_call

OLDEST_VERSION = 3
"""Oldest usable version: older ones do not restrict truncate(2), which can empty files outside the sandbox."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = (1 << bit for bit in (0, 1, 2, 3, 14, 15))
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READS = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_NET = 0b11
"""Binding and connecting TCP sockets."""
_ALL_SCOPES = 0b11
"""Abstract Unix sockets and signals to processes outside."""


def landlock_version() -> int:
    """Return the Landlock version of the kernel, or 0 if it has no Landlock."""
    if not IS_LINUX:
        return 0
    try:
        return system_call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def restrict_files(read: Iterable[str], write: Iterable[str], version: int) -> None:
    """Deny this process and its children all other files, TCP, and signals to processes outside.

    Args:
        read: files and folders that stay readable; those that do not exist are left out.
        write: files and folders that stay readable and writable.
        version: the result of `landlock_version`.

    Raises:
        OSError: if the kernel refuses.
    """
    every = _all_rights(version)
    _restrict(every, [(path, _READS) for path in read] + [(path, every) for path in write], version)


def restrict_writes(write: Iterable[str], version: int) -> None:
    """Deny this process and its children changes to all other files; read access is unchanged.

    Args:
        write: files and folders that stay writable.
        version: the result of `landlock_version`.

    Raises:
        OSError: if the kernel refuses.
    """
    writes = _all_rights(version) & ~_READS
    _restrict(writes, [(path, writes) for path in write], version)


def _all_rights(version: int) -> int:
    return (1 << (16 if version >= 5 else 15)) - 1


def _restrict(handled: int, rules: list[tuple[str, int]], version: int) -> None:
    attributes = struct.pack("Q", handled)
    if version >= 4:
        attributes += struct.pack("Q", _ALL_NET)
    if version >= 6:
        attributes += struct.pack("Q", _ALL_SCOPES)
    ruleset = system_call(_CREATE_RULESET, ctypes.create_string_buffer(attributes), len(attributes), 0)
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        system_call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        system_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
