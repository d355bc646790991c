# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The endpoints that sample: OpenAI's completions and chat, and vLLM's generate, whole or as server-sent events."""

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marin_rl.event_loop import gather_all
from marin_rl.serving.engine import EngineError, EngineRequest
from marin_rl.serving.json_body import ApiError, read_object
from marin_rl.serving.protocol import (
    BodyT,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    RequestLimits,
    TextParams,
    engine_requests,
    parse_body,
)
from marin_rl.serving.responses import JsonResponse, TokenPiece, Usage, generate_body, make_choice, response_head
from marin_rl.serving.text import TextPart
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Message

Result = TypeVar("Result")
_SHORT_BYTES = 2**14
"""Size of a body up to which it is read in the event loop, which takes less time than a thread."""
_LONG_THREADS = 2
"""Number of longer bodies that are read at a time; the event loop needs Python's lock, too."""


def reading_threads() -> ThreadPoolExecutor:
    """Return the threads that parse and tokenize long bodies. All endpoints of a server share them."""
    return ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="request")


async def accept_all(sequences: int) -> None:
    """Accept a request with any number of sequences."""


@dataclasses.dataclass(frozen=True)
class Endpoints:
    """Answers requests with an engine."""

    reply: Callable[[EngineRequest], Coroutine[Any, Any, TextPart]]
    """Samples a whole reply, as `Engine.reply` does."""
    stream: Callable[[EngineRequest], AsyncGenerator[TextPart, None]]
    """Samples a reply in parts, as `Engine.stream` does."""
    tokenizer: ChatTokenizer
    """Tokenizes prompts of `/v1/completions`."""
    chat_prompt: Callable[[Sequence[Message]], tuple[int, ...]]
    """Tokenizes conversations; may be called in another thread."""
    piece: TokenPiece
    """Returns the bytes of a token."""
    limits: RequestLimits
    """Limits of a request's tokens and sequences."""
    max_body_bytes: int
    """Maximum size of a request's body."""
    body_seconds: float
    """Maximum time in which a client sends the body of a request."""
    threads: ThreadPoolExecutor
    """Threads from `reading_threads`."""
    check_model: Callable[[str | None], None] = lambda name: None
    """Raises `ApiError` if there is no model of this name."""
    admit: Callable[[int], Awaitable[None]] = accept_all
    """Accepts a request with this number of sequences, or raises `ApiError`."""
    release: Callable[[int], None] = lambda sequences: None
    """Called once for each accepted request, with its number of sequences, when its sampling has ended or failed."""
    count_tokens: Callable[[int, int], None] = lambda prompt, sampled: None
    """Called with numbers of prompt tokens and of sampled tokens, when they are accepted or sampled."""
    temperature: float | None = None
    """Temperature of all requests, which replaces their own; None: each has its own."""
    discard: Callable[[str, int], None] = lambda completion, sent: None
    """Called with the id of a response that failed or whose client disconnected, and the number of its first replies
    that were sent."""

    async def completions(self, request: Request) -> "Response | EventStream":
        """Answer `/v1/completions`."""
        data = await self.read(request)

        async def prepare() -> tuple[CompletionRequest, list[tuple[int, ...]]]:
            body = await self.parse(CompletionRequest, data)
            self.check_model(body.model)
            works = map(self._prompt_tokens, body.prompts(self.limits))
            # One by one, so that other requests are read in between, and no work is left when the client leaves.
            return body, [await self._call(work, len(data)) for work in works]

        return await self._respond(request, prepare)

    async def chat(self, request: Request) -> "Response | EventStream":
        """Answer `/v1/chat/completions`."""
        data = await self.read(request)

        async def prepare() -> tuple[ChatRequest, list[tuple[int, ...]]]:
            body = await self.parse(ChatRequest, data)
            self.check_model(body.model)
            messages = await self._call(functools.partial(self._conversation, body), len(data))
            return body, [await self._call(functools.partial(self.chat_prompt, messages), len(data), "messages")]

        return await self._respond(request, prepare)

    async def generate(self, request: Request) -> Response:
        """Answer vLLM's `/inference/v1/generate`."""
        data = await self.read(request)
        id = f"generate-{uuid.uuid4().hex}"

        async def prepare() -> tuple[GenerateRequest, list[EngineRequest]]:
            body = await self.parse(GenerateRequest, data)
            self.check_model(body.model)
            self.limits.check_length("token_ids", body.token_ids)
            requests = self._requests([tuple(body.token_ids)], body.sampling_params, id)
            await self._admit(requests, len(body.token_ids))
            return body, requests

        body, requests = await while_connected(request.receive, prepare())
        parts = await while_connected(request.receive, self._sample(requests))
        return JsonResponse(generate_body(id, requests, parts, body.sampling_params.logprobs is not None))

    async def parse(self, body_class: type[BodyT], data: bytes) -> BodyT:
        """Parse and validate the body of a request.

        Raises:
            ApiError: if it is invalid.
        """

        def parsed() -> BodyT:
            values = read_object(data)
            if self.temperature is not None and issubclass(body_class, TextParams):
                values["temperature"] = self.temperature
            return parse_body(body_class, values)

        return await self._call(parsed, len(data))

    async def _call(self, function: Callable[[], Result], size: int, param: str = "prompt") -> Result:
        """Do a part of the work for a body of `size` bytes; errors of the tokenizer name `param`."""
        try:
            if size <= _SHORT_BYTES:
                return function()
            return await asyncio.get_running_loop().run_in_executor(self.threads, function)
        except ValueError as error:
            raise ApiError(str(error), param=param) from error

    def _conversation(self, body: ChatRequest) -> list[Message]:
        """Return the messages of a chat, unless they are certainly too long."""
        self.limits.check_choices(1, body)
        self.limits.check_length("messages", body.messages)
        messages = body.conversation()
        text = "".join(message["content"] + message.get("tools_in_words", "") for message in messages)
        self.limits.check_length("messages", text)
        return messages

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> Callable[[], tuple[int, ...]]:
        """Return the function that tokenizes a prompt, with special tokens if it is a text."""
        if isinstance(prompt, str):
            return lambda: tuple(self.tokenizer.tokenizer(prompt)["input_ids"])
        return lambda: tuple(prompt)

    def _requests(self, prompts: Sequence[tuple[int, ...]], params: Any, response_id: str) -> list[EngineRequest]:
        requests = engine_requests(prompts, params, self.limits)
        return [dataclasses.replace(request, response_id=response_id) for request in requests]

    async def _admit(self, requests: Sequence[EngineRequest], num_prompt: int) -> None:
        """Accept a request; the caller must then start `_sample` or an `EventStream`, which release it."""
        await self.admit(len(requests))
        self.count_tokens(num_prompt, 0)

    async def _respond(
        self, request: Request, prepare: Callable[[], Awaitable[tuple[TextParams, list[tuple[int, ...]]]]]
    ) -> "Response | EventStream":
        """Answer a request whose body and prompts `prepare` returns."""

        async def start() -> tuple[TextParams, list[tuple[int, ...]], dict[str, Any], list[EngineRequest]]:
            body, prompts = await prepare()
            head = response_head(body)
            requests = self._requests(prompts, body, head["id"])
            await self._admit(requests, sum(map(len, prompts)))
            return body, prompts, head, requests

        body, prompts, head, requests = await while_connected(request.receive, start())
        num_prompt = sum(map(len, prompts))
        opens_thoughts = isinstance(body, ChatRequest) and self.tokenizer.opens_thoughts(prompts[0])
        choices = [
            make_choice(index, one.sample.prompt_tokens, body, self.piece, opens_thoughts)
            for index, one in enumerate(requests)
        ]
        # As in vLLM, the prompt of a chat is not in the choice.
        has_prompt = isinstance(body, ChatRequest) and body.return_token_ids
        first = {**head, "prompt_token_ids": list(prompts[0])} if has_prompt else head
        if not body.stream:
            parts = await while_connected(request.receive, self._sample(requests))
            usage = Usage(num_prompt, sum(len(part.token_ids) for part in parts))
            whole = [choice.whole(part) for choice, part in zip(choices, parts, strict=True)]
            return JsonResponse({**first, "choices": whole, "usage": usage.body()})
        has_usage = body.stream_options is not None and body.stream_options.include_usage

        async def produce(emit: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
            counts, sent = [0] * len(requests), 0

            async def stream(index: int) -> None:
                nonlocal sent
                shared = first
                async with contextlib.aclosing(self.stream(requests[index])) as parts:
                    async for part in parts:
                        counts[index] += len(part.token_ids)
                        self.count_tokens(0, len(part.token_ids))
                        chunk = {**shared, "choices": [choices[index].chunk(part)]}
                        await emit(chunk | ({"usage": None} if has_usage else {}))
                        shared = head
                        sent += part.finish_reason is not None

            try:
                await _all([stream(index) for index in range(len(requests))])
            except BaseException as error:
                # A client that left has received some; one that is told of an error should not use any.
                self.discard(head["id"], 0 if isinstance(error, ApiError | EngineError) else sent)
                raise
            if has_usage:
                await emit({**head, "choices": [], "usage": Usage(num_prompt, sum(counts)).body()})

        return EventStream(produce, on_end=lambda: self.release(len(requests)))

    async def _sample(self, requests: Sequence[EngineRequest]) -> list[TextPart]:
        """Return the whole replies of one response."""
        try:
            parts = await _all([self.reply(request) for request in requests])
        except BaseException:
            self.discard(requests[0].response_id, 0)
            raise
        finally:
            self.release(len(requests))
        self.count_tokens(0, sum(len(part.token_ids) for part in parts))
        return parts

    async def read(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            ApiError: if its type is not JSON, or it is too large or late.
        """
        # Browsers send JSON to another origin only after a preflight, which this server refuses.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("the content type must be application/json", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(
                f"the content encoding is {encoding!r:.100}; send the body without compression",
                status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            )
        data, limit = bytearray(), self.max_body_bytes
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise ApiError(f"the body exceeds {limit} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        except TimeoutError as error:
            raise ApiError("the body did not arrive in time", status=HTTPStatus.REQUEST_TIMEOUT) from error
        return bytes(data)


class EventStream:
    """A response of server-sent events, which ends when the client disconnects."""

    def __init__(
        self,
        produce: Callable[[Callable[[dict[str, Any]], Awaitable[None]]], Coroutine[Any, Any, None]],
        on_end: Callable[[], None],
    ) -> None:
        """Create the response.

        Args:
            produce: sends all events with the function that it receives.
            on_end: called when the response has been sent, or has failed.
        """
        self._produce = produce
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await self._send(receive, send)
        finally:
            self._on_end()

    async def _send(self, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def emit(event: dict[str, Any]) -> None:
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % to_json(event), "more_body": True})

        try:
            await while_connected(receive, self._produce(emit))
            end = b"data: [DONE]\n\n"
        except ClientDisconnect:
            return
        except (ApiError, EngineError) as error:
            if isinstance(error, EngineError):
                error = ApiError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE)
            end = b"data: %b\n\n" % to_json(error.body())
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in this task, and cancel it when the client disconnects.

    Raises:
        ClientDisconnect: if the client disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        # The server may cancel the request, too.
        if has_left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def _all(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently, a single one in this task."""
    return [await works[0]] if len(works) == 1 else await gather_all(works)
