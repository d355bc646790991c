# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler that uses an external server, such as vLLM, through OpenAI's completions protocol."""

import asyncio
import functools
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
from levanter.models.lm_model import LmHeadModel

from marin_rl.retry import retrying_async
from marin_rl.sampling.completions import completion_body, most_likely_logprob, read_completion
from marin_rl.sampling.config import OpenAiSamplerConfig, SamplingConfig
from marin_rl.sampling.sampler import SampleRequest, SamplerError, allowed_tokens
from marin_rl.types import Generation, WeightVersion

logger = logging.getLogger(__name__)
# httpx logs a line for each request.
logging.getLogger("httpx").setLevel(logging.WARNING)

T = TypeVar("T")

_RETRIED_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
"""Client error statuses that are retried, in addition to all server errors (5xx)."""
_REMEDIES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "raise the server's limits (vLLM: --max-model-len, --max-logprobs) to this run's settings",
    HTTPStatus.UNAUTHORIZED: "name the environment variable that holds the key in sampler.api_key_env",
    HTTPStatus.FORBIDDEN: "name the environment variable that holds the key in sampler.api_key_env",
    HTTPStatus.NOT_FOUND: "correct sampler.model, or sampler.base_url, which ends in /v1 for most servers",
}

_PROBE_TEMPERATURE = 2.0
_SAME = 1e-3
"""Nats; two log-probabilities that differ by less are considered equal."""
_EXTREME = 1e-2
"""Nats; a distribution this close to deterministic or to uniform hardly changes with the temperature."""


class ServerLostError(SamplerError):
    """The server did not respond, or is temporarily unavailable. The request is retried."""


