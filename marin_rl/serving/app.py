# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The HTTP application: OpenAI's completions and chat endpoints, vLLM's generate endpoint, health and metrics."""

import dataclasses
import hmac
import logging
import re
import time
from http import HTTPStatus
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marin_rl.config_fields import is_loopback
from marin_rl.serving.endpoints import Endpoints, reading_threads
from marin_rl.serving.engine import Engine, EngineError
from marin_rl.serving.json_body import ApiError
from marin_rl.serving.metrics import ServerMetrics
from marin_rl.serving.protocol import RequestLimits
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces

logger = logging.getLogger(__name__)
_HOST = re.compile(r"\[?([^\[\]]*?)\]?(?::\d+)?")
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
MAX_BODIES = 256
"""Maximum size of the bodies of all requests in progress together, as a multiple of that of one."""


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Name of the model, key and limits of a server."""

    model: str
    """Name of the model in requests."""
    key: str | None
    """API key; None serves requests without a key."""
    limits: RequestLimits
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
        self._options = options
        self._created = int(time.time())
        self._admitted = 0
        self.metrics = ServerMetrics(engine)
        self._endpoints = Endpoints(
            reply=engine.reply,
            stream=engine.stream,
            tokenizer=tokenizer,
            chat_prompt=tokenizer.prompt_tokens,
            piece=TokenPieces(tokenizer.tokenizer),
            limits=options.limits,
            max_body_bytes=options.max_body_bytes,
            body_seconds=options.body_seconds,
            threads=reading_threads(),
            check_model=self._check_model,
            admit=self._admit,
            release=self._release,
            count_tokens=self._count_tokens,
        )

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", self._endpoints.completions, methods=["POST"]),
                Route("/v1/chat/completions", self._endpoints.chat, methods=["POST"]),
                Route("/inference/v1/generate", self._endpoints.generate, methods=["POST"]),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
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
                f"the model {name!r:.100} does not exist; the server has {self._options.model!r}",
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )

    async def _admit(self, sequences: int) -> None:
        # The engine counts a sequence only when its coroutine has started, too late for simultaneous requests.
        if self._admitted + sequences > self._options.max_sequences:
            raise _too_many("sequences", self._admitted)
        self._admitted += sequences

    def _release(self, sequences: int) -> None:
        self._admitted -= sequences

    def _count_tokens(self, prompt: int, sampled: int) -> None:
        self.metrics.prompt_tokens.inc(prompt)
        self.metrics.sampled_tokens.inc(sampled)


class _Guard:
    """Checks the API key or the host, and limits the number of concurrent requests and the size of their bodies."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._active = self._body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
        elif (error := self._refusal(scope)) is not None:
            await _error_response(error)(scope, receive, send)
        # Requests whose reply is complete, but not yet sent, have no sequence in progress.
        elif self._active >= 2 * self._options.max_sequences:
            await _error_response(_too_many("requests", self._active))(scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its body counts until then, because its texts are kept."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += (more := len(message.get("body", b"")))
            self._body_bytes += more
            if self._body_bytes > MAX_BODIES * self._options.max_body_bytes:
                raise _too_many("bytes of requests", self._body_bytes)
            return message

        self._active += 1
        try:
            await self._app(scope, counted, send)
        finally:
            self._active -= 1
            self._body_bytes -= size

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
        return None if has_key(headers, self._options.key) else wrong_key()


def has_key(headers: Headers, key: str) -> bool:
    """Return whether a request has the API key."""
    return hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), f"Bearer {key}".encode())


def wrong_key() -> ApiError:
    """Return the error of a request without the API key."""
    return ApiError(
        "the API key is missing or wrong; send it as a bearer token (Authorization: Bearer KEY)",
        status=HTTPStatus.UNAUTHORIZED,
        code="invalid_api_key",
    )


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


async def _show_depth(request: Request, error: Exception) -> Response:
    """Return the error of a body that can be read, but not written again, as tools and tool calls are."""
    logger.warning("%s %s: nested too deeply", request.method, request.url.path, exc_info=error)
    return await _show_error(request, ApiError("the body is nested too deeply"))


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


EXCEPTION_HANDLERS = {
    ApiError: _show_error,
    EngineError: _show_engine_error,
    HTTPException: _show_http_error,
    RecursionError: _show_depth,
    ClientDisconnect: _show_disconnect,
    Exception: _show_bug,
}
"""Responses to errors of endpoints."""
