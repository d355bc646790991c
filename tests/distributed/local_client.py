# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls to a coordinator in the test process, without Ray."""

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.utils.event_loop import BackgroundLoop

Result = TypeVar("Result")


def result_of(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("the coroutine waits")


class LocalClient(CoordinatorClient):
    """Client of a coordinator that runs in an event loop in a background thread, as in a Ray actor."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._loop = BackgroundLoop()

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        async def run() -> Any:
            result = getattr(self.coordinator, method.__name__)(*arguments, **named)
            return await result if inspect.isawaitable(result) else result

        return self._loop.submit(run()).result()

    def find_failure(self) -> str | None:
        return None