class OpenAiSampler:
    """Continues prompts on a server, with many concurrent requests.

    Call it from a thread without a running event loop.
    """

    def __init__(
        self,
        server: OpenAiSamplerConfig,
        *,
        config: SamplingConfig,
        stop_token_ids: Sequence[int],
        max_context: int,
        vocab_size: int,
        version: WeightVersion = 0,
        load_weights: Callable[[LmHeadModel, WeightVersion], None] = lambda model, version: None,
    ) -> None:
        """Read the API key, without sending a request.

        Args:
            server: address, model name and retries.
            config: limits, and the number of concurrent requests (`max_seqs`).
            stop_token_ids: tokens that end a generation. May be empty.
            max_context: maximum number of prompt and new tokens of a sequence.
            vocab_size: vocabulary size of the model.
            version: number of training steps that produced the server's weights.
            load_weights: makes the server load weights; the default is for a server with fixed weights.

        Raises:
            ValueError: if the environment variable for the API key is not set.
        """
        self.version = version
        """Number of training steps that produced the server's weights."""
        self._load_weights = load_weights
        self._server = server
        self._config = config
        self._stop_ids = frozenset(stop_token_ids)
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._key = _read_key(server.api_key_env)
        # Created once, because it reads the system's certificates.
        self._tls = httpx.create_ssl_context()

    @property
    def batch_size(self) -> int:
        """Number of concurrent requests."""
        return self._config.max_seqs

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt; generations are in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a new token; nothing was sent.
            ValueError: if a request is malformed; nothing was sent.
            SamplerError: if the server rejects a request, returns an invalid response, or does not respond within the
                limits of `retry`. All other requests of the call are cancelled.
        """
        allowed = [
            allowed_tokens(
                index,
                request,
                max_context=self._max_context,
                vocab_size=self._vocab_size,
                max_new_tokens=self._config.max_new_tokens,
            )
            for index, request in enumerate(requests)
        ]
        version = self.version

        async def continue_one(client: httpx.AsyncClient, index: int) -> Generation:
            request, limit = requests[index], allowed[index]
            body = completion_body(self._server.model, request, limit, self._stop_ids)
            completion = read_completion(
                await self._post(client, index, body),
                index,
                request,
                allowed=limit,
                stop_token_ids=self._stop_ids,
                vocab_size=self._vocab_size,
            )
            return Generation(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                stop_reason=completion.stop_reason,
                first_version=version,
                last_version=version,
            )

        return self._run_all(continue_one, len(requests))

    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Make the server load weights; returns when they are loaded.

        Args:
            model: the new weights.
            version: number of training steps that produced them.
        """
        self._load_weights(model, version)
        self.version = version

    def check_server(self) -> None:
        """Verify that the server returns token ids and log-probs at the sampling temperature, with one-token requests.

        If the temperature is not 1, the log-prob of the most likely token must depend on it. A server that reports
        log-probs of the unscaled logits (vLLM's `raw_logprobs`, its default) returns the same value at any temperature.

        Raises:
            SamplerError: if the server fails a check.
        """
        self.sample([SampleRequest((0,), seed=0, max_new_tokens=1)])
        if self._config.temperature == 1.0:
            return

        async def most_likely(client: httpx.AsyncClient, index: int) -> float | None:
            request = SampleRequest((0,), seed=0, max_new_tokens=1, temperature=(1.0, _PROBE_TEMPERATURE)[index])
            body = completion_body(self._server.model, request, 1, self._stop_ids)
            return most_likely_logprob(await self._post(client, index, body), index)

        plain, warm = self._run_all(most_likely, 2)
        if plain is None or warm is None or plain > -_EXTREME or abs(plain + math.log(self._vocab_size)) < _EXTREME:
            logger.warning(
                "could not verify that the log-probs of %s are those at the sampling temperature; check the metrics "
                "mismatch/* of the first step",
                self._server.base_url,
            )
        elif abs(plain - warm) < _SAME:
            raise SamplerError(
                f"the server at {self._server.base_url} returns the same log-prob ({plain:.6g}) at temperature 1 and "
                f"{_PROBE_TEMPERATURE:g}, but sampling.temperature is {self._config.temperature}, and log-probs must "
                "be those of the sampled distribution; start vLLM with --logprobs-mode processed_logprobs, or set "
                "sampling.temperature: 1.0"
            )

    def _run_all(self, call: Callable[[httpx.AsyncClient, int], Awaitable[T]], count: int) -> list[T]:
        """Run `call` for indices below `count`, with at most `batch_size` calls at a time."""

        async def run() -> list[T]:
            slots = asyncio.Semaphore(self.batch_size)

            async def one(client: httpx.AsyncClient, index: int) -> T:
                async with slots:
                    return await call(client, index)

            async with self._connect() as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(client, index)) for index in range(count)]
            return [task.result() for task in tasks]

        try:
            return asyncio.run(run())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors.exceptions[0].__cause__

    def _connect(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            timeout=self._server.timeout,
            verify=self._tls,
            headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def _post(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        attempt = functools.partial(self._post_once, client, index, body)
        return await retrying_async(self._server.retry, (ServerLostError,), attempt)

    async def _post_once(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        base_url = self._server.base_url.rstrip("/")
        try:
            response = await client.post(f"{base_url}/completions", json=body)
        except httpx.RequestError as error:
            raise ServerLostError(
                f"request {index}: the server at {base_url} does not respond ({type(error).__name__}: {error}); check "
                "that it is running, and check sampler.base_url and sampler.timeout"
            ) from error
        status, text = response.status_code, self._without_key(response.text[:500])
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _RETRIED_STATUSES:
            raise ServerLostError(f"request {index}: the server at {base_url} returned status {status}: {text}")
        if status != HTTPStatus.OK:
            remedy = _REMEDIES.get(status, "see the server's log")
            raise SamplerError(f"request {index}: {base_url} rejected it with status {status}: {text}; {remedy}")
        try:
            return response.json()
        except ValueError as error:
            raise ServerLostError(
                f"request {index}: the response of the server at {base_url} is not JSON: {text[:200]!r}"
            ) from error

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "***")


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(f"sampler.api_key_env: the environment variable {variable} is not set; set it to the API key")
    return os.environ[variable]
