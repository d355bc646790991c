# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JSON of clients, with limits that are checked before it is parsed."""

from http import HTTPStatus
from typing import Any

import numpy as np
from pydantic_core import from_json

from marin_rl.serving.errors import ApiError

MAX_VALUES = 2**17
"""Maximum number of texts, keys, lists and objects in a body. Numbers are cheap, and a list of prompts has many."""
MAX_BODY_BYTES = 4 * 2**20
"""Default maximum size of a body."""


def read_object(data: bytes) -> dict[str, Any]:
    """Parse the body of a request, a JSON object.

    Raises:
        ApiError: if it is not such an object, or has too many values.
    """
    body = read_value(data, "the body", None)
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}; it must be an object")
    return body


def read_value(data: bytes, what: str, param: str | None) -> Any:
    """Parse a JSON value of a request; its parts are counted before.

    Args:
        data: the value, in UTF-8.
        what: names it in messages.
        param: name of its parameter.

    Raises:
        ApiError: if it is not valid JSON, has half a surrogate pair, is nested too deeply, or has too many values.
    """
    # Most bodies need no exact count: brackets in strings count here, too.
    if sum(map(data.count, (b'"', b"[", b"{"))) > MAX_VALUES and (number := count_values(data)) > MAX_VALUES:
        raise ApiError(
            f"{what} has {number} texts, keys, lists and objects, more than {MAX_VALUES}; send less, in several "
            "requests",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            param=param,
        )
    try:
        return from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        reason = f"{error} (a lone surrogate is half a character)" if "hex escape" in str(error) else error
        raise ApiError(f"{what} is not valid JSON for this server: {reason}", param=param) from error


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
