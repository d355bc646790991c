# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The endpoints without a sampler or a network: limits, and clients that leave."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from marin_rl.serving.bodies import ApiError
from marin_rl.serving.openai.app import Admission, limited_app
from marin_rl.serving.openai.endpoints import Endpoints
from marin_rl.serving.openai.engine import EngineRequest
from marin_rl.serving.openai.protocol import RequestLimits
from marin_rl.serving.text import TextPart
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.serving import serving_cases

LIMITS = RequestLimits(2000, 8, max_choices=2, vocab_size=300, stop_token_ids=frozenset(), longest_token=13)
MESSAGES = [{"role": "user", "content": "a"}]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/inference/v1/generate"}


async def never() -> Any:
    await asyncio.Event().wait()


async def reply_at_once(request: EngineRequest) -> TextPart:
    return TextPart((1,), (0.0,), "b", "stop")


class StubTokenizer:
    """Tokenizes texts and chats with a function."""

    def __init__(self, tokenize: Callable[[Any], tuple[int, ...]]) -> None:
        self.prompt_tokens = tokenize
        self.tokenizer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(serving_cases.TOKENIZER.tokenizer, name)

    def __len__(self) -> int:
        return len(serving_cases.TOKENIZER.tokenizer)

    def __call__(self, text: str) -> dict[str, Any]:
        return {"input_ids": self.prompt_tokens(text)}


def tokenize_nothing(given: Any) -> tuple[int, ...]:
    pytest.fail(f"tokenized {given!r:.20}")


@dataclasses.dataclass
class StubPolicy:
    """A policy with this reply to each request."""

    answer: Callable[[EngineRequest], Awaitable[TextPart]] = reply_at_once
    tokenizer: Any = serving_cases.TOKENIZER
    model = "m"
    temperature = None

    def __post_init__(self) -> None:
        self.discarded: list[tuple[str, int]] = []
        self.num_accepted = 0

    def check_model(self, name: str | None) -> None:
        """Accept all."""

    def chat_prompt(self, messages: Any) -> tuple[int, ...]:
        return self.tokenizer.prompt_tokens(messages)

    async def admit(self, num_sequences: int, num_prompt_tokens: int) -> None:
        self.num_accepted += num_sequences

    async def refuse(self, error: ApiError) -> None:
        """Do nothing."""

    async def reply(self, request: EngineRequest, *, streamed: bool) -> AsyncGenerator[TextPart, None]:
        yield await self.answer(request)

    def discard(self, response_id: str, num_sent: int) -> None:
        self.discarded.append((response_id, num_sent))


class App:
    """The application of a policy."""

    def __init__(self, policy: StubPolicy, limits: RequestLimits = LIMITS) -> None:
        endpoints = Endpoints(policy.tokenizer, limits, 10**7, serving_cases.TIMEOUT)
        self.admission = Admission({})
        self._app = limited_app(endpoints.routes("", lambda request: policy), self.admission)

    async def ask(
        self,
        endpoint: str,
        body: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]] = never,
        on_body: Callable[[], None] = lambda: None,
    ) -> tuple[int | None, str]:
        """Return status and text of the response to a client that sends this body, and then what `receive` returns."""
        data = json.dumps(body if endpoint == "generate" else {"model": "m", **body}).encode()
        first = iter([{"type": "http.request", "body": data, "more_body": False}])
        status: int | None = None
        sent = b""

        async def receive_body() -> dict[str, Any]:
            message = next(first, None)
            return await receive() if message is None else message

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += message.get("body", b"")
            if message.get("body"):
                on_body()

        path = PATHS[endpoint]
        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}
        await self._app(scope, receive_body, send)
        return status, sent.decode()


async def leaves(event: asyncio.Event) -> dict[str, Any]:
    await event.wait()
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("endpoint", PATHS)
def test_a_response_whose_client_leaves_before_its_last_choice_is_discarded(endpoint: str):
    bodies = {
        "completions": {"prompt": "a", "n": 2},
        "chat": {"messages": MESSAGES, "n": 2},
        "generate": {"token_ids": [1], "sampling_params": {"n": 2}},
    }
    asked: list[str] = []

    async def ask() -> StubPolicy:
        is_first_done = asyncio.Event()

        async def reply(request: EngineRequest) -> TextPart:
            asked.append(request.response_id)
            if len(asked) > 1:
                await never()
            is_first_done.set()
            return await reply_at_once(request)

        policy = StubPolicy(reply)
        app = App(policy)
        assert await app.ask(endpoint, bodies[endpoint], lambda: leaves(is_first_done)) == (None, "")
        assert not any(app.admission.used.values())
        return policy

    policy = asyncio.run(ask())
    assert len(asked) == 2
    assert policy.discarded == [(asked[0], 0)]
    assert asked[0] == asked[1]


