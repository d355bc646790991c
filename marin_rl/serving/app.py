# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The HTTP application: OpenAI's completions and chat endpoints, vLLM's generate endpoint, health and metrics."""

import hmac
import re
from http import HTTPStatus

import prometheus_client
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.serving.admission import MAX_BODIES, Admission, limited_app
from marin_rl.serving.endpoints import Endpoints
from marin_rl.serving.engine import Engine
from marin_rl.serving.errors import ApiError
from marin_rl.serving.json_body import MAX_BODY_BYTES
from marin_rl.serving.metrics import ServerMetrics
from marin_rl.serving.protocol import RequestLimits
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.settings.fields import is_loopback

_HOST = re.compile(r"\[?([^\[\]]*?)\]?(?::\d+)?")


class Server:
    """Answers HTTP requests with an engine."""

    temperature = None
    """Each request has its own."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        limits: RequestLimits,
        *,
        model: str,
        key: str | None,
        max_sequences: int,
        max_body_bytes: int = MAX_BODY_BYTES,
        client_seconds: float,
    ) -> None:
        """Create the application.

        Args:
            engine: samples; started and closed by the caller.
            tokenizer: tokenizes prompts and replies.
            limits: limits of a request's tokens and sequences.
            model: name of the model in requests.
            key: API key; None serves requests without a key.
            max_sequences: maximum number of sequences in progress and waiting.
            max_body_bytes: maximum size of a request's body.
            client_seconds: maximum time in which a client sends the body of a request.
        """
        self.model = model
        self.chat_prompt = tokenizer.prompt_tokens
        self.reply = engine.reply
        self._engine, self._key = engine, key
        self._metrics = ServerMetrics(engine)
        self._endpoints = Endpoints(tokenizer, limits, max_body_bytes, client_seconds)
        self._admission = Admission(
            {
                "sequences": max_sequences,
                # A stream whose client reads slowly has fewer sequences in progress than choices.
                "requests": 2 * max_sequences,
                "bytes of requests": MAX_BODIES * max_body_bytes,
            }
        )

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [Route("/health", self._health), Route("/metrics", self._show_metrics)]
        routes += self._endpoints.routes("", lambda request: self)
        return self._metrics.count(limited_app(routes, self._admission, self._check_client))

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` if the server has no model of this name."""
        if name not in (None, self.model):
            raise ApiError(
                f"the model {name!r:.100} does not exist; the server has {self.model!r}",
                status=HTTPStatus.NOT_FOUND,
                param="model",
                code="model_not_found",
            )

    async def admit(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Count the tokens of an accepted request."""
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    async def refuse(self, error: ApiError) -> None:
        """Do nothing."""

    def discard(self, response_id: str, num_sent: int) -> None:
        """Do nothing."""

    async def _health(self, request: Request) -> Response:
        if self._engine.failure is not None:
            raise ApiError(f"the sampler failed: {self._engine.failure}", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return JSONResponse({"status": "ok", "model": self.model})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def _check_client(self, headers: Headers) -> None:
        if self._key is not None:
            check_key(headers, self._key)
            return
        # A web page can give its own host name the address of this machine (DNS rebinding).
        host = headers.get("host", "")
        if (match := _HOST.fullmatch(host)) is None or not is_loopback(match[1]):
            raise ApiError(
                f"the host {host[:100]!r} is not this machine; use 127.0.0.1, or start the server with an API key",
                status=HTTPStatus.FORBIDDEN,
            )


def check_key(headers: Headers, key: str) -> None:
    """Raise `ApiError` unless a request has the API key."""
    if not hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), f"Bearer {key}".encode()):
        raise ApiError(
            "the API key is missing or wrong; send it as a bearer token (Authorization: Bearer KEY)",
            status=HTTPStatus.UNAUTHORIZED,
            code="invalid_api_key",
        )
