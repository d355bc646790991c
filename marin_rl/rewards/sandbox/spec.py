# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Settings of a worker process."""

import dataclasses
import json

from marin_rl.rewards.sandbox.limits import CallLimits


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
        """Whether the kernel lets a call start processes, allowed or not."""
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
