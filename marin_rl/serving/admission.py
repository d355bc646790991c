# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Limits of the requests that are in progress together."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Literal

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from marin_rl.serving.errors import EXCEPTION_HANDLERS, ApiError

Resource = Literal["requests", "sequences", "bytes of requests"]
Admit = Callable[[Resource, int], None]
"""Adds to a request's use of a resource, or raises `ApiError`; `request.state.admit` in endpoints."""
MAX_BODIES = 256
"""Maximum size of the bodies of all requests in progress together, as a multiple of that of one."""


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
                raise ApiError(
                    f"the server has {used} {resource} in progress or waiting, and accepts no more; retry later",
                    status=HTTPStatus.TOO_MANY_REQUESTS,
                    code="rate_limit_exceeded",
                )
            self.used[resource] += number
            own[resource] += number

        try:
            admit("requests", 1)
            yield admit
        finally:
            self.used.subtract(own)


class _Middleware:
    """Admits each request until its response is complete, except those for `/health`."""

    def __init__(self, app: ASGIApp, admission: Admission, check: Callable[[Headers], None]) -> None:
        self._app, self._admission, self._check = app, admission, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        if scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
            with self._admission.request() as scope["state"]["admit"], contextlib.suppress(ClientDisconnect):
                await self._app(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)


def limited_app(
    routes: Sequence[Route], admission: Admission, check: Callable[[Headers], None] = lambda headers: None
) -> Starlette:
    """Return an application that admits requests, and whose errors have OpenAI's format.

    Args:
        routes: endpoints; their requests have `state.admit`.
        admission: limits of all requests together.
        check: raises `ApiError` if a request with these headers is refused.
    """
    middleware = [Middleware(_Middleware, admission, check)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=EXCEPTION_HANDLERS)
