# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Removal of the files and folders that calls leave behind."""

import array
import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_LOCKED = 0x10 | 0x20
"""FS_IMMUTABLE_FL and FS_APPEND_FL: not even root removes such a file, or anything in such a folder."""


def remove(path: str) -> str | None:
    """Remove a file or a folder with its contents, whatever permissions and flags a call gave them.

    Args:
        path: the file or folder; a symbolic link is removed, not followed.

    Returns:
        None if it is gone, else the reason why it is still there.
    """
    for attempt in (_remove_plainly, _remove_unreadable, _remove_locked):
        with contextlib.suppress(OSError, RecursionError):
            attempt(path)
        if not os.path.lexists(path):
            return None
    tried = subprocess.run(["rm", "-rf", "--", path], capture_output=True, text=True, errors="replace", check=False)
    return tried.stderr.strip()[-500:] if os.path.lexists(path) else None


def _remove_plainly(path: str) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    try:
        os.rmdir(path)
    except OSError:
        shutil.rmtree(path)


def _remove_unreadable(path: str) -> None:
    # Not Python's own function: a call may have nested folders deeper than that can follow.
    if not os.path.islink(path):
        subprocess.run(["chmod", "-R", "u+rwx", "--", path], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--", path], capture_output=True, check=False)


def _remove_locked(path: str) -> None:
    if sys.platform != "linux":
        return
    _unlock(path)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            # Some may be gone, or be of another user: the rest is unlocked all the same.
            with contextlib.suppress(OSError):
                _unlock(os.path.join(folder, name))
    _remove_unreadable(path)


def _unlock(path: str) -> None:
    """Clear the flags that `chattr +i` and `chattr +a` set, if this process may."""
    mode = os.lstat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return
    flags = array.array("l", [0])
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        if flags[0] & _LOCKED:
            flags[0] &= ~_LOCKED
            fcntl.ioctl(descriptor, _SET_FLAGS, flags)
    finally:
        os.close(descriptor)
