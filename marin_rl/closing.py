# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Closes what was opened, whatever happens in between, and lets the first error through."""

import dataclasses
import logging
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Closing:
    """Closes at the end of a `with` block.

    After an error in the block, that error is the one to be seen: an error of the closing goes into the log.

    >>> with Closing(lambda: print("closed")):
    ...     print("at work")
    at work
    closed
    """

    close: Callable[[], None]
    """Called once, at the end."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception:
            logger.exception("closing after an error (%s: %s) failed too", type(error).__name__, error)
