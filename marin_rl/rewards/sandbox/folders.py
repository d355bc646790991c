# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Disk usage of sandbox calls, and removal of their folders."""

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
_SMALLEST = 32 * 1024
"""Bytes for which every file and folder counts at least. To remove one takes milliseconds on some disks, so that more
of them would occupy the worker for a minute after the call."""
_LONGEST_PATH = 3000
"""Longest path in bytes that is passed to the kernel; the kernel's limit is 4,096."""
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_LOCKED = 0x10 | 0x20
"""FS_IMMUTABLE_FL and FS_APPEND_FL: not even root can remove such a file, or anything in such a folder."""


def remove(path: str) -> str | None:
    """Remove a file or a folder with its contents, regardless of the permissions and flags that a call set.

    Returns the error message, if any. A symbolic link is removed, not followed.
    """
    for attempt in (_remove_plainly, _remove_unreadable, _remove_locked):
        with contextlib.suppress(OSError, RecursionError):
            attempt(path)
        if not os.path.lexists(path):
            return None
    result = subprocess.run(["rm", "-rf", "--", path], capture_output=True, text=True, errors="replace", check=False)
    return result.stderr.strip()[-500:] if os.path.lexists(path) else None


def exceeds_size(folder: str, limit: int, ignored: Collection[str]) -> bool:
    """Return whether the files below a folder use more disk space than `limit` (Linux).

    The limit in bytes may be negative. Every file and folder counts as at least 32 KiB, which bounds their number.
    Names in the folder that are `ignored` do not count.
    """
    size = 0
    if limit < 0:
        return True
    with contextlib.ExitStack() as opened:
        pending = [folder]
        while pending:
            current = pending.pop()
            try:
                with os.scandir(_short_path(current, opened)) as entries:
                    for entry in entries:
                        if current == folder and entry.name in ignored:
                            continue
                        size += max(_SMALLEST, 512 * entry.stat(follow_symlinks=False).st_blocks)
                        if size > limit:
                            return True
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
            except OSError as error:
                # The folder may have been removed meanwhile. Descriptors run out only if an attack nests or hides many
                # folders.
                if error.errno == errno.EMFILE:
                    return True
    return False


def has_inner_folders(folder: str) -> bool:
    """Return whether a folder inside of `folder` contains another one."""
    for name in os.listdir(folder):
        with contextlib.suppress(OSError), os.scandir(os.path.join(folder, name)) as inner:
            if any(entry.is_dir(follow_symlinks=False) for entry in inner):
                return True
    return False


def deleted_files(process: int, folder: str, largest: int) -> dict[tuple[int, int], int]:
    """Return the bytes of disk space of the files below a folder that a process uses though they have no name (Linux).

    Args:
        process: id of the process, which may have ended.
        folder: the folder.
        largest: size in bytes of a file that is mapped but not open: its actual size is unknown.

    Returns:
        The bytes by device and inode.

    Raises:
        PermissionError: if this process may not list the files of the other one.
    """
    sizes: dict[tuple[int, int], int] = {}
    prefix = os.path.realpath(folder) + "/"
    # Files can be closed, and the process can end, meanwhile.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as lines:
            mapped = [line.split(maxsplit=5) for line in lines if line.endswith(" (deleted)\n")]
        for _, _, _, device, inode, path in mapped:
            if path.startswith(prefix.replace("\n", "\\012")):
                major, minor = device.split(":")
                sizes[os.makedev(int(major, 16), int(minor, 16)), int(inode)] = largest
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(FileNotFoundError):
                path = f"/proc/{process}/fd/{name}"
                file = os.stat(path)
                is_deleted = stat.S_ISREG(file.st_mode) and file.st_nlink == 0
                if is_deleted and os.readlink(path).startswith(prefix):
                    sizes[file.st_dev, file.st_ino] = max(_PAGE, 512 * file.st_blocks)
    return sizes


def _short_path(folder: str, opened: contextlib.ExitStack) -> str:
    """Return a readable path of a folder, regardless of its depth and permissions."""
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
    # shutil.rmtree cannot follow folders that a call nested too deeply; rm can.
    if not os.path.islink(path):
        subprocess.run(["chmod", "-R", "u+rwx", "--", path], capture_output=True, check=False)
    subprocess.run(["rm", "-rf", "--", path], capture_output=True, check=False)


def _remove_locked(path: str) -> None:
    if sys.platform != "linux":
        return
    _unlock(path)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            # Some files may be gone or belong to another user; unlock the others.
            with contextlib.suppress(OSError):
                _unlock(os.path.join(folder, name))
    _remove_unreadable(path)


def _unlock(path: str) -> None:
    """Clear the flags that `chattr +i` and `chattr +a` set, if this process is allowed to."""
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
