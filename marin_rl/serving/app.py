# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The HTTP application: OpenAI's completions and chat endpoints, vLLM's generate endpoint, health and metrics."""

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import prometheus_client
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marin_rl.serving.engine import Engine, EngineError, EngineRequest
from marin_rl.serving.metrics import ServerMetrics
from marin_rl.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Limits,
    TextParams,
    engine_requests,
    parse_body,
)
from marin_rl.serving.responses import Usage, generate_body, make_choice, response_head
from marin_rl.serving.text import TextPart
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_HOST = re.compile(r"\[?([^\[\]]*?)\]?(?::\d+)?")
_SHORT_BYTES = 2**14
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Name of the model, key and limits of a server."""

    model: str
    """Name of the model in requests."""
    key: str | None
    """API key; None serves requests without a key."""
    limits: Limits
    """Limits of a request's tokens and sequences."""
    max_sequences: int
    """Maximum number of sequences in progress and waiting."""
    max_body_bytes: int
    """Maximum size of a request's body."""
    body_seconds: float
    """Maximum time in which a client sends the body of a request."""


class Server:
    """Answers HTTP requests with an engine."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, options: ServerOptions) -> None:
        """Create the application.

        Args:
            engine: samples; started and closed by the caller.
            tokenizer: tokenizes prompts and replies.
            options: name, key and limits.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._piece = TokenPieces(tokenizer.tokenizer)
        self._created = int(time.time())
        self.metrics = ServerMetrics(engine)

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _show_error,
                EngineError: _show_engine_error,
                HTTPException: _show_http_error,
                ClientDisconnect: _show_disconnect,
                Exception: _show_bug,
            },
        )
        return self.metrics.count(_Guard(app, self._options))

    async def _health(self, request: Request) -> Response:
        if self._engine.failure is not None:
            raise EngineError(f"the sampler failed: {self._engine.failure}")
        return JSONResponse({"status": "ok", "model": self._options.model})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._options.model, "object": "model", "created": self._created, "owned_by": "marin_rl"}
        return {**card, "max_model_len": self._options.limits.max_context}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._options.model):
            raise ApiError(
                f"the model {name!r} does not exist; the server has {self._options.model!r}",
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )

    async def _completions(self, request: Request) -> "Response | EventStream":
        values, size = await self._read(request)
        body = parse_body(CompletionRequest, values)
        self._check_model(body.model)
        prompts = await _tokenize(lambda: body.prompts(self._tokenizer), "prompt", size)
        return await self._respond(request, body, prompts)

    async def _chat(self, request: Request) -> "Response | EventStream":
        values, size = await self._read(request)
        body = parse_body(ChatRequest, values)
        self._check_model(body.model)
        messages = body.conversation()
        prompt = await _tokenize(lambda: self._tokenizer.prompt_tokens(messages), "messages", size)
        return await self._respond(request, body, [prompt])

    async def _generate(self, request: Request) -> Response:
        values, _ = await self._read(request)
        body = parse_body(GenerateRequest, values)
        self._check_model(body.model)
        requests = self._admit([tuple(body.token_ids)], body.sampling_params)
        parts = await _while_connected(request.receive, self._sample(requests))
        return JSONResponse(generate_body(requests, parts, body.sampling_params.logprobs is not None))

    def _admit(self, prompts: Sequence[tuple[int, ...]], params: Any) -> list[EngineRequest]:
        requests = engine_requests(prompts, params, self._options.limits)
        if self._engine.in_progress + len(requests) > self._options.max_sequences:
            raise _too_many("sequences", self._engine.in_progress)
        self.metrics.prompt_tokens.inc(sum(map(len, prompts)))
        return requests

    async def _respond(
        self, request: Request, body: TextParams, prompts: Sequence[tuple[int, ...]]
    ) -> "Response | EventStream":
        requests = self._admit(prompts, body)
        head, num_prompt = response_head(body), sum(map(len, prompts))
        choices = [
            make_choice(index, one.sample.prompt_tokens, body, self._piece) for index, one in enumerate(requests)
        ]
        if not body.stream:
            parts = await _while_connected(request.receive, self._sample(requests))
            usage = Usage(num_prompt, sum(len(part.token_ids) for part in parts))
            whole = [choice.whole(part) for choice, part in zip(choices, parts, strict=True)]
            if isinstance(body, ChatRequest) and body.return_token_ids:
                head["prompt_token_ids"] = list(prompts[0])
            return JSONResponse({**head, "choices": whole, "usage": usage.body()})
        has_usage = body.stream_options is not None and body.stream_options.include_usage

        async def produce(emit: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
            counts = [0] * len(requests)

            async def stream(index: int) -> None:
                async with contextlib.aclosing(self._engine.stream(requests[index])) as parts:
                    async for part in parts:
                        counts[index] += len(part.token_ids)
                        self.metrics.sampled_tokens.inc(len(part.token_ids))
                        chunk = {**head, "choices": [choices[index].chunk(part)]}
                        await emit(chunk | ({"usage": None} if has_usage else {}))

            await _all([stream(index) for index in range(len(requests))])
            if has_usage:
                await emit({**head, "choices": [], "usage": Usage(num_prompt, sum(counts)).body()})

        return EventStream(produce)

    async def _sample(self, requests: Sequence[EngineRequest]) -> list[TextPart]:
        """Return the whole replies."""
        parts = await _all([self._engine.reply(request) for request in requests])
        self.metrics.sampled_tokens.inc(sum(len(part.token_ids) for part in parts))
        return parts

    async def _read(self, request: Request) -> tuple[dict[str, Any], int]:
        """Read the body of a request, a JSON object; return it with its size in bytes."""
        # Browsers send JSON to another origin only after a preflight, which this server refuses.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("the content type must be application/json", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        data, limit = bytearray(), self._options.max_body_bytes
        try:
            async with asyncio.timeout(self._options.body_seconds):
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
        self, produce: Callable[[Callable[[dict[str, Any]], Awaitable[None]]], Coroutine[Any, Any, None]]
    ) -> None:
        """Create the response.

        Args:
            produce: sends all events with the function that it receives.
        """
        self._produce = produce

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def emit(event: dict[str, Any]) -> None:
            data = json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        try:
            await _while_connected(receive, self._produce(emit))
            end = b"data: [DONE]\n\n"
        except ClientDisconnect:
            return
        except EngineError as error:
            body = ApiError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE).body()
            end = f"data: {json.dumps(body)}\n\n".encode()
        await send({"type": "http.response.body", "body": end, "more_body": False})


