# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import itertools
import threading
import types
from collections.abc import Callable, Sequence

import pytest

from marin_rl.rollouts import request_batcher
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.types import Generation, StopReason
from marin_rl.utils.event_loop import BackgroundLoop
from marin_rl.utils.timing import PhaseTimer
from tests.scripted_sampler import BatchSampler, TokenSampler


class RecordingSampler(BatchSampler):
    """A sampler that returns the prompts and records its batches."""

    def __init__(self, batch_size: int, before: Callable[[Sequence[int]], None] = lambda names: None) -> None:
        super().__init__(batch_size)
        self.batches: list[list[int]] = []
        self._before = before

    def answer(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        names = [request.prompt_tokens[0] for request in requests]
        self.batches.append(names)
        self._before(names)
        return [Generation((name,), (-1.0,), StopReason.STOP, 0, 0) for name in names]


def request(name: int) -> SampleRequest:
    return SampleRequest((name,), seed=0, max_new_tokens=1)


def serve(
    sampler: RecordingSampler,
    *episodes,
    check: Callable[[], None] = lambda: None,
    check_after: float = 60.0,
    max_wait: float = 60.0,
    interrupt: Callable[[], None] = lambda: None,
):
    """Run the episodes, sample for them, and return their results. The conversation of an episode is its index."""
    batcher = RequestBatcher(sampler.batch_size, len(episodes), max_wait)
    loop = BackgroundLoop()

    async def everything() -> list:
        return await asyncio.gather(*map(run, itertools.count(), episodes))

    async def run(index: int, episode):
        try:
            return await episode(batcher)
        finally:
            batcher.leave(str(index))

    running = loop.submit(everything())
    running.add_done_callback(lambda _: batcher.close())
    try:
        batcher.serve(sampler, PhaseTimer(), check, check_after, interrupt)
        return running.result()
    finally:
        loop.close()


def requests(*names: int):
    async def episode(batcher: RequestBatcher) -> list[int]:
        return [(await batcher.submit(request(name))).token_ids[0] for name in names]

    return episode


def test_a_batch_waits_for_all_episodes():
    sampler = RecordingSampler(batch_size=100)
    answers = serve(sampler, requests(1, 11), requests(2), requests(3, 13, 23))
    assert answers == [[1, 11], [2], [3, 13, 23]]
    assert [sorted(names) for names in sampler.batches] == [[1, 2, 3], [11, 13], [23]]


def test_a_full_batch_is_sampled_and_the_rest_waits():
    sampler = RecordingSampler(batch_size=2)
    answers = serve(sampler, *(requests(name) for name in range(5)))
    assert answers == [[name] for name in range(5)]
    assert sorted(map(len, sampler.batches)) == [1, 2, 2]


class OneSlot(RecordingSampler):
    """A sampler that answers a request only after the conversations before it have ended."""

    def __init__(self) -> None:
        super().__init__(batch_size=1)
        self.open: str | None = None
        self.idle_calls = 0

    @property
    def is_idle(self) -> bool:
        return self.open is not None or super().is_idle

    def advance(self) -> list[tuple[int, Generation]]:
        self.idle_calls += self.is_idle
        assert self.idle_calls < 100, "the batcher must wait while the sampler is idle"
        return [] if self.is_idle else super().advance()

    def answer(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        self.open = requests[0].conversation
        return super().answer(requests)

    def end_conversation(self, conversation: str) -> None:
        if self.open == conversation:
            self.open = None


def conversation(name: int, before_end: Callable[[], object] = lambda: None):
    """An episode that waits for `before_end` between its request and its end."""

    async def episode(batcher: RequestBatcher) -> int:
        answer = await batcher.submit(dataclasses.replace(request(name), conversation=str(name)))
        await asyncio.to_thread(before_end)
        return answer.token_ids[0]

    return episode


def test_check_is_called_while_requests_wait_for_the_end_of_a_conversation():
    """Its environment may block the event loop, so that the conversation never ends."""
    release = threading.Event()
    sampler = OneSlot()
    episodes = [conversation(name, release.wait) for name in range(3)]
    assert serve(sampler, *episodes, check=release.set, check_after=0.01, max_wait=0.01) == [0, 1, 2]
    assert len(sampler.batches) == 3


def test_waiting_requests_start_when_a_conversation_ends():
    """At once if no other episode may send a request: other waits would last longer than the test."""
    assert serve(OneSlot(), *map(conversation, range(3)), check_after=3600.0, max_wait=3600.0) == [0, 1, 2]


def test_a_request_at_the_time_out_of_a_wait_is_not_missed(monkeypatch: pytest.MonkeyPatch):
    """A notification after the time-out of `Condition.wait`, and before it has the lock again, wakes nobody."""
    allowed, sent = threading.Event(), threading.Event()

    class LateCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if allowed.is_set():
                return super().wait(timeout)
            self.release()
            allowed.set()
            sent.wait()
            self.acquire()
            return False

    async def late(batcher: RequestBatcher) -> int:
        await asyncio.to_thread(allowed.wait)
        answer = batcher.submit(request(7))
        sent.set()
        # If the request was missed, the sampler waits for an hour.
        return (await asyncio.wait_for(answer, 300.0)).token_ids[0]

    monkeypatch.setattr(request_batcher, "threading", types.SimpleNamespace(Condition=LateCondition))
    assert serve(RecordingSampler(1), late, check_after=3600.0, max_wait=3600.0) == [7]


def test_an_interrupt_ends_sampling_between_two_batches():
    sampler = RecordingSampler(batch_size=1)

    def interrupt() -> None:
        if sampler.batches:
            raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        serve(sampler, requests(1, 2, 3), interrupt=interrupt)
    assert sampler.batches == [[1]]


def test_new_requests_join_those_in_progress():
    """The first request ends only after the second one, which is sent while it is in progress, was accepted."""
    in_progress = threading.Event()

    class Continuous(RecordingSampler):
        def advance(self) -> list[tuple[int, Generation]]:
            in_progress.set()
            return super().advance() if self.accepted == 2 else []

        def start(self, requests: Sequence[SampleRequest]) -> list[int]:
            self.accepted += len(requests)
            return super().start(requests)

        accepted = 0

    async def late(batcher: RequestBatcher) -> list[int]:
        await asyncio.to_thread(in_progress.wait)
        return [(await batcher.submit(request(2))).token_ids[0]]

    sampler = Continuous(batch_size=4)
    assert serve(sampler, requests(1), late, max_wait=0.01) == [[1], [2]]
    assert sampler.batches == [[1, 2]]


def test_batcher_ends_conversations_and_resets_the_sampler():
    calls = []

    class Watched(RecordingSampler):
        def end_conversation(self, conversation: str) -> None:
            calls.append(conversation)

        def reset(self) -> None:
            calls.append("reset")

    async def second(batcher: RequestBatcher) -> None:
        await batcher.submit(request(1))
        batcher.join(1)
        batcher.leave("first")
        await batcher.submit(request(2))

    serve(Watched(batch_size=4), second)
    # The batcher may close before it passes on the end of the episode itself.
    assert calls in (["first", "reset"], ["first", "0", "reset"])


@pytest.mark.parametrize("is_last_turn", [False, True])
def test_tokens_arrive_as_they_are_sampled_and_the_last_turn_frees_its_slot(is_last_turn: bool):
    parts: list[tuple[int, ...]] = []
    ended: list[str] = []

    class Watched(TokenSampler):
        def end_conversation(self, conversation: str) -> None:
            ended.append(conversation)

    async def streamed(batcher: RequestBatcher) -> list[int]:
        named = dataclasses.replace(request(10), conversation="0")
        generation = await batcher.submit(named, lambda part: parts.append(part.token_ids), is_last_turn)
        assert ended == (["0"] if is_last_turn else [])
        return list(generation.token_ids)

    assert serve(Watched(length=4), streamed) == [[10, 11, 12, 13]]
    assert parts == [(10,), (11,), (12,)]


def test_the_request_of_an_episode_that_leaves_is_dropped():
    first_token = asyncio.Event()
    sampler = TokenSampler(length=1_000_000_000)

    async def leaves(batcher: RequestBatcher) -> bool:
        named = dataclasses.replace(request(10), conversation="x")
        sampling = batcher.submit(named, lambda part: first_token.set())
        await first_token.wait()
        sampling.cancel()
        batcher.join(1)
        batcher.leave("x")
        while not sampler.is_idle:
            await asyncio.sleep(0)
        return sampling.cancelled()

    assert serve(sampler, leaves, check_after=0.01) == [True]