def test_a_choice_that_a_client_has_not_received_is_discarded():
    """Two choices of a stream: the client takes the first and leaves."""

    async def ask() -> StubPolicy:
        has_first, has_sent = asyncio.Event(), asyncio.Event()

        async def reply(request: EngineRequest) -> TextPart:
            if has_first.is_set():
                await never()
            has_first.set()
            return await reply_at_once(request)

        policy = StubPolicy(reply)
        body = {"prompt": "a", "n": 2, "stream": True}
        app = App(policy)
        await app.ask("completions", body, lambda: leaves(has_sent), on_body=has_sent.set)
        assert not any(app.admission.used.values())
        return policy

    assert [sent for _, sent in asyncio.run(ask()).discarded] == [1]


@pytest.mark.parametrize("streamed", [False, True])
def test_all_choices_of_a_response_with_an_error_are_discarded(streamed: bool):
    async def ask() -> tuple[StubPolicy, int | None, str]:
        asked: list[EngineRequest] = []

        async def reply(request: EngineRequest) -> TextPart:
            asked.append(request)
            if len(asked) == 2:
                raise ApiError("no tokens are left", code="rollout_limit_exceeded")
            return await reply_at_once(request)

        policy = StubPolicy(reply)
        return policy, *await App(policy).ask("completions", {"prompt": "a", "n": 2, "stream": streamed})

    policy, status, text = asyncio.run(ask())
    assert status == (200 if streamed else 400)
    error = json.loads(text.rpartition("data: ")[2])["error"]
    assert (error["message"], error["code"]) == ("no tokens are left", "rollout_limit_exceeded")
    assert [sent for _, sent in policy.discarded] == [0]


