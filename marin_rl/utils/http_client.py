# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JSON requests to servers of other people, with limits of time and size for the whole response."""

import asyncio
import http.cookiejar
import json
import logging
from typing import Any, NamedTuple

import httpx

# httpx logs a line for each request.
logging.getLogger("httpx").setLevel(logging.WARNING)

_BASE_BYTES = 2**20
"""Bytes of a response without tokens, such as an error page."""
_TOKEN_BYTES = 2**10
"""Bytes of a token with its text, log-probs and position; vLLM sends about 130 in the mean."""


class NoResponseError(Exception):
    """A request got no complete response within its limits. It may be repeated."""


class JsonResponse(NamedTuple):
    """A complete response."""

    status: int
    """HTTP status."""
    content: bytes
    """The body."""

    def parse(self) -> Any:
        """Parse the body.

        Raises:
            ValueError: if it is not JSON in UTF-8, or nested too deeply.
        """
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None


def response_limit(tokens: int) -> int:
    """Return the maximum number of bytes of a response about a number of tokens."""
    return _BASE_BYTES + tokens * _TOKEN_BYTES


def open_client(key: str | None, tls: Any = True) -> httpx.AsyncClient:
    """Return connections for one event loop; callers of `post_json` limit time and concurrency.

    Args:
        key: bearer token; None for a server without keys.
        tls: `verify` of httpx.
    """
    # A compressed kilobyte can be a megabyte. Cookies would grow with each response.
    no_cookies = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
    return httpx.AsyncClient(
        timeout=None,
        verify=tls,
        headers={"Accept-Encoding": "identity"} | ({} if key is None else {"Authorization": f"Bearer {key}"}),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        cookies=no_cookies,
    )


async def post_json(client: httpx.AsyncClient, url: str, body: Any, *, seconds: float, tokens: int) -> JsonResponse:
    """Post a request and read the whole response.

    Args:
        client: from `open_client`.
        url: address.
        body: JSON of the request.
        seconds: time limit from connecting to the last byte.
        tokens: number of tokens that the response describes, which limits its size.

    Raises:
        NoResponseError: if there is no complete response within the limits; names the limit.
    """
    try:
        async with asyncio.timeout(seconds), client.stream("POST", url, json=body) as response:
            return JsonResponse(response.status_code, await _read(response, response_limit(tokens)))
    except TimeoutError as error:
        raise NoResponseError(f"no complete response within {seconds:g} s") from error
    # A name that cannot be looked up is a UnicodeError.
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        raise NoResponseError(f"{type(error).__name__}: {error}") from error


async def _read(response: httpx.Response, limit: int) -> bytes:
    """Return the content; one that is compressed or too long is not read to its end."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise NoResponseError(f"the response has the content encoding {encoding[:40]!r}, which was not accepted")
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > limit:
            raise NoResponseError(f"a response of more than {limit} bytes")
    return bytes(content)


def without_key(text: str, key: str | None) -> str:
    """Return a text of a server without the API key, also in the form that it has in JSON."""
    if key is None:
        return text
    in_json = json.dumps(key)[1:-1]
    for form in (in_json.replace("/", r"\/"), in_json, key):
        text = text.replace(form, "***")
    return text
