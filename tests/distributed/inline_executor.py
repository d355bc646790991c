# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Work beside the caller that is done when it is asked for, so that tests need not wait for it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class InlineExecutor:
    """Takes the place of `concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        pass
