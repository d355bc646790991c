# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls to the coordinator from the trainer and the rollout workers."""

import abc
import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, overload

from marin_rl.distributed.coordinator import Coordinator
from marin_rl.utils.errors import UserError
from marin_rl.utils.event_loop import BackgroundLoop

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Seconds between calls to a coordinator that is down."""
ANSWER_SECONDS = 10.0
"""Seconds added to the time limit of a call, because calls of idle workers wait for a change."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CoordinatorLostError(UserError):
    """Raised when the coordinator does not answer, or cannot be restarted; the message names the remedy."""


class CoordinatorClient(abc.ABC):
    """Blocking calls of trainer and workers to the coordinator; safe to use from several threads."""

    @overload
    def call(
        self,
        method: Callable[Concatenate[Coordinator, Arguments], Coroutine[Any, Any, Result]],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result: ...

    @overload
    def call(
        self,
        method: Callable[Concatenate[Coordinator, Arguments], Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result: ...

    @abc.abstractmethod
    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a method of the coordinator, such as `Coordinator.heartbeat`, and return its result.

        Raises:
            CoordinatorLostError: if the coordinator does not answer within the timeout, or cannot be restarted.
        """

    def find_failure(self) -> str | None:
        """Return the error of a worker that ended with one. A worker that fails to start cannot report it itself.

        Raises:
            CoordinatorLostError: if failed workers cannot be restarted.
        """
        return None


class LocalClient(CoordinatorClient):
    """Client of a coordinator in this process, which runs in an event loop in a background thread."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._loop = BackgroundLoop()
        # Its first call starts the thread, and later ones may be made at once.
        self._loop.submit(asyncio.sleep(0)).result()

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """See `CoordinatorClient`."""
        return self.call_by_name(method.__name__, arguments, named)

    def call_by_name(self, name: str, arguments: Any, named: Any) -> Any:
        """Call the method of this name."""

        async def run() -> Any:
            result = getattr(self.coordinator, name)(*arguments, **named)
            return await result if inspect.isawaitable(result) else result

        return self._loop.submit(run()).result()


class RemoteClient(CoordinatorClient):
    """Client of a coordinator in another process, which may be down or paused for a while: calls are repeated."""

    unanswered: ClassVar[tuple[type[Exception], ...]]
    """Errors of a call that was not answered."""

    def __init__(self, no_progress_timeout: float) -> None:
        """Make a client of a coordinator that may be down or paused for `no_progress_timeout` seconds."""
        self._no_progress_timeout = no_progress_timeout

    @abc.abstractmethod
    def ask(self, method: str, arguments: Any, named: Any, seconds: float) -> Any:
        """Call a method once, and wait up to `seconds` for the answer."""

    def check_engine(self) -> None:
        """Check that a coordinator that is down will be restarted; raises a `CoordinatorLostError` if not."""

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """See `CoordinatorClient`."""
        deadline = time.monotonic() + self._no_progress_timeout
        while True:
            try:
                seconds = max(deadline - time.monotonic(), 0.0) + ANSWER_SECONDS
                return self.ask(method.__name__, arguments, named, seconds)
            except self.unanswered as error:
                if time.monotonic() > deadline:
                    raise CoordinatorLostError(
                        f"the coordinator of the rollout workers has not answered for {self._no_progress_timeout:g} s "
                        "(workers.no_progress_timeout): it was not restarted, or its process is paused; check the "
                        "memory and the load of its machine, and run the same command again to resume from the last "
                        "checkpoint"
                    ) from error
                self.check_engine()
                logger.warning("the coordinator is down; retrying")
                time.sleep(RETRY_SECONDS)
