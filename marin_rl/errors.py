# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that command lines report by their message, without a traceback."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class UserError(RuntimeError):
    """Base class of errors with a message that names the cause and the remedy."""


class RunDirectoryError(UserError):
    """A run directory cannot be used. The message names the directory and the remedy."""


USER_ERRORS = (UserError, ValueError, OSError)
"""Errors that a command line prints as one line; a traceback would hide the message."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` on writing to a `RunDirectoryError`.

    Args:
        path: the file or folder that is written.

    Raises:
        RunDirectoryError: if an `OSError` is raised; the message names the path, the reason and the remedy.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space and rerun the same command to resume from the last checkpoint"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            reason = f"{error.filename or path} is a file, not a folder; choose another run_dir"
        else:
            reason = f"{error.strerror or error}; choose a run_dir on a writable disk"
        raise RunDirectoryError(f"cannot write {str(path)!r}: {reason}") from error
