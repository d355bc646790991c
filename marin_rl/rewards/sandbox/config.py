# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a user says about the sandbox."""

import dataclasses
import math
from pathlib import Path

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.limits import CallLimits


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Where reward functions and model-written programs run, and what one call may use."""

    require: Isolation = Isolation.PARTIAL
    """The least isolation to run with: `full`, `partial` or `none`. A machine that offers less refuses to start."""
    workers: int = 2
    """Worker processes, so calls at the same time; at least 1."""
    wall_seconds: float = 10.0
    """Seconds from the start of a call to its answer; above 0."""
    cpu_seconds: float = 10.0
    """Seconds of processor time of a call, rounded up to whole ones; above 0. Each process that a call starts has as
    many."""
    memory_mb: int = 2048
    """Mebibytes of address space that a call may take beyond what the loaded file takes, and that loading the file may
    take; at least 64. Threads count, about 8 each by default. Each process that a call starts may take as much."""
    processes: int = 0
    """Processes that a call may have at a time, those included that it does not wait for. With 0 it can start neither
    processes nor programs. All stay in the call's session and process group."""
    threads: int = 64
    """Threads that a call may have at a time, those of its processes included; at least 1. Not limited off Linux."""
    file_mb: int = 16
    """Mebibytes of any one file that a call writes, and a quarter of what its folder holds; at least 1. Off Linux the
    folder is not limited."""
    output_kb: int = 1024
    """Kibibytes of a call's answer, of what it prints, and of what it writes to stderr, each; at least 1."""
    start_seconds: float = 60.0
    """Seconds that loading a user's file may take; above 0."""
    read_paths: tuple[str, ...] = ()
    """Further files and folders that reward functions may read; folders are put on Python's path. The folder of the
    function's own file is always readable."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        for field, least in (
            ("workers", 1),
            ("memory_mb", 64),
            ("processes", 0),
            ("threads", 1),
            ("file_mb", 1),
            ("output_kb", 1),
        ):
            if getattr(self, field) < least:
                raise ValueError(f"sandbox.{field} is {getattr(self, field)}; it must be at least {least}")
        for field in ("wall_seconds", "cpu_seconds", "start_seconds"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"sandbox.{field} is {value}; it is a number of seconds above 0")
        for path in self.read_paths:
            if not Path(path).exists():
                raise ValueError(f"sandbox.read_paths: {path} does not exist; correct it or leave it out")

    def limits(self) -> CallLimits:
        """What one call may use, in bytes and seconds."""
        return CallLimits(
            wall_seconds=float(self.wall_seconds),
            cpu_seconds=float(self.cpu_seconds),
            memory_bytes=self.memory_mb * 2**20,
            processes=self.processes,
            threads=self.threads,
            file_bytes=self.file_mb * 2**20,
            output_bytes=self.output_kb * 2**10,
        )
