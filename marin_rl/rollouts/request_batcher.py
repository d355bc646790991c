# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Where episodes ask for answers, and the thread that owns the sampler gives them, many at a time."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from marin_rl.sampling.sampler import Sampler, SampleRequest
from marin_rl.timing import PhaseTimer
from marin_rl.types import Generation

MAX_WAIT = 0.05
"""Seconds that a round which is not full waits for a further request: it costs the same however full it is."""
INTERRUPT_INTERVAL = 0.5
"""Seconds between two checks for an interrupt while no round can be sampled."""


class _Waiting(NamedTuple):
    request: SampleRequest
    answer: "asyncio.Future[Generation]"


class RequestBatcher:
    """Collects the requests of episodes that go on beside one another.

    A round is sampled as soon as it is full, or nobody is left who could add to it, or nobody has for a while: an
    episode that waits for a slow tool does not hold up the others. What is answered does not depend on who shares a
    round (see [`SampleRequest`][marin_rl.sampling.sampler.SampleRequest]), so timing decides how fast and not what.
    """

    def __init__(self, batch_size: int, episodes: int, max_wait: float = MAX_WAIT) -> None:
        """Open the desk.

        Args:
            batch_size: requests that the sampler answers together.
            episodes: how many there are that may ask; each leaves once.
            max_wait: seconds without a further request after which those that wait are answered.
        """
        self._linger = max_wait
        self._batch_size = batch_size
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._present = episodes
        self._closed = False

    def join(self, episodes: int) -> None:
        """Say that further episodes may ask, each of which leaves once."""
        with self._changed:
            self._present += episodes

    def leave(self) -> None:
        """Say that an episode will not ask any more."""
        with self._changed:
            self._present -= 1
            self._changed.notify()

    async def sample(self, request: SampleRequest) -> Generation:
        """Ask, and wait for the answer."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._waiting.append(_Waiting(request, answer))
            self._changed.notify()
        return await answer

    def close(self) -> None:
        """Nobody will ask any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def serve(
        self,
        sampler: Sampler,
        timer: PhaseTimer,
        check: Callable[[], None],
        patience: float,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer until the desk is closed; called in the thread that owns the sampler.

        Args:
            sampler: answers; whatever it raises is passed on.
            timer: counts `sample`, and as `reward` the time in which there was nothing to sample.
            check: called where nobody asked for a long time, and at the end; may raise.
            patience: that time, in seconds.
            interrupt: called before every round, and every half second while none can be sampled; an error that it
                raises ends the call.
        """
        while not self._closed:
            interrupt()
            with timer.phase("reward"):
                round_ = self._next_round(patience, interrupt)
                if not round_:
                    check()
            if round_:
                with timer.phase("sample"):
                    generations = sampler.sample([waiting.request for waiting in round_])
                round_[0].answer.get_loop().call_soon_threadsafe(_deliver, round_, generations)

    def _next_round(self, patience: float, interrupt: Callable[[], None]) -> list[_Waiting]:
        """Who is answered next; nobody where nothing at all happened for so many seconds, or the desk is closed."""
        with self._changed:
            while not (self._closed or self._is_complete):
                if not self._wait(self._linger if self._waiting else patience, interrupt):
                    break
            # Whoever waits at a desk that is closed was given up, and hears nothing any more.
            round_ = [] if self._closed else self._waiting[: self._batch_size]
            del self._waiting[: len(round_)]
            return round_

    def _wait(self, seconds: float, interrupt: Callable[[], None]) -> bool:
        """Wait for a change, at most for so many seconds; whether there was one."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > INTERRUPT_INTERVAL:
            if self._changed.wait(INTERRUPT_INTERVAL):
                return True
            interrupt()
        return self._changed.wait(max(left, 0.0))

    @property
    def _is_complete(self) -> bool:
        number = len(self._waiting)
        return number >= self._batch_size or 0 < number >= self._present


def _deliver(round_: Sequence[_Waiting], generations: Sequence[Generation]) -> None:
    for waiting, generation in zip(round_, generations, strict=True):
        if not waiting.answer.done():
            waiting.answer.set_result(generation)
