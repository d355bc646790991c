# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the sandbox."""

import dataclasses
import math
from pathlib import Path

from marin_rl.config_fields import convert_enum_fields
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.protocol import CallLimits


@dataclasses.dataclass(frozen=True)
class SandboxConfig:
    """Isolation of reward functions and model-written programs, and resource limits of each call."""

    require: Isolation = Isolation.PARTIAL
    """Minimum isolation: `full`, `partial` or `none`. The run does not start on a machine that offers less."""
    workers: int = 2
    """Number of worker processes, and so of concurrent calls; at least 1."""
    wall_seconds: float = 10.0
    """Seconds from the start of a call to its answer; above 0."""
    cpu_seconds: float = 10.0
    """Seconds of CPU time of a call, rounded up to whole seconds; above 0. Each process that a call starts has the same
    limit."""
    memory_mb: int = 2048
    """Mebibytes of address space that a call may use in addition to the loaded file, and limit for loading the file; at
    least 64. Threads count, about 8 MiB each by default. Each process that a call starts has the same limit."""
    processes: int = 0
    """Concurrent processes of a call, including those that it does not wait for. With 0 it can start neither processes
    nor programs. All processes stay in the call's session and process group."""
    threads: int = 64
    """Concurrent threads of a call, including those of its processes; at least 1. Enforced on Linux only."""
    file_mb: int = 16
    """Mebibytes of a single file that a call writes; at least 1. All its files together, including deleted ones that
    are still open, use at most four times as much, and each counts as at least 32 KiB; enforced on Linux only."""
    output_kb: int = 1024
    """Kibibytes of a call's answer, of its stdout and of its stderr, each; at least 1."""
    start_seconds: float = 60.0
    """Time limit in seconds for loading a user's file; above 0."""
    read_paths: tuple[str, ...] = ()
    """Further files and folders that reward functions may read; folders are added to the Python path. The folder that
    contains the function's file is always readable."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        for field, minimum in (
            ("workers", 1),
            ("memory_mb", 64),
            ("processes", 0),
            ("threads", 1),
            ("file_mb", 1),
            ("output_kb", 1),
        ):
            if getattr(self, field) < minimum:
                raise ValueError(f"sandbox.{field} must be at least {minimum}, got {getattr(self, field)}")
        for field in ("wall_seconds", "cpu_seconds", "start_seconds"):
            value = getattr(self, field)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"sandbox.{field} must be a finite number of seconds above 0, got {value}")
        for path in self.read_paths:
            if not Path(path).exists():
                raise ValueError(f"sandbox.read_paths: {path} does not exist; correct or remove it")

    def limits(self) -> CallLimits:
        """Return the resource limits of one call, in bytes and seconds."""
        return CallLimits(
            wall_seconds=float(self.wall_seconds),
            cpu_seconds=float(self.cpu_seconds),
            memory_bytes=self.memory_mb * 2**20,
            processes=self.processes,
            threads=self.threads,
            file_bytes=self.file_mb * 2**20,
            output_bytes=self.output_kb * 2**10,
        )
