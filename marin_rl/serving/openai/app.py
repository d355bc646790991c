# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The HTTP application: OpenAI's completions and chat endpoints, vLLM's generate endpoint, health and metrics.

Its limits are those of the requests that are in progress together.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from marin_rl.serving.admission import MAX_BODIES, Admission, check_bearer, check_host, health, limited_app
from marin_rl.serving.bodies import MAX_BODY_BYTES, ApiError
from marin_rl.serving.http_metrics import HttpMetrics
from marin_rl.serving.openai.endpoints import Endpoints
from marin_rl.serving.openai.engine import Engine
from marin_rl.serving.openai.protocol import RequestLimits
from marin_rl.tokenization.chat import ChatTokenizer

ScorePrompts = Callable[[Sequence[tuple[int, ...]]], list[list[float]]]
"""Returns the log-probabilities of the tokens of each prompt after the first."""


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
        score: ScorePrompts | None = None,
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
            score: returns the log-probabilities of prompts; called in one thread. None if the server has none.
        """
        self._score, self._scoring = score, ThreadPoolExecutor(1, thread_name_prefix="score")
        self.model = model
        self.chat_prompt = tokenizer.prompt_tokens
        self.reply = engine.reply
        self._engine, self._key = engine, key
        self._endpoints = Endpoints(tokenizer, limits, max_body_bytes, client_seconds)
        self._admission = Admission(
            {
                "sequences": max_sequences,
                # A stream whose client reads slowly has fewer sequences in progress than choices.
                "requests": 2 * max_sequences,
                "bytes of requests": MAX_BODIES * max_body_bytes,
            }
        )
        self._metrics = metrics = HttpMetrics()
        self._count_prompt = metrics.counter("prompt_tokens", "Tokens of accepted prompts.")
        engine.on_sampled = metrics.counter("sampled_tokens", "Tokens of replies.")
        metrics.gauge("sequences", "Sequences that are sampled or wait for a slot.", lambda: engine.in_progress)
        metrics.gauge("slots", "Sequences that are decoded together.", lambda: engine.num_slots)

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [Route("/health", self._health), Route("/metrics", self._metrics.show)]
        routes += self._endpoints.routes("", lambda request: self)
        return limited_app(routes, self._admission, self._check_client, self._metrics.count)

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
        self._count_prompt(num_prompt_tokens)

    async def refuse(self, error: ApiError) -> None:
        """Do nothing."""

    async def prompt_logprobs(self, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Return the log-probabilities of the tokens of prompts after the first, of one request at a time."""
        if self._score is None:
            raise ApiError(
                "echo: the server does not score prompts; start it with --score_prompts true",
                param="echo",
                code="unsupported_parameter",
            )
        return await asyncio.get_running_loop().run_in_executor(self._scoring, self._score, prompts)

    def discard(self, response_id: str, num_sent: int) -> None:
        """Do nothing."""

    async def _health(self, request: Request) -> Response:
        return health("the sampler", self._engine.failure, model=self.model)

    def _check_client(self, headers: Headers) -> None:
        if self._key is not None:
            check_bearer(headers, self._key)
            return
        check_host(headers)