UNKNOWN = dict.fromkeys(map(str, range(50_000)), 1)
TOO_LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": ("completions", {"prompt": ["a"] * 200_001}, "the body has 200006 texts, keys, lists"),
    "long prompts": ("completions", {"prompt": ["ab" * 9000] * 3}, "3 prompts with n: 1 are 3 sequences"),
    "choices": ("completions", {"prompt": ["a"], "n": 10**9}, "are 1000000000 sequences"),
    "digits of n": ("completions", {"prompt": ["a"], "n": 10**4000}, "n: Input should be less than"),
    "text": ("completions", {"prompt": "ab" * 50_000}, "prompt has 100000 characters, at least 7693 tokens"),
    "lists of tokens": ("completions", {"prompt": [[1], [1] * 2001]}, "prompt has 2001 tokens"),
    "generate": ("generate", {"token_ids": [1] * 2001, "sampling_params": {}}, "token_ids has 2001 tokens"),
    "messages": ("chat", {"messages": MESSAGES * 2001}, "messages has 2001 messages, at least 2001 tokens"),
    "text of messages": ("chat", {"messages": [{"role": "user", "content": "ab" * 9000}] * 2}, "messages has 36000"),
    "parts": (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}] * 9000}]},
        "messages has 27000 characters",
    ),
    "tool calls": (
        "chat",
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": "f" * 100}}] * 300}]},
        "messages has",
    ),
    "arguments": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 140_000}}]}]},
        "the text of arguments in messages[0].tool_calls has 140000 texts",
    ),
    "tools": ("chat", {"messages": MESSAGES, "tools": [{"type": "function", "function": {}}] * 129}, "tools: List"),
    "size of a tool": (
        "chat",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "f", "description": "ab" * 14_000}}],
        },
        "messages has",
    ),
    "parameters": ("completions", {"prompt": "a", **UNKNOWN}, "0: it is not a parameter of this server"),
    "stream options": (
        "completions",
        {"prompt": "a", "stream": True, "stream_options": UNKNOWN},
        "stream_options.0: it is not a parameter",
    ),
    "sampling params": ("generate", {"token_ids": [1], "sampling_params": UNKNOWN}, "sampling_params.0: it is not"),
    "stops": ("completions", {"prompt": "a", "stop": ["b"] * 17}, "stop: List should have at most 16 items"),
    "characters of a stop": (
        "completions",
        {"prompt": "a", "stop": "b" * 1001},
        "stop.0: String should have at most 1000",
    ),
    "stop tokens": ("completions", {"prompt": "a", "stop_token_ids": [1] * 1001}, "stop_token_ids: List should have"),
    "metadata": ("completions", {"prompt": "a", "metadata": [""] * 140_000}, "the body has 140007 texts"),
    "a list in a prompt": ("completions", {"prompt": [1, [2]]}, "prompt: it must be a text or a list of token ids"),
    "lists in a list": ("completions", {"prompt": [[1], [2, [3]]]}, "prompt: it must be a text or a list of token ids"),
    "wrong items": ("completions", {"prompt": [0.5] * 9000}, "prompt: it must be a text or a list of token ids"),
    "wrong stops": ("completions", {"prompt": "a", "stop": [1] * 9000}, "stop.0: Input should be a valid string"),
    "wrong messages": ("chat", {"messages": [1] * 9000}, "messages.0: Input should be a valid dictionary"),
    "name of the model": ("completions", {"prompt": "a", "model": "m" * 10**5}, "model: String should have at most"),
    "role": ("chat", {"messages": [{"role": "r" * 10**5, "content": "a"}]}, "messages[0].role is 'rrr"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_request_beyond_a_limit_is_refused_before_it_is_tokenized_or_accepted(name: str):
    endpoint, body, message = TOO_LARGE[name]
    policy = StubPolicy(tokenizer=StubTokenizer(tokenize_nothing))
    status, text = asyncio.run(App(policy).ask(endpoint, body))
    assert status in (400, 413)
    assert message in json.loads(text)["error"]["message"]
    assert policy.num_accepted == 0
    assert len(text) < 3000


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_tokenization_of_a_client_that_left_ends_after_the_prompt_in_progress(endpoint: str):
    is_tokenizing, may_end = threading.Event(), threading.Event()
    calls: list[int] = []

    def tokenize(given: Any) -> tuple[int, ...]:
        calls.append(threading.get_ident())
        is_tokenizing.set()
        assert may_end.wait(serving_cases.TIMEOUT)
        return (1,)

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(is_tokenizing.wait)
        return {"type": "http.disconnect"}

    async def ask() -> None:
        text = "ab" * 9000
        bodies = {"completions": {"prompt": [text, text]}, "chat": {"messages": [{"role": "user", "content": text}]}}
        assert await App(StubPolicy(tokenizer=StubTokenizer(tokenize))).ask(endpoint, bodies[endpoint], receive) == (
            None,
            "",
        )
        may_end.set()

    asyncio.run(ask())
    assert len(calls) == 1
    assert calls != [threading.get_ident()]


def test_prompts_of_long_requests_take_turns():
    """A request with many prompts does not keep another one waiting until its end."""
    order: list[str] = []

    def tokenize(text: str) -> tuple[int, ...]:
        order.append(text[0])
        return (1,)

    async def ask() -> None:
        app = App(StubPolicy(tokenizer=StubTokenizer(tokenize)), LIMITS._replace(max_choices=20))

        def complete(letter: str, number: int) -> Awaitable[tuple[int | None, str]]:
            return app.ask("completions", {"prompt": [letter * 17_000] * number})

        await asyncio.gather(complete("a", 20), complete("b", 1))
        assert not any(app.admission.used.values())

    asyncio.run(ask())
    assert order.index("b") <= 4
    assert len(order) == 21


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("opening", "thoughts", "num_calls"), [("<think>\n", "Hm: ", 0), ("<think>", "a</think>", 1)])
def test_thoughts_that_the_template_opens_have_no_calls(streamed: bool, opening: str, thoughts: str, num_calls: int):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|assistant|>'", repr(f"<|assistant|>{opening}"))
    text = thoughts + '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    body = {"messages": MESSAGES, "stream": streamed, "tools": [{"type": "function", "function": {"name": "f"}}]}

    async def reply(request: EngineRequest) -> TextPart:
        return TextPart((1,), (0.0,), text, "stop")

    policy = StubPolicy(reply, ChatTokenizer(tokenizer))
    _, answer = asyncio.run(App(policy).ask("chat", body))
    [choice] = json.loads(answer.removeprefix("data: ").partition("\n")[0])["choices"]
    message = choice["delta" if streamed else "message"]
    assert len(message.get("tool_calls", [])) == num_calls
    assert message["content"] == (thoughts if num_calls else text)
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")
