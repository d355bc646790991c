# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of the sandbox."""

import dataclasses
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt

from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.protocol import CallLimits
from marin_rl.utils.settings.checks import ConfigSection, check_fields


@dataclasses.dataclass(frozen=True)
class SandboxConfig(ConfigSection):
    """Isolation of reward functions and model-written programs, and resource limits of each call."""

    require: Isolation = Isolation.PARTIAL
    """Minimum isolation: `full`, `partial` or `none`. The run does not start on a machine that offers less."""
    workers: Annotated[int, Ge(1)] = 2
    """Number of worker processes, and so of concurrent calls."""
    wall_seconds: Annotated[float, Gt(0)] = 10.0
    """Seconds from the start of a call to its answer."""
    cpu_seconds: Annotated[float, Gt(0)] = 10.0
    """Seconds of CPU time of a call, rounded up to whole seconds. Each process that a call starts has the same
    limit."""
    memory_mb: Annotated[int, Ge(64)] = 2048
    """Mebibytes of address space that a call may use in addition to the loaded file, and limit for loading the file.
    Threads count, about 8 MiB each by default. Each process that a call starts has the same limit."""
    processes: Annotated[int, Ge(0)] = 0
    """Concurrent processes of a call, including those that it does not wait for. With 0 it can start neither processes
    nor programs. All processes stay in the call's session and process group."""
    threads: Annotated[int, Ge(1)] = 64
    """Concurrent threads of a call, including those of its processes. Enforced on Linux only."""
    file_mb: Annotated[int, Ge(1)] = 16
    """Mebibytes of a single file that a call writes. All its files together, including deleted ones that
    are still open, use at most four times as much, and each counts as at least 32 KiB; enforced on Linux only."""
    output_kb: Annotated[int, Ge(1)] = 1024
    """Kibibytes of a call's answer, of its stdout and of its stderr, each."""
    start_seconds: Annotated[float, Gt(0)] = 60.0
    """Time limit in seconds for loading a user's file."""
    read_paths: tuple[str, ...] = ()
    """Further files and folders that reward functions may read; folders are added to the Python path. The folder that
    contains the function's file is always readable."""

    def __post_init__(self) -> None:
        check_fields(self)
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
