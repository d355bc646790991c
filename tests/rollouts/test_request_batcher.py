# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.timing import PhaseTimer
from marin_rl.types import Generation, StopReason


class Rounds:
    """A sampler that echoes prompts, and keeps who shared a round with whom."""

    def __init__(self, batch_size: int, before: Callable[[Sequence[int]], None] = lambda names: None) -> None:
        self.batch_size = batch_size
        self.rounds: list[list[int]] = []
        self._before = before

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        names = [request.prompt_tokens[0] for request in requests]
        self.rounds.append(names)
        self._before(names)
        return [Generation((name,), (-1.0,), StopReason.STOP, 0, 0) for name in names]


def request(name: int) -> SampleRequest:
    return SampleRequest((name,), seed=0, max_new_tokens=1)


def serve(
    sampler: Rounds,
    *episodes,
    check: Callable[[], None] = lambda: None,
    patience: float = 60.0,
    max_wait: float = 60.0,
    interrupt: Callable[[], None] = lambda: None,
):
    """Run the episodes, sample for them, and say what each returned."""
    desk = RequestBatcher(sampler.batch_size, len(episodes), max_wait)
    loop = BackgroundLoop()

    async def everything() -> list:
        return await asyncio.gather(*(present(episode) for episode in episodes))

    async def present(episode):
        try:
            return await episode(desk)
        finally:
            desk.leave()

    playing = loop.submit(everything())
    playing.add_done_callback(lambda _: desk.close())
    try:
        desk.serve(sampler, PhaseTimer(), check, patience, interrupt)
        return playing.result()
    finally:
        loop.close()


def asks(*names: int):
    async def episode(desk: RequestBatcher) -> list[int]:
        return [(await desk.sample(request(name))).token_ids[0] for name in names]

    return episode


def test_a_round_waits_for_all_who_are_there_and_each_gets_its_own_answer():
    sampler = Rounds(batch_size=100)
    answers = serve(sampler, asks(1, 11), asks(2), asks(3, 13, 23))
    assert answers == [[1, 11], [2], [3, 13, 23]]
    assert [sorted(names) for names in sampler.rounds] == [[1, 2, 3], [11, 13], [23]]


def test_a_full_round_is_answered_and_the_rest_waits_for_the_next():
    sampler = Rounds(batch_size=2)
    answers = serve(sampler, *(asks(name) for name in range(5)))
    assert answers == [[name] for name in range(5)]
    assert sorted(map(len, sampler.rounds)) == [1, 2, 2]


def test_one_that_is_busy_elsewhere_holds_up_nobody():
    """The busy one goes on only after the others were answered: who waited for it would wait for ever."""
    answered = threading.Event()

    async def busy(desk: RequestBatcher) -> list[int]:
        await asyncio.to_thread(answered.wait)
        return [(await desk.sample(request(9))).token_ids[0]]

    sampler = Rounds(batch_size=100, before=lambda names: answered.set() if 2 in names else None)
    assert serve(sampler, asks(1, 2), busy, max_wait=0.01) == [[1, 2], [9]]
    assert sampler.rounds == [[1], [2], [9]]


def test_work_beside_the_sampler_goes_on_while_it_samples():
    """The round ends only after the other episode's tool has done its work."""
    worked = threading.Event()

    async def tool(desk: RequestBatcher) -> list[int]:
        answer = (await desk.sample(request(1))).token_ids[0]
        worked.set()
        return [answer]

    def before(names: Sequence[int]) -> None:
        if names == [2]:
            assert worked.wait(60)

    sampler = Rounds(batch_size=1, before=before)

    assert serve(sampler, tool, asks(2)) == [[1], [2]]


def test_those_who_join_later_are_waited_for():
    async def brings_another(desk: RequestBatcher) -> list[int]:
        first = (await desk.sample(request(1))).token_ids[0]
        desk.join(1)
        try:
            return [first, *await asyncio.gather(asks(2)(desk), asks(3)(desk))]
        finally:
            desk.leave()

    sampler = Rounds(batch_size=100)
    assert serve(sampler, brings_another) == [[1, [2], [3]]]
    assert [sorted(names) for names in sampler.rounds] == [[1], [2, 3]]


def test_what_the_sampler_raises_is_passed_on():
    def broken(names: Sequence[int]) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        serve(Rounds(4, broken), asks(1), asks(2))


def test_where_all_was_given_up_those_who_still_waited_are_not_sampled_for():
    asleep = threading.Event()

    class Condition(threading.Condition):
        """Tells when somebody begins to wait for it."""

        def wait(self, timeout: float | None = None) -> bool:
            asleep.set()
            return super().wait(timeout)

    async def raises(desk: RequestBatcher) -> None:
        await asyncio.to_thread(asleep.wait)
        raise ValueError("the reward of this one is no number")

    async def everything() -> None:
        async with asyncio.TaskGroup() as episodes:
            for episode in (asks(1), asks(2), raises):
                episodes.create_task(episode(desk))

    sampler, desk, loop = Rounds(4), RequestBatcher(4, 3, max_wait=60.0), BackgroundLoop()
    desk._changed = Condition()
    playing = loop.submit(everything())
    playing.add_done_callback(lambda _: desk.close())
    desk.serve(sampler, PhaseTimer(), lambda: None, 60.0)
    loop.close()
    assert isinstance(playing.exception(), ExceptionGroup)
    assert sampler.rounds == []


def test_somebody_looks_where_nothing_happens():
    release = threading.Event()

    async def quiet(desk: RequestBatcher) -> None:
        await asyncio.to_thread(release.wait)

    serve(Rounds(4), quiet, check=release.set, patience=0.01)
    assert release.is_set()


def test_an_interrupt_ends_the_wait_for_an_episode_that_never_asks():
    waiting = threading.Event()

    async def stuck(desk: RequestBatcher) -> None:
        waiting.set()
        await asyncio.Event().wait()

    def interrupt() -> None:
        if waiting.is_set():
            raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        serve(Rounds(4), stuck, interrupt=interrupt, patience=3600.0)


def test_an_interrupt_ends_sampling_between_two_rounds():
    sampler = Rounds(batch_size=1)

    def interrupt() -> None:
        if sampler.rounds:
            raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        serve(sampler, asks(1, 2, 3), interrupt=interrupt)
    assert sampler.rounds == [[1]]
