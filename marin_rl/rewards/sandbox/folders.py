# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The files and folders of calls: how much they take, and how they are removed."""

import array
import contextlib
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Collection

_PAGE = 4096
_LONGEST_PATH = 3000
"""The kernel takes no path of more than 4,096 bytes."""
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


def takes_more(folder: str, limit: int, spared: Collection[str]) -> bool:
    """Whether the files below a folder take more of the disk than a limit (Linux).

    Args:
        folder: the folder.
        limit: bytes. Every file and folder counts as a page at least: a disk has only so many.
        spared: names in the folder that do not count.
    """
    taken = 0
    with contextlib.ExitStack() as opened:
        waiting = [folder]
        while waiting:
            place = waiting.pop()
            try:
                with os.scandir(_short_path(place, opened)) as entries:
                    for entry in entries:
                        if place == folder and entry.name in spared:
                            continue
                        taken += max(_PAGE, 512 * entry.stat(follow_symlinks=False).st_blocks)
                        if taken > limit:
                            return True
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
            except OSError as error:
                # It may be gone meanwhile. Only an attack has so many folders out of reach that descriptors run out.
                if error.errno == errno.EMFILE:
                    return True
    return False


def _short_path(folder: str, opened: contextlib.ExitStack) -> str:
    """A path of a folder that can be read, however deep it lies and whatever its permissions are."""
    if len(os.fsencode(folder)) < _LONGEST_PATH and os.access(folder, os.R_OK | os.X_OK):
        return folder
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    opened.callback(os.close, descriptor)
    short = f"/proc/self/fd/{descriptor}"
    os.chmod(short, 0o700)
    return short


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
