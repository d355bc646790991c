# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.sampling.sampler import SampleRequest, SamplerError
from marin_rl.serving.bodies import ApiError
from marin_rl.serving.openai.engine import Engine, EngineRequest
from marin_rl.serving.text import TextPart, join_parts
from marin_rl.types import Generation
from tests.scripted_sampler import BatchSampler, TokenSampler


def decode(tokens: Sequence[int], skip_special_tokens: bool) -> str:
    return bytes(tokens).decode()


def request(text: str) -> EngineRequest:
    return EngineRequest(SampleRequest(tuple(text.encode()), seed=0, max_new_tokens=3))


@contextlib.contextmanager
def running(engine: Engine):
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


async def text_of(engine: Engine, one: EngineRequest) -> str:
    async with contextlib.aclosing(engine.reply(one, streamed=True)) as parts:
        return "".join([part.text async for part in parts])


async def whole(engine: Engine, one: EngineRequest) -> TextPart:
    async with contextlib.aclosing(engine.reply(one, streamed=False)) as parts:
        return join_parts([part async for part in parts])


class Broken(BatchSampler):
    def answer(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        raise SamplerError("the weights are NaN")


def test_a_failure_of_the_sampler_fails_all_requests_and_is_reported():
    calls = []
    engine = Engine(Broken(4), decode)
    engine.on_failure = lambda: calls.append(str(engine.failure))

    async def ask() -> list[str | BaseException]:
        asked = [text_of(engine, request(text)) for text in ("ab", "cd")]
        return await asyncio.gather(*asked, return_exceptions=True)

    with running(engine):
        found = asyncio.run(ask())
        assert [str(error) for error in found] == ["the sampler has stopped: the weights are NaN"] * 2
        with pytest.raises(ApiError, match="the weights are NaN"):
            asyncio.run(text_of(engine, request("ab")))
    assert calls == ["the weights are NaN"]
    assert engine.in_progress == 0


def test_parts_have_the_versions_of_their_weights():
    """The letters change weights after every second one."""

    async def ask(engine: Engine) -> list[TextPart]:
        async with contextlib.aclosing(engine.reply(request("a"), streamed=True)) as parts:
            return [part async for part in parts]

    with running(Engine(TokenSampler(length=5, tokens_per_version=2), decode)) as engine:
        parts = asyncio.run(ask(engine))
        joined = asyncio.run(whole(engine, request("a")))
    assert "".join(part.text for part in parts) == joined.text == "abcde"
    for part in parts:
        assert part.weight_versions == (0, (part.token_ids[-1] - ord("a")) // 2)
    assert joined.weight_versions == (0, 2)


def test_a_stop_text_ends_a_reply_and_its_versions():
    cut = dataclasses.replace(request("a"), stop=("d",))
    with running(Engine(TokenSampler(length=9, tokens_per_version=2), decode)) as engine:
        part = asyncio.run(whole(engine, cut))
    assert (part.text, part.finish_reason, part.weight_versions) == ("abc", "stop", (0, 1))


def test_a_slow_caller_gets_the_parts_joined():
    """The sampler never waits for the caller."""
    sampler = TokenSampler(length=20)

    async def ask(engine: Engine) -> list[str]:
        async with contextlib.aclosing(engine.reply(request("a"), streamed=True)) as parts:
            texts = [(await anext(parts)).text]
            while not sampler.is_idle:
                await asyncio.sleep(0)
            return [*texts, *[part.text async for part in parts]]

    with running(Engine(sampler, decode)) as engine:
        texts = asyncio.run(ask(engine))
    assert "".join(texts) == "abcdefghijklmnopqrst"
    assert len(texts) <= 4
