# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Batching of the sample requests of concurrent episodes for the thread that owns the sampler."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from marin_rl.sampling.sampler import Sampler, SampleRequest
from marin_rl.timing import PhaseTimer
from marin_rl.types import Generation

MAX_WAIT = 0.05
"""Seconds for which an incomplete batch waits for the next request; a batch takes the same time for any size."""
INTERRUPT_INTERVAL = 0.5
"""Seconds between two checks for an interrupt while there are no requests."""


class _Pending(NamedTuple):
    request: SampleRequest
    answer: "asyncio.Future[Generation]"


class RequestBatcher:
    """Batches the sample requests of concurrent episodes.

    A batch is sampled if it is full, if all episodes wait for it, or if no request was added for `max_wait` seconds, so
    that an episode with a slow tool does not delay the others. The result of a request does not depend on its batch
    (see [`SampleRequest`][marin_rl.sampling.sampler.SampleRequest]), so timing affects only the speed.
    """

    def __init__(self, batch_size: int, episodes: int, max_wait: float = MAX_WAIT) -> None:
        """Accept requests.

        Args:
            batch_size: maximum number of requests in a batch.
            episodes: number of episodes that may send requests; each must call `leave` once.
            max_wait: seconds without a new request after which an incomplete batch is sampled.
        """
        self._max_wait = max_wait
        self._batch_size = batch_size
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        self._num_episodes = episodes
        self._closed = False

    def join(self, episodes: int) -> None:
        """Add episodes that may send requests; each must call `leave` once."""
        with self._changed:
            self._num_episodes += episodes

    def leave(self) -> None:
        """Remove an episode, which sends no further requests."""
        with self._changed:
            self._num_episodes -= 1
            self._changed.notify()

    async def sample(self, request: SampleRequest) -> Generation:
        """Add a request and wait for its generation."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._pending.append(_Pending(request, answer))
            self._changed.notify()
        return await answer

    def close(self) -> None:
        """End `serve`; no further requests are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def serve(
        self,
        sampler: Sampler,
        timer: PhaseTimer,
        check: Callable[[], None],
        check_after: float,
        interrupt: Callable[[], None],
    ) -> None:
        """Sample batches until the batcher is closed. Call it in the thread that owns the sampler.

        Args:
            sampler: samples each batch; its errors propagate.
            timer: counts `sample`, and as `reward` the time without requests.
            check: called after `check_after` seconds without requests, and at the end; may raise.
            check_after: time in seconds.
            interrupt: called before every batch, and every half second while there are no requests; an error that it
                raises ends the call.
        """
        while not self._closed:
            interrupt()
            with timer.phase("reward"):
                batch = self._next_batch(check_after, interrupt)
                if not batch:
                    check()
            if batch:
                with timer.phase("sample"):
                    generations = sampler.sample([pending.request for pending in batch])
                batch[0].answer.get_loop().call_soon_threadsafe(_deliver, batch, generations)

    def _next_batch(self, check_after: float, interrupt: Callable[[], None]) -> list[_Pending]:
        """The next requests; empty if nothing changed for `check_after` seconds, or if the batcher is closed."""
        with self._changed:
            while not (self._closed or self._is_complete):
                if not self._wait(self._max_wait if self._pending else check_after, interrupt):
                    break
            # Requests that are pending when the batcher closes were cancelled.
            batch = [] if self._closed else self._pending[: self._batch_size]
            del self._pending[: len(batch)]
            return batch

    def _wait(self, seconds: float, interrupt: Callable[[], None]) -> bool:
        """Wait at most `seconds` for a change; return whether there was one."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > INTERRUPT_INTERVAL:
            if self._changed.wait(INTERRUPT_INTERVAL):
                return True
            interrupt()
        return self._changed.wait(max(left, 0.0))

    @property
    def _is_complete(self) -> bool:
        number = len(self._pending)
        return number >= self._batch_size or 0 < number >= self._num_episodes


def _deliver(batch: Sequence[_Pending], generations: Sequence[Generation]) -> None:
    for pending, generation in zip(batch, generations, strict=True):
        if not pending.answer.done():
            pending.answer.set_result(generation)
