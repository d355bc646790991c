# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The endpoints that sample: OpenAI's completions and chat, and vLLM's generate, whole or as server-sent events."""

import asyncio
import contextlib
import dataclasses
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marin_rl.event_loop import gather_all
from marin_rl.serving.engine import EngineError, EngineRequest
from marin_rl.serving.protocol import (
    ApiError,
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
    check_model: Callable[[str | None], None] = lambda name: None
    """Raises `ApiError` if there is no model of this name."""
    admit: Callable[[int], None] = lambda sequences: None
    """Accepts a request with this number of sequences, or raises `ApiError`."""
    release: Callable[[int], None] = lambda sequences: None
    """Called once for each accepted request, with its number of sequences, when its sampling has ended or failed."""
    count_tokens: Callable[[int, int], None] = lambda prompt, sampled: None
    """Called with numbers of prompt tokens and of sampled tokens, when they are accepted or sampled."""
    temperature: float | None = None
    """Temperature of all requests, which replaces their own; None: each has its own."""
    discard: Callable[[str], None] = lambda completion: None
    """Called with the id of a response that failed, or that was not sent because the client disconnected."""

    async def completions(self, request: Request) -> "Response | EventStream":
        """Answer `/v1/completions`."""
        values, size = await self.read(request)
        body = parse_body(CompletionRequest, self._with_temperature(values))
        self.check_model(body.model)
        prompts = await _tokenize(lambda: body.prompts(self.tokenizer), "prompt", size)
        return await self._respond(request, body, prompts)

    async def chat(self, request: Request) -> "Response | EventStream":
        """Answer `/v1/chat/completions`."""
        values, size = await self.read(request)
        body = parse_body(ChatRequest, self._with_temperature(values))
        self.check_model(body.model)
        messages = body.conversation()
        prompt = await _tokenize(lambda: self.chat_prompt(messages), "messages", size)
        return await self._respond(request, body, [prompt])

    async def generate(self, request: Request) -> Response:
        """Answer vLLM's `/inference/v1/generate`."""
        values, _ = await self.read(request)
        body = parse_body(GenerateRequest, values)
        self.check_model(body.model)
        id = f"generate-{uuid.uuid4().hex}"
        requests = self._requests([tuple(body.token_ids)], body.sampling_params, id)
        self._admit(requests, len(body.token_ids))
        parts = await _while_connected(request.receive, self._sample(requests))
        return JsonResponse(generate_body(id, requests, parts, body.sampling_params.logprobs is not None))

    def _with_temperature(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return values if self.temperature is None else {**values, "temperature": self.temperature}

    def _requests(self, prompts: Sequence[tuple[int, ...]], params: Any, response_id: str) -> list[EngineRequest]:
        requests = engine_requests(prompts, params, self.limits)
        return [dataclasses.replace(request, response_id=response_id) for request in requests]

    def _admit(self, requests: Sequence[EngineRequest], num_prompt: int) -> None:
        """Accept a request; the caller must then start `_sample` or an `EventStream`, which release it."""
        self.admit(len(requests))
        self.count_tokens(num_prompt, 0)

    async def _respond(
        self, request: Request, body: TextParams, prompts: Sequence[tuple[int, ...]]
    ) -> "Response | EventStream":
        head, num_prompt = response_head(body), sum(map(len, prompts))
        requests = self._requests(prompts, body, head["id"])
        opens_thoughts = isinstance(body, ChatRequest) and self.tokenizer.opens_thoughts(prompts[0])
        choices = [
            make_choice(index, one.sample.prompt_tokens, body, self.piece, opens_thoughts)
            for index, one in enumerate(requests)
        ]
        self._admit(requests, num_prompt)
        # As in vLLM, the prompt of a chat is not in the choice.
        has_prompt = isinstance(body, ChatRequest) and body.return_token_ids
        first = {**head, "prompt_token_ids": list(prompts[0])} if has_prompt else head
        if not body.stream:
            parts = await _while_connected(request.receive, self._sample(requests))
            usage = Usage(num_prompt, sum(len(part.token_ids) for part in parts))
            whole = [choice.whole(part) for choice, part in zip(choices, parts, strict=True)]
            return JsonResponse({**first, "choices": whole, "usage": usage.body()})
        has_usage = body.stream_options is not None and body.stream_options.include_usage

        async def produce(emit: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
            counts = [0] * len(requests)

            async def stream(index: int) -> None:
                shared = first
                async with contextlib.aclosing(self.stream(requests[index])) as parts:
                    async for part in parts:
                        counts[index] += len(part.token_ids)
                        self.count_tokens(0, len(part.token_ids))
                        chunk = {**shared, "choices": [choices[index].chunk(part)]}
                        await emit(chunk | ({"usage": None} if has_usage else {}))
                        shared = head

            try:
                await _all([stream(index) for index in range(len(requests))])
            except (ApiError, EngineError):
                self.discard(head["id"])
                raise
            if has_usage:
                await emit({**head, "choices": [], "usage": Usage(num_prompt, sum(counts)).body()})

        return EventStream(produce, on_end=lambda: self.release(len(requests)))

    async def _sample(self, requests: Sequence[EngineRequest]) -> list[TextPart]:
        """Return the whole replies of one response."""
        try:
            parts = await _all([self.reply(request) for request in requests])
        except BaseException:
            self.discard(requests[0].response_id)
            raise
        finally:
            self.release(len(requests))
        self.count_tokens(0, sum(len(part.token_ids) for part in parts))
        return parts

    async def read(self, request: Request) -> tuple[dict[str, Any], int]:
        """Read the body of a request, a JSON object; return it with its size in bytes.

        Raises:
            ApiError: if it is not JSON, too large, or late.
        """
        # Browsers send JSON to another origin only after a preflight, which this server refuses.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("the content type must be application/json", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        data, limit = bytearray(), self.max_body_bytes
        try:
            async with asyncio.timeout(self.body_seconds):
                async for part in request.stream():
                    data += part
                    if len(data) > limit:
                        raise ApiError(f"the body exceeds {limit} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        except TimeoutError as error:
            raise ApiError("the body did not arrive in time", status=HTTPStatus.REQUEST_TIMEOUT) from error
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(f"the body is a JSON {type(body).__name__}; it must be an object")
        return body, len(data)


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
            await _while_connected(receive, self._produce(emit))
            end = b"data: [DONE]\n\n"
        except ClientDisconnect:
            return
        except (ApiError, EngineError) as error:
            if isinstance(error, EngineError):
                error = ApiError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE)
            end = b"data: %b\n\n" % to_json(error.body())
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
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


async def _tokenize(function: Callable[[], Result], param: str, size: int) -> Result:
    """Call a function of the tokenizer for a body of `size` bytes; its errors name problems of the request."""
    try:
        # Long texts would delay other requests; for short ones a thread takes longer than the tokenizer.
        return function() if size <= _SHORT_BYTES else await asyncio.to_thread(function)
    except ValueError as error:
        raise ApiError(str(error), param=param) from error
