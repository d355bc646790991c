# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Protocol between trainer and worker: JSON messages on pipes, and the settings of a worker.

A message is a length of four bytes (big-endian) and the text. Pickle is never used.
"""

import dataclasses
import json
import os
from typing import Any

from marin_rl.rewards.sandbox.limits import CallLimits

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


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """Settings of a worker: the user's file, its permissions and its limits."""

    file: str | None
    """The user's file, absolute; None for a worker that runs programs."""
    scratch: str
    """Folder for the scratch folders of calls."""
    read: tuple[str, ...]
    """Files and folders that calls may read."""
    python_path: tuple[str, ...]
    """Folders that are appended to the Python path."""
    hidden_path: tuple[str, ...]
    """Folders that are removed from the Python path of programs, though the worker uses them."""
    has_namespaces: bool
    """Whether the worker runs in separate namespaces."""
    landlock: int
    """Landlock version to use; 0 to disable it."""
    seccomp: bool
    """Whether to filter system calls."""
    start_seconds: float
    """Time limit in seconds for loading the user's file."""
    limits: CallLimits
    """Resource limits of one call."""

    @property
    def can_start_processes(self) -> bool:
        """Whether the kernel permits a call to start processes, which the worker may then count."""
        return self.limits.processes > 0 or not self.seccomp

    def to_json(self) -> str:
        """Encode the spec as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerSpec":
        """Decode the result of `to_json`."""
        fields = json.loads(text)
        fields["limits"] = CallLimits(**fields["limits"])
        fields |= {name: tuple(fields[name]) for name in ("read", "python_path", "hidden_path")}
        return cls(**fields)
