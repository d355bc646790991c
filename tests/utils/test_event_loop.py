# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextvars
import gc
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from marin_rl.utils.event_loop import (
    BackgroundJob,
    BackgroundLoop,
    DirectCalls,
    ForeignError,
    ForeignTask,
    run_in_thread,
)
from tests.hostile_errors import HOSTILE_ERRORS


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is closed counts as blocked only after a time that no slow machine needs."""
    monkeypatch.setattr("marin_rl.utils.event_loop.STOP_TIMEOUT", 600.0)


async def thread() -> threading.Thread:
    return threading.current_thread()


def test_an_unreferenced_loop_ends_its_thread():
    loop = BackgroundLoop()
    worker = loop.submit(thread()).result()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    assert not worker.is_alive()


def test_close_cancels_coroutines_and_does_not_wait_for_one_that_blocks(monkeypatch: pytest.MonkeyPatch):
    loop = BackgroundLoop()
    started, ends = threading.Event(), threading.Event()

    async def wait(blocks: bool) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            if blocks:
                ends.wait(600)

    waiting = loop.submit(wait(blocks=False))
    assert started.wait(600)
    loop.close()
    assert waiting.cancelled()
    started.clear()
    loop.submit(wait(blocks=True))
    assert started.wait(600)
    monkeypatch.setattr("marin_rl.utils.event_loop.STOP_TIMEOUT", 1.0)
    loop.close()
    ends.set()


def test_responds_is_false_if_a_coroutine_blocks_the_loop():
    loop = BackgroundLoop()
    blocked, release = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        release.wait()

    assert loop.responds(0.01)
    done = loop.submit(block())
    assert blocked.wait(600)
    assert not loop.responds(0.01)
    release.set()
    done.result()
    assert loop.responds(600.0)
    loop.close()


async def exit_in_a_task() -> None:
    async def leave() -> None:
        sys.exit(0)

    await asyncio.create_task(leave())


async def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 0)
    await asyncio.sleep(0)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


async def interrupt_the_loop() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("work", [exit_in_a_task, exit_in_a_callback, stop_the_loop, interrupt_the_loop])
def test_nothing_that_runs_in_the_loop_ends_it(work: Callable[[], Coroutine[Any, Any, None]]):
    loop = BackgroundLoop()
    first = loop.submit(thread()).result(600)
    loop.submit(work())
    assert loop.submit(thread()).result(600) is first
    loop.close()
    assert not first.is_alive()


async def call_twice(function: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[str, str]:
    """Call a function and then another in a `ForeignTask`; return the error and the task's name."""
    task = ForeignTask("episode 7")
    error = ""
    try:
        await task.call(function, 600.0)
    except ForeignError as raised:
        error = str(raised)

    async def name() -> str:
        current = asyncio.current_task()
        return "" if current is None else current.get_name()

    try:
        return error, await task.call(name, 600.0)
    finally:
        task.end()


@pytest.mark.parametrize("name", HOSTILE_ERRORS)
def test_an_error_of_foreign_code_ends_neither_its_task_nor_the_caller(name: str):
    error, text = HOSTILE_ERRORS[name]

    async def fail() -> None:
        raise error

    described, task_name = asyncio.run(call_twice(fail))
    assert text in described
    assert len(described.encode()) < 10_000
    assert task_name == "episode 7"


@pytest.mark.parametrize("ignores", [False, True])
def test_a_direct_call_that_waits_fails(ignores: bool):
    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if ignores:
                await asyncio.Event().wait()

    async def at_once() -> str:
        return "done"

    async def main() -> str:
        calls = DirectCalls()
        with pytest.raises(ForeignError, match="it waits, although `waits` of its environment is False"):
            await calls.call(wait, 0.0)
        return await calls.call(at_once, 0.0)

    assert asyncio.run(main()) == "done"


@pytest.mark.parametrize("name", HOSTILE_ERRORS)
def test_a_direct_call_raises_only_foreign_errors(name: str):
    error, message = HOSTILE_ERRORS[name]

    async def fail() -> None:
        raise error

    def fail_at_once() -> Any:
        raise error

    async def main() -> None:
        for function in (fail, fail_at_once):
            with pytest.raises(ForeignError, match=re.escape(message)):
                await DirectCalls().call(function, 0.0)

    asyncio.run(main())


def test_foreign_code_can_cancel_its_task_and_keeps_its_context_variables():
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def write_and_cancel() -> None:
        variable.set(5)
        running = asyncio.current_task()
        assert running is not None
        running.cancel()

    async def read() -> int:
        return variable.get()

    async def both() -> int:
        task = ForeignTask("episode")
        await task.call(write_and_cancel, 600.0)
        value = await task.call(read, 600.0)
        task.end()
        return value

    assert asyncio.run(both()) == 5


STUCK = """
import asyncio, threading
from marin_rl.utils.event_loop import BackgroundLoop

async def stuck():
    async with asyncio.timeout(0.01):
        await asyncio.to_thread(threading.Event().wait)

loop = BackgroundLoop()
print(repr(loop.submit(stuck()).exception()))
loop.close()
"""


def test_a_hanging_thread_does_not_keep_the_process_from_ending():
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", STUCK], cwd=root, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "TimeoutError()\n", "")


def test_hanging_threads_do_not_block_other_calls():
    loop, release = BackgroundLoop(), threading.Event()
    # More than the threads of asyncio's default pool on any machine.
    stuck = [loop.submit(asyncio.to_thread(release.wait)) for _ in range(40)]
    assert loop.submit(asyncio.to_thread(int, "7")).result(600) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        loop.submit(asyncio.to_thread(int, "seven")).result(600)
    # Asyncio cannot put a StopIteration into a future, and the caller would wait forever.
    with pytest.raises(RuntimeError, match="the call raised StopIteration"):
        loop.submit(asyncio.to_thread(next, iter(()))).result(600)
    release.set()
    assert all(call.result(600) for call in stuck)
    loop.close()


def test_coroutines_run_within_another_event_loop():
    async def outer() -> int:
        return run_in_thread(asyncio.sleep(0, 7))

    assert asyncio.run(outer()) == run_in_thread(asyncio.sleep(0, 7)) == 7


def test_an_interrupt_cancels_the_coroutine():
    cancelled: list[bool] = []

    async def wait() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(wait())
    assert cancelled


def raising(error: Exception) -> None:
    raise error


def test_the_next_call_raises_an_error_once() -> None:
    job = BackgroundJob("test")
    done: list[int] = []
    job.start(raising, OSError("first"))
    with pytest.raises(OSError, match="first"):
        job.start(done.append, 1)
    assert done == []
    job.start(done.append, 2)
    job.flush()
    assert done == [2]
    job.start(raising, OSError("second"))
    with pytest.raises(OSError, match="second"):
        job.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test")]


def test_raise_if_failed_does_not_wait_for_a_running_job() -> None:
    job, gate = BackgroundJob("test"), threading.Event()
    job.start(lambda: gate.wait() and None)
    job.raise_if_failed()
    gate.set()
    job.flush()
    job.raise_if_failed()
    job.close()
