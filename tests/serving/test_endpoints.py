# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from marin_rl.serving.endpoints import Endpoints
from marin_rl.serving.engine import EngineRequest
from marin_rl.serving.protocol import RequestLimits
from marin_rl.serving.text import TextPart
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.serving import serving_cases


def endpoints_of(
    reply: Callable[[EngineRequest], Coroutine[Any, Any, TextPart]],
    tokenizer: ChatTokenizer = serving_cases.TOKENIZER,
    discard: Callable[[str], None] = lambda completion: None,
) -> Endpoints:
    """Endpoints with this reply to each request."""

    async def stream(request: EngineRequest) -> AsyncGenerator[TextPart, None]:
        yield await reply(request)

    return Endpoints(
        reply=reply,
        stream=stream,
        tokenizer=tokenizer,
        chat_prompt=tokenizer.prompt_tokens,
        piece=lambda token: b"",
        limits=RequestLimits(2000, max_new_tokens=8, max_choices=2, vocab_size=300, stop_token_ids=frozenset()),
        max_body_bytes=1000,
        body_seconds=serving_cases.TIMEOUT,
        discard=discard,
    )


def request_of(body: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]]) -> Request:
    """A request whose client sends this body, and then what `receive` returns."""
    first = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive_body() -> dict[str, Any]:
        message = next(first, None)
        return await receive() if message is None else message

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive_body)


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

        async def receive() -> dict[str, Any]:
            await is_first_done.wait()
            return {"type": "http.disconnect"}

        async def reply(request: EngineRequest) -> TextPart:
            asked.append(request.response_id)
            if len(asked) > 1:
                await asyncio.Event().wait()
            is_first_done.set()
            return TextPart((1,), (0.0,), "b", "stop")

        endpoints = endpoints_of(reply, discard=discarded.append)
        await getattr(endpoints, endpoint)(request_of({"model": "m", **bodies[endpoint]}, receive))

    with pytest.raises(ClientDisconnect):
        asyncio.run(ask())
    assert len(asked) == 2
    assert len(set(asked)) == 1
    assert discarded == asked[:1]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("opening", "thoughts", "num_calls"), [("<think>\n", "Hm: ", 0), ("<think>", "a</think>", 1)])
def test_thoughts_that_the_template_opens_have_no_calls(streamed: bool, opening: str, thoughts: str, num_calls: int):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|assistant|>'", repr(f"<|assistant|>{opening}"))
    text = thoughts + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": streamed}
    tools = [{"type": "function", "function": {"name": "f"}}]
    sent: list[bytes] = []

    async def reply(request: EngineRequest) -> TextPart:
        return TextPart((1,), (0.0,), text, "stop")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def ask() -> None:
        request = request_of({**body, "tools": tools}, receive)
        response = await endpoints_of(reply, ChatTokenizer(tokenizer)).chat(request)
        await response(request.scope, receive, send)

    asyncio.run(ask())
    [choice] = json.loads(next(filter(None, sent)).removeprefix(b"data: "))["choices"]
    message = choice["delta" if streamed else "message"]
    assert len(message.get("tool_calls", [])) == num_calls
    assert message["content"] == (thoughts if num_calls else text)
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
