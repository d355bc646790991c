# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors in OpenAI's format."""

import logging
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from marin_rl.utils.errors import storable

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 1000
"""Maximum characters of an error message, which may quote the request."""
_HEADERS = {
    HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"},
    HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"},
}


class ApiError(Exception):
    """A request that is answered with an error in OpenAI's format."""

    def __init__(
        self, message: str, *, status: int = HTTPStatus.BAD_REQUEST, param: str | None = None, code: str | None = None
    ) -> None:
        """Create the error.

        Args:
            message: names the problem and the remedy; cut if it is long.
            status: HTTP status.
            param: name of the invalid parameter.
            code: OpenAI's error code.
        """
        super().__init__(storable(message, _MAX_MESSAGE))
        self.status = HTTPStatus(status)
        self.param = None if param is None else storable(param, _MAX_MESSAGE)
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the response."""
        return JSONResponse(self.body(), self.status, headers=_HEADERS.get(self.status))


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(message, status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


async def _show_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError("internal error; see the server's log", status=HTTPStatus.INTERNAL_SERVER_ERROR).response()


EXCEPTION_HANDLERS = {ApiError: _show_error, HTTPException: _show_http_error, Exception: _show_bug}
"""Responses to errors of endpoints."""
