# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Protocol between trainer and worker: JSON messages on pipes, and the settings of a worker.

A message is a length of four bytes (big-endian) and the text. Pickle is never used.
"""

import dataclasses
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
    header = read_exactly(descriptor, HEADER_BYTES)
    text = None if header is None else read_exactly(descriptor, length(header))
    return None if text is None else json.loads(text)


def read_exactly(descriptor: int, size: int) -> bytes | None:
    """Wait for `size` bytes and return them, or None at the end of the pipe."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def write(descriptor: int, data: bytes) -> None:
    """Write all of the data."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@dataclasses.dataclass(frozen=True)
class CallLimits:
    """Resource limits of one call."""

    wall_seconds: float
    """Seconds from the start of the call to its answer."""
    cpu_seconds: float
    """Seconds of CPU time, rounded up because the kernel counts whole seconds."""
    memory_bytes: int
    """Bytes of address space in addition to that of the loaded file."""
    processes: int
    """Processes and programs in addition to the call's own process."""
    threads: int
    """Threads of the call and its processes together, including the main thread of each."""
    file_bytes: int
    """Size in bytes of a single file that the call writes."""
    output_bytes: int
    """Size in bytes of stdout, of stderr and of the answer, each."""

    @property
    def folder_bytes(self) -> int:
        """Disk space in bytes of all files that the call writes."""
        return 4 * self.file_bytes


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

    @property
    def counts_open_files(self) -> bool:
        """Whether the worker counts the open files of a call that have no name; in namespaces, `tmpfs` does."""
        return self.seccomp and not self.has_namespaces

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
