# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Atomic replacement of files and folders, durable across crashes and power failures."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` when the block ends, and is removed if the block raises.

    After a crash the file is either the old one or complete. Only one writer per file is allowed.

    Args:
        path: the file.

    Yields:
        The temporary file `.<name>.partial` in the same folder.

    Raises:
        OSError: if the file cannot be written; an existing file is not changed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    _sync(path.parent)


def replace_folder(folder: Path, partial: Path) -> None:
    """Flush a complete folder to disk and rename it; after a crash, `folder` is either absent or complete.

    Args:
        folder: the final path; an existing folder, file or link is removed.
        partial: the complete folder, on the same file system.

    Raises:
        OSError: if the folder cannot be flushed, removed or renamed.
    """
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    remove(folder)
    partial.rename(folder)
    _sync(folder.parent)


def remove(path: Path) -> None:
    """Remove a folder, file or symbolic link if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
