# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import json
import re
import threading
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from marin_rl.serving.endpoints import Endpoints, reading_threads
from marin_rl.serving.engine import EngineRequest
from marin_rl.serving.json_body import ApiError
from marin_rl.serving.protocol import RequestLimits
from marin_rl.serving.text import TextPart
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.serving import serving_cases


def endpoints_of(
    reply: Callable[[EngineRequest], Coroutine[Any, Any, TextPart]],
    tokenizer: ChatTokenizer = serving_cases.TOKENIZER,
    discard: Callable[[str, int], None] = lambda completion, sent: None,
    max_body_bytes: int = 1000,
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
        limits=RequestLimits(2000, 8, max_choices=2, vocab_size=300, stop_token_ids=frozenset(), longest_token=13),
        max_body_bytes=max_body_bytes,
        body_seconds=serving_cases.TIMEOUT,
        threads=reading_threads(),
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

        endpoints = endpoints_of(reply, discard=lambda completion, sent: discarded.append(completion))
        await getattr(endpoints, endpoint)(request_of({"model": "m", **bodies[endpoint]}, receive))

    with pytest.raises(ClientDisconnect):
        asyncio.run(ask())
    assert len(asked) == 2
    assert len(set(asked)) == 1
    assert discarded == asked[:1]


async def never(*_: object) -> Any:
    await asyncio.Event().wait()


class Refusing:
    """A tokenizer that must not be called."""

    def tokenizer(self, text: str) -> Any:
        pytest.fail(f"tokenized {text[:10]}")

    def prompt_tokens(self, messages: Any) -> Any:
        pytest.fail("a chat was tokenized")


USER = {"role": "user", "content": "a"}
TOO_LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": ("completions", {"prompt": ["a"] * 200_001}, "the body has 200006 texts, keys, lists"),
    "prompts of a short body": ("completions", {"prompt": ["a"] * 3}, "3 prompts with n: 1 are 3 sequences"),
    "long prompts": ("completions", {"prompt": ["ab" * 9000] * 3}, "3 prompts with n: 1 are 3 sequences"),
    "choices": ("completions", {"prompt": ["a"], "n": 10**9}, "are 1000000000 sequences"),
    "digits of n": ("completions", {"prompt": ["a"], "n": 10**4000}, "n: Input should be less than"),
    "choices of a chat": ("chat", {"messages": [USER], "n": 3}, "1 prompts with n: 3 are 3 sequences"),
    "text": ("completions", {"prompt": "ab" * 50_000}, "prompt has 100000 characters, at least 7693 tokens"),
    "one of the texts": ("completions", {"prompt": ["a", "b" * 26_001]}, "prompt has 26001 characters"),
    "tokens": ("completions", {"prompt": [1] * 2001}, "prompt has 2001 tokens, at least 2001 tokens"),
    "lists of tokens": ("completions", {"prompt": [[1], [1] * 2001]}, "prompt has 2001 tokens"),
    "generate": ("generate", {"token_ids": [1] * 2001, "sampling_params": {}}, "token_ids has 2001 tokens"),
    "messages": ("chat", {"messages": [USER] * 2001}, "messages has 2001 messages, at least 2001 tokens"),
    "text of messages": ("chat", {"messages": [{"role": "user", "content": "ab" * 9000}] * 2}, "messages has 36000"),
    "parts": (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}] * 9000}]},
        "messages has 27000 characters",
    ),
    "tool calls": (
        "chat",
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f" * 100}}] * 300}]},
        "messages has",
    ),
    "arguments": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 140_000}}]}]},
        "the text of arguments in messages[0].tool_calls has 140000 texts",
    ),
    "tools": ("chat", {"messages": [USER], "tools": [{"type": "function", "function": {}}] * 129}, "tools: List"),
    "size of a tool": (
        "chat",
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": "ab" * 14_000}}]},
        "messages has",
    ),
    "parameters": (
        "completions",
        {"prompt": "a", **dict.fromkeys(map(str, range(127)))},
        "the body has 129 parameters",
    ),
    "stream options": (
        "completions",
        {"prompt": "a", "stream": True, "stream_options": dict.fromkeys(map(str, range(129)), 1)},
        "stream_options has 129 parameters",
    ),
    "sampling params": (
        "generate",
        {"token_ids": [1], "sampling_params": dict.fromkeys(map(str, range(129)))},
        "sampling_params has 129 parameters",
    ),
    "stops": ("completions", {"prompt": "a", "stop": ["b"] * 17}, "stop: must be at most 16 texts of at most 1000"),
    "characters of a stop": ("completions", {"prompt": "a", "stop": "b" * 1001}, "stop: must be at most 16 texts"),
    "stop tokens": ("completions", {"prompt": "a", "stop_token_ids": [1] * 1001}, "stop_token_ids: List should have"),
    "logit bias": ("completions", {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(9000)), 1)}, "logit_bias"),
    "metadata": ("completions", {"prompt": "a", "metadata": [""] * 140_000}, "the body has 140007 texts"),
    "a list in a prompt": ("completions", {"prompt": [1, [2]]}, "prompt: it must be a text or a list of token ids"),
    "lists in a list": ("completions", {"prompt": [[1], [2, [3]]]}, "prompt: it must be a text or a list of token ids"),
    "lists in lists": ("completions", {"prompt": [[[1]]]}, "prompt: it must be a text or a list of token ids"),
    "wrong items": ("completions", {"prompt": [0.5] * 9000}, "prompt: it must be a text or a list of token ids"),
    "wrong stops": ("completions", {"prompt": "a", "stop": [1] * 9000}, "stop.0: Input should be a valid string"),
    "wrong messages": ("chat", {"messages": [1] * 9000}, "messages.0: Input should be a valid dictionary"),
    "name of the model": ("completions", {"prompt": "a", "model": "m" * 10**5}, "model: String should have at most"),
    "role": ("chat", {"messages": [{"role": "r" * 10**5, "content": "a"}]}, "messages[0].role is 'rrr"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_request_beyond_a_limit_is_refused_before_it_is_tokenized_or_accepted(name: str):
    endpoint, body, message = TOO_LARGE[name]
    endpoints = endpoints_of(never, Refusing(), max_body_bytes=10**7)  # type: ignore[arg-type]
    endpoints = dataclasses.replace(endpoints, admit=lambda sequences: pytest.fail("accepted"))
    with pytest.raises(ApiError, match=re.escape(message)) as raised:
        asyncio.run(getattr(endpoints, endpoint)(request_of({"model": "m", **body}, never)))
    assert raised.value.status in (400, 413)
    assert len(json.dumps(raised.value.body())) < 3000


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_tokenization_of_a_client_that_left_ends_after_the_prompt_in_progress(endpoint: str):
    is_tokenizing, may_end = threading.Event(), threading.Event()
    calls: list[int] = []

    def tokenize(given: Any) -> Any:
        calls.append(threading.get_ident())
        is_tokenizing.set()
        assert may_end.wait(serving_cases.TIMEOUT)
        return (1,) if endpoint == "chat" else {"input_ids": [1]}

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(is_tokenizing.wait)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        stub: Any = types.SimpleNamespace(tokenizer=tokenize, prompt_tokens=tokenize)
        endpoints = endpoints_of(never, stub, max_body_bytes=10**6)
        text = "ab" * 9000
        bodies = {"completions": {"prompt": [text, text]}, "chat": {"messages": [{"role": "user", "content": text}]}}
        with pytest.raises(ClientDisconnect):
            await getattr(endpoints, endpoint)(request_of({"model": "m", **bodies[endpoint]}, receive))
        may_end.set()
        endpoints.threads.shutdown()

    asyncio.run(ask())
    assert len(calls) == 1
    assert calls != [threading.get_ident()]


def test_prompts_of_long_requests_take_turns():
    """A request with many prompts does not keep another one waiting until its end."""
    order: list[str] = []

    def tokenize(text: str) -> Any:
        order.append(text[0])
        return {"input_ids": [1]}

    async def ask() -> None:
        stub: Any = types.SimpleNamespace(tokenizer=tokenize, prompt_tokens=tokenize)
        endpoints = endpoints_of(reply_at_once, stub, max_body_bytes=10**6)
        limits = endpoints.limits._replace(max_choices=20)
        endpoints = dataclasses.replace(endpoints, limits=limits, threads=ThreadPoolExecutor(1))

        async def complete(letter: str, number: int) -> None:
            body = {"model": "m", "prompt": [letter * 17_000] * number}
            await endpoints.completions(request_of(body, never))

        await asyncio.gather(complete("a", 20), complete("b", 1))

    asyncio.run(ask())
    assert order.index("b") <= 2
    assert len(order) == 21


async def reply_at_once(request: EngineRequest) -> TextPart:
    return TextPart((1,), (0.0,), "b", "stop")


def test_a_choice_that_a_client_has_not_received_is_discarded():
    """Two choices of a stream: the client takes the first and leaves."""
    discarded: list[tuple[bool, int]] = []

    async def ask() -> None:
        has_first = asyncio.Event()

        async def reply(request: EngineRequest) -> TextPart:
            if has_first.is_set():
                await asyncio.Event().wait()
            has_first.set()
            return await reply_at_once(request)

        async def receive() -> dict[str, Any]:
            await has_sent.wait()
            return {"type": "http.disconnect"}

        has_sent = asyncio.Event()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message.get("body"):
                has_sent.set()

        endpoints = endpoints_of(reply, discard=lambda id, sent: discarded.append((bool(id), sent)))
        request = request_of({"model": "m", "prompt": "a", "n": 2, "stream": True}, receive)
        response = await endpoints.completions(request)
        await response(request.scope, receive, send)

    asyncio.run(ask())
    assert discarded == [(True, 1)]


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
