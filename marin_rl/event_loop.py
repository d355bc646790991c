# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An event loop in a background thread, in which episodes and rewards run while the main thread samples or waits."""

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


async def gather_all(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results in order; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in an event loop, from any thread. Nothing is called if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


class BackgroundLoop:
    """Runs coroutines in a background thread.

    The thread starts with the first coroutine, and ends with `close`, with this object, or with the process.

    >>> loop = BackgroundLoop()
    >>> loop.submit(asyncio.sleep(0, "done")).result()
    'done'
    >>> loop.close()
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize | None = None

    def submit(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Start a coroutine. Any thread may wait for the returned future or cancel it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(_ThreadPerCall())
            thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
            self._end = weakref.finalize(self, _end, self._loop, thread)
            thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def responds(self, seconds: float) -> bool:
        """Whether the loop runs another callback within `seconds`; false if a coroutine blocks it."""
        return self._loop is None or _responds(self._loop, seconds)

    def close(self) -> None:
        """Cancel all coroutines and end the thread; a thread that a coroutine blocks keeps running."""
        if self._end is not None:
            self._end()
        self._loop = self._end = None


STOP_TIMEOUT = 5.0
"""Seconds for which `close` waits for a coroutine to yield."""


def _responds(loop: asyncio.AbstractEventLoop, seconds: float) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(seconds)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not _responds(loop, STOP_TIMEOUT):
        return
    try:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(STOP_TIMEOUT)
    except TimeoutError:
        # A coroutine that was cancelled blocks the thread.
        return
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class _ThreadPerCall(concurrent.futures.ThreadPoolExecutor):
    """Runs every call of `asyncio.to_thread` in a separate daemon thread, which does not block the process at exit.

    A call may hang forever. In asyncio's default pool it would occupy a thread and keep the process from ending.
    Asyncio accepts only subclasses of that pool.
    """

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "concurrent.futures.Future[Result]":
        """Call a function in a new thread."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except StopIteration as error:
                # An asyncio future cannot hold it, and would never be done.
                replaced = RuntimeError(f"the call raised StopIteration({error.value!r})")
                replaced.__cause__ = error
                future.set_exception(replaced)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="episodes-blocking", daemon=True).start()
        return future


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=STOP_TIMEOUT / 2)
