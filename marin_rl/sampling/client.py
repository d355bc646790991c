# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An HTTP client of OpenAI's completions protocol, with retries."""

import functools
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx

from marin_rl.sampling.config import AbstractServerConfig
from marin_rl.sampling.sampler import SamplerError
from marin_rl.utils.http_client import NoResponseError, open_client, post_json, without_key
from marin_rl.utils.retry import retrying_async

_RETRIED_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS})
"""Client error statuses that are retried, in addition to all server errors (5xx)."""
_REMEDIES: dict[int, str] = {
    HTTPStatus.BAD_REQUEST: "raise the server's limits (vLLM: --max-model-len, --max-logprobs) to this run's settings",
    HTTPStatus.UNAUTHORIZED: "name the environment variable that holds the key in {section}.api_key_env",
    HTTPStatus.FORBIDDEN: "name the environment variable that holds the key in {section}.api_key_env",
    HTTPStatus.NOT_FOUND: "correct {section}.model, or {section}.base_url, which ends in /v1 for most servers",
}


class ServerLostError(SamplerError):
    """The server did not respond, or is temporarily unavailable. The request is retried."""


class CompletionsClient:
    """Posts requests to a server, and repeats those that are lost."""

    def __init__(self, server: AbstractServerConfig) -> None:
        """Read the API key, without sending a request.

        Args:
            server: address, key, time limit and retries.

        Raises:
            ValueError: if the environment variable for the API key is not set.
        """
        self._server, self._key = server, server.read_key()
        # Created once, because it reads the system's certificates.
        self._tls = httpx.create_ssl_context()

    def open(self) -> httpx.AsyncClient:
        """Return connections for one event loop."""
        return open_client(self._key, self._tls)

    async def post(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        """Return the parsed response to a request.

        `client` is from `open`, `body` is JSON, and `index` is that of the request, for error messages.

        Raises:
            SamplerError: if the server rejects it, or does not respond within the limits of `retry`.
        """
        attempt = functools.partial(self._post_once, client, index, body)
        return await retrying_async(self._server.retry, (ServerLostError,), attempt)

    async def _post_once(self, client: httpx.AsyncClient, index: int, body: dict[str, Any]) -> object:
        base_url, section = self._server.base_url.rstrip("/"), self._server.section
        try:
            status, content = response = await post_json(
                client, f"{base_url}/completions", body, seconds=self._server.timeout, tokens=_asked_tokens(body)
            )
        except NoResponseError as error:
            raise ServerLostError(
                f"request {index}: the server at {base_url} does not respond ({error}); check that it is running, and "
                f"check {section}.base_url and {section}.timeout"
            ) from error
        # A server may repeat the key; it is replaced before the cut, which could leave a part of it.
        text = without_key(content.decode("utf-8", "replace"), self._key)[:500]
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _RETRIED_STATUSES:
            raise ServerLostError(f"request {index}: the server at {base_url} returned status {status}: {text}")
        if status != HTTPStatus.OK:
            remedy = _REMEDIES.get(status, "see the server's log").format(section=section)
            raise SamplerError(f"request {index}: {base_url} rejected it with status {status}: {text}; {remedy}")
        try:
            return response.parse()
        except ValueError as error:
            raise ServerLostError(
                f"request {index}: the response of the server at {base_url} is not JSON: {text[:200]!r}"
            ) from error


def _asked_tokens(body: Mapping[str, Any]) -> int:
    """Return a bound of the number of tokens that the response to a request describes."""
    prompts = body["prompt"] if isinstance(body["prompt"][0], str | list) else [body["prompt"]]
    # A text has at most as many tokens as bytes.
    return sum(len(p.encode() if isinstance(p, str) else p) + body["max_tokens"] for p in prompts)
