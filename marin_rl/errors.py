# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors that command lines report by their message, without a traceback; closing and writing with such errors."""

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Callable, Iterator
from types import TracebackType

from marin_rl.remote_path import RemotePath, StorageError
from marin_rl.storage import StoragePath


class UserError(RuntimeError):
    """Base class of errors with a message that names the cause and the remedy."""


class RunDirectoryError(UserError):
    """A run directory cannot be used. The message names the directory and the remedy."""


USER_ERRORS = (UserError, ValueError, OSError)
"""Errors that a command line prints as one line; a traceback would hide the message."""


@contextlib.contextmanager
def writing(path: StoragePath, setting: str = "run_dir") -> Iterator[None]:
    """Convert an `OSError` on writing to a `RunDirectoryError`.

    Args:
        path: the file or folder that is written.
        setting: the setting of the path, for the remedy.

    Raises:
        RunDirectoryError: if an `OSError` is raised; the message names the path, the reason and the remedy.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = "the disk is full; free some space and rerun the same command to resume from the last checkpoint"
        elif isinstance(error, StorageError):
            reason = f"{error.strerror}; {error.remedy}, or choose another {setting}"
        elif isinstance(error, FileNotFoundError) and isinstance(path, RemotePath):
            reason = f"the bucket does not exist; create it, or choose another {setting}"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            reason = f"{error.filename or path} is a file, not a folder; choose another {setting}"
        else:
            reason = f"{error.strerror or error}; choose another {setting}, on a writable disk"
        raise RunDirectoryError(f"cannot write {str(path)!r}: {reason}") from error


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Closing:
    """Call `close` at the end of a `with` block.

    If the block raises, its error propagates, and an error of `close` is only logged.

    >>> with Closing(lambda: print("closed")):
    ...     print("at work")
    at work
    closed
    """

    close: Callable[[], None]
    """Called once, at the end of the block."""

    def __enter__(self) -> None:
        """Enter the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Call `close`; log its error if the block raised one."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            logger.exception("closing after an error (%s: %s) failed too", type(error).__name__, error)
