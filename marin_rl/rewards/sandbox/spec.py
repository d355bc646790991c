# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a worker process is told when it starts."""

import dataclasses
import json

from marin_rl.rewards.sandbox.limits import CallLimits


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """One worker: whose code it runs, and what that code may do."""

    file: str | None
    """The user's file, absolute; None for a worker that runs programs."""
    scratch: str
    """Folder for the folders of calls."""
    read: tuple[str, ...]
    """Files and folders that calls may read."""
    python_path: tuple[str, ...]
    """Folders that Python's own path gets at its end."""
    hidden_path: tuple[str, ...]
    """Folders that programs do not find on Python's path, though the worker has them there."""
    has_namespaces: bool
    """Whether the worker already runs in namespaces of its own."""
    landlock: int
    """Version of Landlock to use; 0 for none."""
    seccomp: bool
    """Whether to filter system calls."""
    start_seconds: float
    """Seconds that loading the user's file may take."""
    limits: CallLimits
    """What one call may use."""

    @property
    def can_start_processes(self) -> bool:
        """Whether a call can start processes, be it allowed or not."""
        return self.limits.processes > 0 or not self.seccomp

    def to_json(self) -> str:
        """The spec as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerSpec":
        """The spec that `to_json` wrote."""
        fields = json.loads(text)
        fields["limits"] = CallLimits(**fields["limits"])
        fields |= {name: tuple(fields[name]) for name in ("read", "python_path", "hidden_path")}
        return cls(**fields)
