# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Work in a thread of its own, one job at a time, none of whose errors is lost."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class BackgroundJob:
    """Runs one job beside the caller; what goes wrong in it is raised by the next call.

    >>> job = BackgroundJob("example")
    >>> done = []
    >>> job.start(done.append, "first")
    >>> job.close()
    >>> done
    ['first']
    """

    def __init__(self, name: str) -> None:
        """Start no thread yet.

        Args:
            name: the thread's.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._under_way: Future[None] | None = None

    def start(self, work: Callable[Arguments, None], *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        """Start a job when the one before it has ended; raises what went wrong in that."""
        self.flush()
        self._under_way = self._thread.submit(work, *arguments, **named)

    def raise_if_failed(self) -> None:
        """Raise what went wrong, without waiting for a job that is under way."""
        if self._under_way is not None and self._under_way.done():
            self.flush()

    def flush(self) -> None:
        """Wait for the job that is under way; raises what went wrong in it, once."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait for the job that is under way, and end the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