class _Guard:
    """Checks the API key or the host, and limits the number of concurrent requests."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
        elif (error := self._refusal(scope)) is not None:
            await _error_response(error)(scope, receive, send)
        # Requests whose reply is complete, but not yet sent, have no sequence in progress.
        elif self._active >= 2 * self._options.max_sequences:
            await _error_response(_too_many("requests", self._active))(scope, receive, send)
        else:
            self._active += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._active -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._options.key is None:
            # A web page can give its own host name the address of this machine (DNS rebinding).
            host = headers.get("host", "")
            if (match := _HOST.fullmatch(host)) is not None and is_loopback(match[1]):
                return None
            return ApiError(
                f"the host {host[:100]!r} is not this machine; use 127.0.0.1, or start the server with an API key",
                status=HTTPStatus.FORBIDDEN,
            )
        given = headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, f"Bearer {self._options.key}".encode()):
            return None
        return ApiError(
            "the API key is missing or wrong; send it as a bearer token (Authorization: Bearer KEY)",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
    """Run coroutines concurrently; the first error cancels the others and propagates."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* (ApiError, EngineError, ClientDisconnect) as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _tokenize(function: Callable[[], Result], param: str, size: int) -> Result:
    """Call a function of the tokenizer for a body of `size` bytes; its errors name problems of the request."""
    try:
        # Long texts would delay other requests; for short ones a thread takes longer than the tokenizer.
        return function() if size <= _SHORT_BYTES else await asyncio.to_thread(function)
    except ValueError as error:
        raise ApiError(str(error), param=param) from error


def _too_many(what: str, number: int) -> ApiError:
    return ApiError(
        f"the server has {number} {what} in progress or waiting, and accepts no more; retry later",
        status=HTTPStatus.TOO_MANY_REQUESTS,
        code="rate_limit_exceeded",
    )


def _error_response(error: ApiError) -> Response:
    headers = {HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"}, HTTPStatus.UNAUTHORIZED: _CHALLENGE}
    return JSONResponse(error.body(), error.status, headers=headers.get(HTTPStatus(error.status)))


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _show_engine_error(request: Request, error: Exception) -> Response:
    return await _show_error(request, ApiError(str(error), status=HTTPStatus.SERVICE_UNAVAILABLE))


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(message, status=error.status_code).body(), error.status_code, headers=error.headers)


async def _show_disconnect(request: Request, error: Exception) -> Response:
    """Return a response that nobody reads."""
    return Response(status_code=499)


async def _show_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _show_error(request, ApiError("internal error; see the server's log", status=500))
