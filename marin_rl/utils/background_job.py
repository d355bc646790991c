# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Jobs in a background thread, one at a time, with their errors raised in the caller."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec

Arguments = ParamSpec("Arguments")


class BackgroundJob:
    """Run one job at a time in a background thread; the next call raises the error of a failed job.

    >>> job = BackgroundJob("example")
    >>> done = []
    >>> job.start(done.append, "first")
    >>> job.close()
    >>> done
    ['first']
    """

    def __init__(self, name: str) -> None:
        """Set the thread's name. The thread starts with the first job.

        Args:
            name: prefix of the thread's name.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: Future[None] | None = None

    def start(self, work: Callable[Arguments, None], *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        """Wait for the previous job and raise its error, if any; then start a job."""
        self.flush()
        self._running = self._thread.submit(work, *arguments, **named)

    def raise_if_failed(self) -> None:
        """Raise the error of a finished job; do not wait for a running job."""
        if self._running is not None and self._running.done():
            self.flush()

    def flush(self) -> None:
        """Wait for the running job; raise its error once."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait for the running job and end the thread; raise the job's error."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
