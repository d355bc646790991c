# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Work in background threads: an event loop, in which episodes and rewards run, and single jobs."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from marin_rl.utils.errors import explain

logger = logging.getLogger(__name__)

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


class ForeignError(Exception):
    """Code of an environment or agent raised an error, which is the cause; the message describes it."""


class _ForeignCall(NamedTuple):
    function: Callable[[], Awaitable[Any]]
    answer: "asyncio.Future[tuple[Any, BaseException | None]]"
    """Result and error; cancelled if the caller does not wait any more."""
    ended: "asyncio.Future[None]"


class ForeignTask:
    """Runs other people's coroutines one after another in a separate task, so that they cannot end their caller.

    They may raise any error, cancel themselves, or ignore a cancellation. One task has all calls of an episode, because
    context variables, and the cancel scopes of libraries, belong to a task. `end` must be called.
    """

    def __init__(self, name: str) -> None:
        """Start the task."""
        self._calls: asyncio.Queue[_ForeignCall | None] = asyncio.Queue()
        self._running: _ForeignCall | None = None
        self._task = asyncio.create_task(self._run(), name=name)

    async def call(self, function: Callable[[], Awaitable[Result]], grace: float) -> Result:
        """Return the result of a coroutine function.

        If the caller is cancelled, the coroutine is cancelled too; if it does not end in time, it is abandoned. It has
        `grace` seconds to end after a cancellation.

        Raises:
            ForeignError: if it raises anything, a `CancelledError` of its own included.
        """
        loop = asyncio.get_running_loop()
        call = _ForeignCall(function, loop.create_future(), loop.create_future())
        self._calls.put_nowait(call)
        try:
            result, error = await call.answer
        except asyncio.CancelledError:
            if self._running is call:
                self._task.cancel()
                await asyncio.wait([call.ended], timeout=grace)
            raise
        if error is not None:
            raise ForeignError(explain(error)) from error
        return result

    def timeout(self, seconds: float) -> asyncio.Timeout:
        """Limit the time of the calls in an `async with` block; raises TimeoutError at its end."""
        return asyncio.timeout(seconds)

    @property
    def is_stuck(self) -> bool:
        """Whether a call was cancelled, and has not ended."""
        return self._running is not None

    def end(self) -> None:
        """End the task after the call that runs, if any."""
        self._calls.put_nowait(None)

    async def _run(self) -> None:
        while True:
            try:
                call = await self._calls.get()
            except asyncio.CancelledError:
                # Of a call that has ended; only `end` ends the task.
                continue
            if call is None:
                return
            if not call.answer.cancelled():
                await self._answer(call)

    async def _answer(self, call: _ForeignCall) -> None:
        self._running = call
        try:
            outcome = await call.function(), None
        except BaseException as error:
            # A task that ends with SystemExit or KeyboardInterrupt would end the event loop.
            outcome = None, error
        self._running = None
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        call.ended.set_result(None)
        if not call.answer.cancelled():
            call.answer.set_result(outcome)


class DirectCalls:
    """Awaits other people's coroutines that never wait, so that they need no task; used as `ForeignTask`."""

    is_stuck = False

    async def call(self, function: Callable[[], Awaitable[Result]], grace: float) -> Result:
        """Return the result of a coroutine function that never waits.

        Raises:
            ForeignError: if it raises anything, or waits, for which there is no time limit.
        """

        async def answer() -> Result:
            return await function()

        coroutine = answer()
        try:
            coroutine.send(None)
        except StopIteration as ended:
            return ended.value
        except BaseException as error:
            raise ForeignError(explain(error)) from error
        with contextlib.suppress(BaseException):
            coroutine.close()
        raise ForeignError("it waits, although `waits` of its environment is False; set that to True")

    def timeout(self, seconds: float) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context without a limit, which could not end a call that never waits."""
        return contextlib.nullcontext()

    def end(self) -> None:
        """Do nothing."""


class BackgroundLoop:
    """Runs coroutines in a background thread.

    The thread starts with the first coroutine, and ends with `close`, with this object, or with the process. Nothing
    that runs in the loop can end it: not `loop.stop()`, nor `sys.exit()` in a task or callback.

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
            is_closing = threading.Event()
            thread = threading.Thread(target=_run, args=[self._loop, is_closing], name="episodes", daemon=True)
            self._end = weakref.finalize(self, _end, self._loop, thread, is_closing)
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


def run_in_thread(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a separate event loop and wait for it, in threads with and without a running event loop.

    An interrupt of the wait (Ctrl-C) cancels the coroutine.
    """
    loop = BackgroundLoop()
    try:
        return loop.submit(work).result()
    finally:
        loop.close()


STOP_TIMEOUT = 5.0
"""Seconds for which `close` waits for a coroutine to yield."""


def _responds(loop: asyncio.AbstractEventLoop, seconds: float) -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(seconds)


def _run(loop: asyncio.AbstractEventLoop, is_closing: threading.Event) -> None:
    while not (is_closing.is_set() or loop.is_closed()):
        try:
            loop.run_forever()
        except BaseException as error:
            logger.warning("a task or callback in the event loop of the episodes raised %s", explain(error))


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, is_closing: threading.Event) -> None:
    if not _responds(loop, STOP_TIMEOUT):
        return
    try:
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(STOP_TIMEOUT)
    except TimeoutError:
        # A coroutine that was cancelled blocks the thread.
        return
    is_closing.set()
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
        """Set the prefix of the thread's name. The thread starts with the first job."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._running: concurrent.futures.Future[None] | None = None

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
