# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JSON of clients, with limits that are checked before it is parsed, and without text that no response can repeat."""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn

import numpy as np

from marin_rl.errors import storable

MAX_VALUES = 2**17
"""Maximum number of texts, keys, lists and objects in a body. Numbers are cheap, and a list of prompts has many."""
MAX_BODY_BYTES = 4 * 2**20
"""Default maximum size of a body."""
_MAX_MESSAGE = 1000
"""Maximum characters of an error message, which may quote the request."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


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
        self.status = int(status)
        self.param = None if param is None else storable(param, _MAX_MESSAGE)
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def read_object(data: bytes) -> dict[str, Any]:
    """Parse the body of a request, a JSON object.

    Args:
        data: the body, in UTF-8.

    Raises:
        ApiError: if it is not such an object, has too many values, or a text with a lone surrogate.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid JSON in UTF-8: {error}") from error
    body = read_value(text, "the body", None)
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}; it must be an object")
    if _SURROGATE.search(text):
        for name, value in body.items():
            _check_text(name, value)
    return body


def read_value(text: str, what: str, param: str | None) -> Any:
    """Parse a JSON value of a request; its parts are counted before.

    Args:
        text: the value.
        what: names the text in messages.
        param: name of its parameter.

    Raises:
        ApiError: if it is not valid JSON, or has too many values.
    """
    # Most bodies need no exact count: brackets in strings count here, too.
    if sum(map(text.count, '"[{')) > MAX_VALUES and (number := count_values(text.encode())) > MAX_VALUES:
        raise ApiError(
            f"{what} has {number} texts, keys, lists and objects, more than {MAX_VALUES}; send less, in several "
            "requests",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            param=param,
        )
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ApiError(f"{what} is not valid JSON for this server: it is nested too deeply", param=param) from error
    except ValueError as error:
        raise ApiError(f"{what} is not valid JSON: {error}", param=param) from error


def count_values(data: bytes) -> int:
    r"""Return the number of texts, keys, lists and objects in JSON, in linear time and without creating them.

    >>> count_values(b'{"a": [1, 2, "x, \\" [,"], "b": {}}')
    6
    """
    plain = np.frombuffer(data.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    quotes = plain == ord('"')
    in_text = np.logical_xor.accumulate(quotes)
    opens = (plain == ord("[")) | (plain == ord("{"))
    return int(np.count_nonzero(opens & ~in_text) + (np.count_nonzero(quotes) + 1) // 2)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _check_text(name: str, value: object) -> None:
    """Check that UTF-8 can represent a parameter, as responses, tokenizers and stored rollouts must."""
    try:
        json.dumps({name: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            f"{name} has a lone surrogate ({error.object[error.start]!a}, half a character); repair the text",
            param=name,
        ) from error


def check_keys(value: Mapping[str, Any], max_keys: int, param: str | None) -> None:
    """Check the number of parameters before each is validated.

    Raises:
        ApiError: if there are more than `max_keys`.
    """
    if len(value) > max_keys:
        raise ApiError(
            f"{param or 'the body'} has {len(value)} parameters; at most {max_keys} are read: remove unknown ones",
            param=param,
        )
