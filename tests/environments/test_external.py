# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import signal
import threading

import pytest

from marin_rl.environments.external import find_action, run_in_thread
from marin_rl.rewards import reply_text


@pytest.mark.parametrize(
    ("regex", "reply", "action"),
    [
        (None, "<think>north?</think> go east ", "go east"),
        (r"\[(\w+)\]", "go [east] or [west]", "west"),
        (r"\[(\w+)\]", "go east", ""),
        (r"(e)|(w)", "w", ""),
        (r"(e+)+w", "e" * 100, ""),
    ],
)
def test_an_action_is_found_beside_other_coroutines(monkeypatch, regex: str | None, reply: str, action: str):
    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.2)

    async def find() -> tuple[bool, str]:
        found = asyncio.ensure_future(find_action(reply, regex))
        await asyncio.sleep(0)
        return found.done(), await found

    assert asyncio.run(find()) == (regex is None, action)


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
