# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sample requests of concurrent episodes, for the thread that owns the sampler."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from marin_rl.sampling.sampler import SampledTokens, Sampler, SampleRequest
from marin_rl.types import Generation
from marin_rl.utils.event_loop import call_in
from marin_rl.utils.timing import PhaseTimer

MAX_WAIT = 0.05
"""Seconds for which an idle sampler waits for the next request before it starts an incomplete batch."""
INTERRUPT_INTERVAL = 0.5
"""Seconds between two checks for an interrupt while there are no requests."""


OnTokens = Callable[[SampledTokens], None]
"""Called in the event loop with the next tokens of a request, before its generation is complete."""


class _Pending(NamedTuple):
    request: SampleRequest
    answer: "asyncio.Future[Generation]"
    on_tokens: OnTokens | None
    is_last_turn: bool


class RequestBatcher:
    """Passes the sample requests of concurrent episodes to the sampler, and its generations back.

    New requests join those in progress. An idle sampler starts when the requests fill it, when all episodes wait for
    it, or when no request was added for `max_wait` seconds. The result of a request does not depend on others (see
    [`SampleRequest`][marin_rl.sampling.sampler.SampleRequest]), so timing affects only the speed.
    """

    def __init__(self, batch_size: int, episodes: int, max_wait: float = MAX_WAIT) -> None:
        """Accept requests.

        `batch_size` requests fill the sampler, and each of the `episodes` must call `leave` once. An idle sampler
        starts after `max_wait` seconds without a new request.
        """
        self._max_wait = max_wait
        self._batch_size = batch_size
        self._changed = threading.Condition()
        self._num_changes = 0
        self._pending: list[_Pending] = []
        self._ended: list[str] = []
        self._num_episodes = episodes
        self._closed = False

    def join(self, episodes: int) -> None:
        """Add episodes that may send requests; each must call `leave` once."""
        with self._changed:
            self._num_episodes += episodes

    def leave(self, conversation: str) -> None:
        """Remove an episode, which sends no further requests. Its request in progress is dropped."""
        with self._changed:
            self._num_episodes -= 1
        self.end(conversation)

    def end(self, conversation: str) -> None:
        """End a conversation of an episode, which may begin others. Its request in progress is dropped.

        The `conversation` is not used again.
        """
        with self._changed:
            self._ended.append(conversation)
            self._notify()

    def submit(
        self, request: SampleRequest, on_tokens: OnTokens | None = None, is_last_turn: bool = False
    ) -> "asyncio.Future[Generation]":
        """Add a request, and return the future of its generation. Call it in the event loop.

        Args:
            request: the request; it must be valid for the sampler.
            on_tokens: receives the tokens of an incomplete generation as they are sampled; the rest, at least the last
                token, is only in the generation.
            is_last_turn: whether its conversation ends with this request, which frees the slot without delay. The
                episode must still `leave`.
        """
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._pending.append(_Pending(request, answer, on_tokens, is_last_turn))
            self._notify()
        return answer

    def close(self) -> None:
        """End `serve`; no further requests are answered."""
        with self._changed:
            self._closed = True
            self._notify()

    def _notify(self) -> None:
        self._num_changes += 1
        self._changed.notify()

    def serve(
        self,
        sampler: Sampler,
        timer: PhaseTimer,
        check: Callable[[], None],
        check_after: float,
        interrupt: Callable[[], None],
    ) -> None:
        """Sample until the batcher is closed; the sampler is reset at the end. Call it in the thread that owns it.

        Args:
            sampler: samples the requests; its errors propagate.
            timer: counts `sample`, and as `reward` the time in which the sampler is idle.
            check: called after `check_after` seconds in which the sampler was idle, and at the end; may raise.
            check_after: time in seconds.
            interrupt: called regularly; an error that it raises ends the call.
        """
        running: dict[int, _Pending] = {}
        seen: dict[int, int] = {}
        try:
            while not self._closed:
                interrupt()
                if sampler.is_idle:
                    with timer.phase("reward"):
                        if not self._wait_for_requests(len(running), check_after, interrupt):
                            check()
                with timer.phase("sample"):
                    self._start(sampler, running)
                    # A server's sampler completes requests of conversations that have ended, too.
                    ended = [(running.pop(one), generation) for one, generation in sampler.advance() if one in running]
                    for pending, _ in ended:
                        if pending.is_last_turn and pending.request.conversation is not None:
                            sampler.end_conversation(pending.request.conversation)
                    parts = _new_parts(sampler, running, seen)
                for pending, _ in (*ended[:1], *parts[:1]):
                    call_in(pending.answer.get_loop(), _deliver, ended, parts)
                    break
        finally:
            sampler.reset()

    def _start(self, sampler: Sampler, running: dict[int, _Pending]) -> None:
        """Pass new requests and ended conversations to the sampler, and update the requests by number."""
        with self._changed:
            # Requests that are pending when the batcher closes were cancelled.
            pending = [] if self._closed else self._pending
            ended, self._ended, self._pending = self._ended, [], []
        for conversation in ended:
            sampler.end_conversation(conversation)
        if left := set(ended):
            for number in [number for number, one in running.items() if one.request.conversation in left]:
                del running[number]
            pending = [one for one in pending if one.request.conversation not in left]
        running |= zip(sampler.start([one.request for one in pending]), pending, strict=True)

    def _wait_for_requests(self, queued: int, check_after: float, interrupt: Callable[[], None]) -> bool:
        """Wait, at most `check_after` seconds, until an idle sampler should start; return whether it can."""
        # The `queued` requests in the sampler wait for a conversation to end.
        with self._changed:
            while not (self._closed or self._is_complete(queued)):
                if not self._wait(self._max_wait if self._can_start(queued) else check_after, interrupt):
                    break
            return self._can_start(queued)

    def _wait(self, seconds: float, interrupt: Callable[[], None]) -> bool:
        """Wait at most `seconds` for a change; return whether there was one."""
        before, deadline = self._num_changes, time.monotonic() + seconds
        # Count changes: one that comes after the time-out of a wait and before it has the lock again wakes nobody.
        while self._num_changes == before:
            if (left := deadline - time.monotonic()) <= 0:
                return False
            if not self._changed.wait(min(left, INTERRUPT_INTERVAL)):
                # It may ask other hosts; episodes must not wait for that.
                self._changed.release()
                try:
                    interrupt()
                finally:
                    self._changed.acquire()
        return True

    def _can_start(self, queued: int) -> bool:
        return bool(self._pending or (queued and self._ended))

    def _is_complete(self, queued: int) -> bool:
        number = len(self._pending)
        return number >= self._batch_size or (self._can_start(queued) and number + queued >= self._num_episodes)


def _new_parts(
    sampler: Sampler, running: Mapping[int, _Pending], seen: dict[int, int]
) -> list[tuple[_Pending, SampledTokens]]:
    """Return the new tokens of the requests that want them, and add their number to `seen`."""
    wanted = {number: seen.get(number, 0) for number, pending in running.items() if pending.on_tokens is not None}
    parts = sampler.progress(wanted) if wanted else {}
    seen.clear()
    seen |= wanted
    for number, part in parts.items():
        seen[number] += len(part.token_ids)
    return [(running[number], part) for number, part in parts.items()]


def _deliver(ended: Sequence[tuple[_Pending, Generation]], parts: Sequence[tuple[_Pending, SampledTokens]]) -> None:
    for pending, part in parts:
        if not pending.answer.done() and pending.on_tokens is not None:
            pending.on_tokens(part)
    for pending, generation in ended:
        if not pending.answer.done():
            pending.answer.set_result(generation)
