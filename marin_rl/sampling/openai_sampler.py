# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler whose engine is a server outside, such as vLLM, behind OpenAI's completions protocol."""

import asyncio
import functools
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

from marin_rl.retry import retrying_async
from marin_rl.sampling.completions import completion_body, most_likely_logprob, read_completion
from marin_rl.sampling.config import OpenAiSamplerConfig, SamplingConfig
from marin_rl.sampling.request_check import allowed_tokens
from marin_rl.sampling.sampler import SampleRequest, SamplerError
from marin_rl.types import Generation, WeightVersion

logger = logging.getLogger(__name__)
# It writes a line for each request.
logging.getLogger("httpx").setLevel(logging.WARNING)

T = TypeVar("T")

_MAY_WORK_LATER = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
"""Refusals that say nothing about the request; what the server calls its own error (5xx) may work later too."""
_REMEDIES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "its limits (of vLLM: --max-model-len, --max-logprobs) must allow what this run asks for",
    HTTPStatus.UNAUTHORIZED: "name the environment variable that holds the key in sampler.api_key_env",
    HTTPStatus.FORBIDDEN: "name the environment variable that holds the key in sampler.api_key_env",
    HTTPStatus.NOT_FOUND: "correct sampler.model, or sampler.base_url, which ends in /v1 for most servers",
}

_PROBE_TEMPERATURE = 2.0
_SAME = 1e-3
"""Nats: less than this apart, two log-probabilities are the same one."""
_EXTREME = 1e-2
"""Nats: so close to certain or to uniform, a distribution is hardly another at another temperature."""


class ServerLostError(SamplerError):
    """The server did not answer, or cannot now. Retried."""


class OpenAiSampler:
    """Continues prompts at a server, many at a time.

    Call it from a thread that runs no event loop.
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
    ) -> None:
        """Read the key; nothing is sent yet.

        Args:
            server: where it is.
            config: limits, and how many requests are under way at a time (`max_seqs`).
            stop_token_ids: each of them alone ends a generation. May be empty.
            max_context: most tokens of prompt and answer together.
            vocab_size: of the model.
            version: steps of training behind the weights that the server has.

        Raises:
            ValueError: if the environment variable that should hold the key does not.
        """
        self.version = version
        """Steps of training behind the weights that the server has; written by whoever has it load others."""
        self._server = server
        self._config = config
        self._stop_ids = frozenset(stop_token_ids)
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._key = _read_key(server.api_key_env)
        # Made once: it reads the machine's certificates.
        self._tls = httpx.create_ssl_context()

    @property
    def batch_size(self) -> int:
        """Requests under way at a time."""
        return self._config.max_seqs

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt; the answers come in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a single new token; nothing was sent.
            ValueError: if a request is malformed; nothing was sent.
            SamplerError: if the server refuses a request, answers something that cannot be, or is lost for longer
                than `retry` allows. What else was under way is given up.
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
            request, most = requests[index], allowed[index]
            answer = await self._ask(client, index, completion_body(self._server.model, request, most, self._stop_ids))
            completion = read_completion(
                answer, index, request, allowed=most, stop_token_ids=self._stop_ids, vocab_size=self._vocab_size
            )
            return Generation(
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                stop_reason=completion.stop_reason,
                first_version=version,
                last_version=version,
            )

        return self._all(continue_one, len(requests))

    def check_server(self) -> None:
        """Ask for one token, to see that the server answers with token ids and with log-probs of what it samples from.

        Training samples have the configured temperature, and so must their log-probs. A server that tells those of
        another temperature (vLLM's `raw_logprobs`, its default) is found out where the temperature is not 1: the most
        likely token then has the same log-prob at any temperature.

        Raises:
            SamplerError: if it does not.
        """
        self.sample([SampleRequest((0,), seed=0, max_new_tokens=1)])
        if self._config.temperature == 1.0:
            return

        async def most_likely(client: httpx.AsyncClient, index: int) -> float | None:
            request = SampleRequest((0,), seed=0, max_new_tokens=1, temperature=(1.0, _PROBE_TEMPERATURE)[index])
            body = completion_body(self._server.model, request, 1, self._stop_ids)
            return most_likely_logprob(await self._ask(client, index, body), index)

        plain, warm = self._all(most_likely, 2)
        if plain is None or warm is None or plain > -_EXTREME or abs(plain + math.log(self._vocab_size)) < _EXTREME:
            logger.warning(
                "whether the log-probs of %s are those at the sampling temperature could not be seen; the metrics "
                "mismatch/* of the first step tell",
                self._server.base_url,
            )
        elif abs(plain - warm) < _SAME:
            raise SamplerError(
                f"the server at {self._server.base_url} tells the same log-prob ({plain:.6g}) at temperature 1 and at "
                f"{_PROBE_TEMPERATURE:g}, but sampling.temperature is {self._config.temperature}, and log-probs must "
                "be those of what is sampled from; start vLLM with --logprobs-mode processed_logprobs, or set "
                "sampling.temperature: 1.0"
            )

    def _all(self, ask: Callable[[httpx.AsyncClient, int], Awaitable[T]], number: int) -> list[T]:
        """Ask for each number, a bounded number at a time."""

        async def run() -> list[T]:
            slots = asyncio.Semaphore(self.batch_size)

            async def one(client: httpx.AsyncClient, index: int) -> T:
                async with slots:
                    return await ask(client, index)

            async with self._connect() as client, asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(client, index)) for index in range(number)]
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

    async def _ask(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        attempt = functools.partial(self._ask_once, client, index, body)
        return await retrying_async(self._server.retry, (ServerLostError,), attempt)

    async def _ask_once(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        base_url = self._server.base_url.rstrip("/")
        try:
            response = await client.post(f"{base_url}/completions", json=body)
        except httpx.RequestError as error:
            raise ServerLostError(
                f"request {index}: the server at {base_url} does not answer ({type(error).__name__}: {error}); see "
                "whether it runs, and sampler.base_url and sampler.timeout"
            ) from error
        status, said = response.status_code, self._without_key(response.text[:500])
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _MAY_WORK_LATER:
            raise ServerLostError(f"request {index}: the server at {base_url} answered with status {status}: {said}")
        if status != HTTPStatus.OK:
            remedy = _REMEDIES.get(status, "see its log")
            raise SamplerError(f"request {index}: {base_url} refused it with status {status}: {said}; {remedy}")
        try:
            return response.json()
        except ValueError as error:
            raise ServerLostError(
                f"request {index}: the server at {base_url} answered something else than JSON: {said[:200]!r}"
            ) from error

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "***")


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ValueError(f"sampler.api_key_env: the environment variable {variable} holds no key; set it")
    return os.environ[variable]
