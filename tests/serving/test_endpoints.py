# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import ClientDisconnect, Request

from marin_rl.serving.endpoints import Endpoints
from marin_rl.serving.engine import EngineRequest
from marin_rl.serving.protocol import RequestLimits
from marin_rl.serving.text import TextPart
from tests.serving import serving_cases


@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_a_response_whose_client_leaves_before_its_last_choice_is_discarded(endpoint: str):
    bodies = {
        "completions": {"prompt": "a", "n": 2},
        "chat": {"messages": [{"role": "user", "content": "a"}], "n": 2},
        "generate": {"token_ids": [1], "sampling_params": {"n": 2}},
    }
    asked: list[str] = []
    discarded: list[str] = []

    async def ask() -> None:
        is_first_done = asyncio.Event()
        body = json.dumps({"model": "m", **bodies[endpoint]}).encode()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict:
            if (message := next(messages, None)) is not None:
                return message
            await is_first_done.wait()
            return {"type": "http.disconnect"}

        async def reply(request: EngineRequest) -> TextPart:
            asked.append(request.response_id)
            if len(asked) > 1:
                await asyncio.Event().wait()
            is_first_done.set()
            return TextPart("b", (1,), (0.0,), "stop")

        async def stream(request: EngineRequest) -> AsyncGenerator[TextPart, None]:
            yield await reply(request)

        endpoints = Endpoints(
            reply=reply,
            stream=stream,
            tokenizer=serving_cases.TOKENIZER,
            chat_prompt=serving_cases.TOKENIZER.prompt_tokens,
            piece=lambda token: b"",
            limits=RequestLimits(100, max_new_tokens=8, max_choices=2, vocab_size=300, stop_token_ids=frozenset()),
            max_body_bytes=1000,
            body_seconds=serving_cases.TIMEOUT,
            discard=discarded.append,
        )
        headers = [(b"content-type", b"application/json")]
        await getattr(endpoints, endpoint)(Request({"type": "http", "method": "POST", "headers": headers}, receive))

    with pytest.raises(ClientDisconnect):
        asyncio.run(ask())
    assert len(asked) == 2
    assert len(set(asked)) == 1
    assert discarded == asked[:1]
