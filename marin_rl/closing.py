# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Context manager that calls a close function and keeps the first error."""

import dataclasses
import logging
from collections.abc import Callable
from types import TracebackType

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
