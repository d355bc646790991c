# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JSON messages on a pipe: a length of four bytes (big-endian), then the text. Pickle is never used."""

import json
import os
from typing import Any

HEADER_BYTES = 4


def encode(message: dict[str, Any]) -> bytes:
    r"""Encode a message.

    >>> encode({"a": 1})
    b'\x00\x00\x00\x08{"a": 1}'
    """
    text = json.dumps(message).encode()
    return len(text).to_bytes(HEADER_BYTES, "big") + text


def length(header: bytes) -> int:
    """Return the length of the text that follows a header."""
    return int.from_bytes(header[:HEADER_BYTES], "big")


def read(descriptor: int) -> dict[str, Any] | None:
    """Wait for the next message and return it, or None at the end of the pipe."""
    header = _read_exactly(descriptor, HEADER_BYTES)
    if header is None:
        return None
    text = _read_exactly(descriptor, length(header))
    return None if text is None else json.loads(text)


def write(descriptor: int, message: dict[str, Any]) -> None:
    """Write a whole message."""
    rest = memoryview(encode(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
