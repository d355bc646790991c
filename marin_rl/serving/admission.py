# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Limits of an HTTP application: what all requests use together, who may send them, and the size of their bodies."""

import asyncio
import collections
import contextlib
import hmac
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Literal

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marin_rl.serving.bodies import CLIENT_LEFT, ApiError, error_response, json_response
from marin_rl.utils.settings.fields import is_loopback

Resource = Literal["requests", "sequences", "bytes of requests"]
Admit = Callable[[Resource, int], None]
"""Adds to a request's use of a resource, or raises `ApiError`; `request.state.admit` in endpoints."""
MAX_BODIES = 256
"""Maximum size of the bodies of all requests in progress together, as a multiple of that of one."""
_HOST = re.compile(r"\[?([^\[\]]*?)\]?(?::\d+)?")


class Admission:
    """Counts what requests in progress use, and refuses more than the limits.

    >>> admission = Admission({"sequences": 2})
    >>> with admission.request() as admit:
    ...     admit("sequences", 2)
    >>> admission.used["sequences"]
    0
    """

    def __init__(self, limits: Mapping[Resource, int]) -> None:
        """Start without requests.

        Args:
            limits: maximum of each resource; the others are unlimited.
        """
        self._limits = limits
        self.used: collections.Counter[Resource] = collections.Counter()
        """What all requests use."""

    @contextlib.contextmanager
    def request(self) -> Iterator[Admit]:
        """Admit a request until the end of the block, which also releases what the request admits in addition.

        Raises:
            ApiError: if there are too many requests.
        """
        own: collections.Counter[Resource] = collections.Counter()

        def admit(resource: Resource, number: int) -> None:
            if resource in self._limits and (used := self.used[resource]) + number > self._limits[resource]:
                raise busy(f"the server has {used} {resource} in progress or waiting, and accepts no more")
            self.used[resource] += number
            own[resource] += number

        try:
            admit("requests", 1)
            yield admit
        finally:
            self.used.subtract(own)


def limited_app(
    routes: Sequence[Route],
    admission: Admission,
    check: Callable[[Headers], None] = lambda headers: None,
    count: Callable[[str, int, float], None] = lambda path, status, seconds: None,
) -> ASGIApp:
    """Return an application that admits requests, and whose errors have OpenAI's format.

    Args:
        routes: endpoints; their requests have `state.admit`.
        admission: limits of all requests together, except those for `/health`.
        check: raises `ApiError` if a request with these headers is refused.
        count: called at the end of a request with its path (`other` if no route has it), status and seconds. The
            status is 499 if the client disconnected before the end of its response, also of a stream.
    """
    # Few, whatever paths clients invent.
    paths = {route.path for route in routes if "{" not in route.path}
    handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, OSError, Exception), error_response)
    app = Starlette(routes=routes, exception_handlers=handlers)

    async def admitted(scope: Scope, receive: Receive, send: Send) -> None:
        status, is_whole, start = CLIENT_LEFT, False, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status, is_whole
            status = message.get("status", status)
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        scope.setdefault("state", {})
        try:
            if scope["path"] == "/health":
                await app(scope, receive, watched)
                return
            check(Headers(scope=scope))
            with admission.request() as scope["state"]["admit"]:
                await app(scope, receive, watched)
        except ApiError as error:
            await error.response()(scope, receive, watched)
        except Exception:
            status, is_whole = 500, True
            raise
        finally:
            path = scope["path"] if scope["path"] in paths else "other"
            count(path, status if is_whole else CLIENT_LEFT, time.monotonic() - start)

    return admitted


def busy(reason: str) -> ApiError:
    """Return the error of a request that can be repeated later."""
    return ApiError(f"{reason}; retry later", status=HTTPStatus.TOO_MANY_REQUESTS, code="rate_limit_exceeded")


def health(part: str, failure: object, **fields: str) -> Response:
    """Answer a request for the health of a server: status 200 with fields, or 503 if a part, "the trainer", failed."""
    if failure is not None:
        raise ApiError(f"{part} failed: {failure}", status=HTTPStatus.SERVICE_UNAVAILABLE)
    return json_response({"status": "ok", **fields})


def check_key(given: str, key: str, remedy: str) -> None:
    """Raise `ApiError` with a remedy unless the header of a request has the API key."""
    if not hmac.compare_digest(given.encode("latin-1"), key.encode()):
        raise ApiError(
            f"the API key is missing or wrong; {remedy}", status=HTTPStatus.UNAUTHORIZED, code="invalid_api_key"
        )


def check_bearer(headers: Headers, key: str) -> None:
    """Raise `ApiError` unless a request has the API key as a bearer token."""
    remedy = "send it as a bearer token (Authorization: Bearer KEY)"
    check_key(headers.get("authorization", ""), f"Bearer {key}", remedy)


def check_host(headers: Headers) -> None:
    """Raise `ApiError` unless a request without a key names this machine as its host."""
    # A web page can give its own host name the address of this machine (DNS rebinding).
    host = headers.get("host", "")
    if (match := _HOST.fullmatch(host)) is None or not is_loopback(match[1]):
        raise ApiError(
            f"the host {host[:100]!r} is not this machine; use 127.0.0.1, or start the server with an API key",
            status=HTTPStatus.FORBIDDEN,
        )


async def read_body(request: Request, content_type: str, limit: int, seconds: float) -> bytes:
    """Read the body of a request.

    Args:
        request: the request, with `state.admit`.
        content_type: type that it must have.
        limit: maximum number of bytes.
        seconds: maximum time in which the client sends it.

    Raises:
        ApiError: if its type is another one, or it is compressed, too large or late.
        ClientDisconnect: if the client left before its end.
    """
    # Browsers send such types to another origin only after a preflight, which this server refuses.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != content_type:
        raise ApiError(f"the content type must be {content_type}", status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(
            f"the content encoding is {encoding!r:.100}; send the body without compression",
            status=HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        )
    data = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                request.state.admit("bytes of requests", len(part))
                data += part
                if len(data) > limit:
                    raise ApiError(f"the body exceeds {limit} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    except TimeoutError as error:
        raise ApiError("the body did not arrive in time", status=HTTPStatus.REQUEST_TIMEOUT) from error
    return bytes(data)
