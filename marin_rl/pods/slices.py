# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""TPU slices of a queued resource, Google's request for one or several slices, and commands on their hosts."""

import concurrent.futures
import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from marin_rl.pods.config import CapacityType, SlicesConfig
from marin_rl.pods.gcloud import Gcloud, NotFoundError, UnreachableError

T = TypeVar("T")

LONG_TIMEOUT = 3600.0
"""Timeout in seconds for an installation on the hosts, and for a deletion."""
STATUS_TIMEOUT = 120.0
"""Timeout in seconds for short commands on the hosts."""
ABSENT = "ABSENT"
"""State of a queued resource or slice that does not exist."""
_LOST = {"PREEMPTED", "TERMINATED", "STOPPED", ABSENT}
_CAPACITY_FLAGS = {CapacityType.SPOT: ["--spot"], CapacityType.RESERVED: ["--reserved"], CapacityType.ON_DEMAND: []}


class SlicesLostError(UnreachableError):
    """A slice was preempted or deleted, and does not return."""


@dataclasses.dataclass(frozen=True)
class Description:
    """State of a queued resource."""

    state: str
    """State in Cloud TPU, such as WAITING_FOR_RESOURCES, ACTIVE, SUSPENDED or FAILED; or ABSENT."""
    error: str = ""
    """Message of a failed request."""
    slices: str = ""
    """Number and type of its slices, such as `2 x v5p-16`; empty if they are not known."""


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """Status of a job on a host."""

    job: str
    """Name of the job."""
    host: str
    """Name of the host."""
    state: str
    """`running`; or exit status, `stopped`, or `killed` if the host was restarted."""
    digest: str
    """Digest of its script, see `script_digest`."""

    @property
    def running(self) -> bool:
        """Whether a process of the job runs."""
        return self.state == "running"

    @property
    def failed(self) -> bool:
        """Whether it has ended, but was neither complete nor stopped."""
        return self.state not in ("running", "0", "stopped")


_STATUS = re.compile(r"^status (\S+) (\S+) (\S+) ([0-9a-f]{16})$", re.MULTILINE)


def script_digest(script: str) -> str:
    """Return the digest of a job's script in its status."""
    return hashlib.sha256(script.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of a queued resource."""

    gcloud: Gcloud
    name: str
    """Name of the queued resource; also of its slice, or the prefix of its slices."""
    config: SlicesConfig
    ssh_flags: tuple[str, ...] = ()
    """Further flags of ssh and scp."""

    @property
    def nodes(self) -> list[str]:
        """Names of the slices."""
        count = self.config.num_slices
        return [self.name] if count == 1 else [f"{self.name}-{index}" for index in range(count)]

    def describe(self) -> Description:
        """Describe the queued resource."""
        values = self._describe("queued-resources", self.name)
        if values is None:
            return Description(ABSENT)
        state, specs = values.get("state", {}), values.get("tpu", {}).get("nodeSpec", [])
        spec: dict[str, Any] = specs[0] if specs else {}
        count = (spec.get("multisliceParams") or spec.get("multiNodeParams") or {}).get("nodeCount", len(specs))
        kind = spec.get("node", {}).get("acceleratorType")
        return Description(
            state.get("state", "UNKNOWN"),
            state.get("failedData", {}).get("error", {}).get("message", ""),
            f"{count} x {kind}" if count and kind else "",
        )

    def create_arguments(self) -> list[str]:
        """Arguments of `gcloud compute tpus` that request the slices."""
        count = self.config.num_slices
        several = [f"--node-count={count}", f"--node-prefix={self.name}"]
        return [
            "queued-resources",
            "create",
            self.name,
            f"--accelerator-type={self.config.kind.type}",
            f"--runtime-version={self.config.runtime_version or self.config.kind.generation.runtime_version}",
            *([f"--node-id={self.name}"] if count == 1 else several),
            *_CAPACITY_FLAGS[self.config.capacity_type],
            *self.config.create_flags,
        ]

    def delete(self) -> bool:
        """Delete the queued resource with its slices; returns whether there was one."""
        try:
            self.gcloud.tpus("queued-resources", "delete", self.name, "--force", timeout=LONG_TIMEOUT)
        except NotFoundError:
            return False
        return True

    def addresses(self) -> list[str]:
        """Internal address of each host; none while a slice is created or repaired.

        Raises:
            SlicesLostError: if a slice does not exist any more.
        """
        found = [self._describe("tpu-vm", node) or {"state": ABSENT} for node in self.nodes]
        if lost := [node for node, values in zip(self.nodes, found, strict=True) if values.get("state") in _LOST]:
            raise SlicesLostError(f"slice {lost[0]} is lost")
        addresses = [point.get("ipAddress", "") for values in found for point in values.get("networkEndpoints", ())]
        return addresses if all(addresses) and all(values.get("state") == "READY" for values in found) else []

    def upload(self, folder: Path) -> None:
        """Copy a folder named `upload` to all hosts."""
        # Only the user of the host may read the folder, which contains secrets.
        self._ssh(["bash", "-c", f"umask 077; mkdir -p {self._folder}"])
        flags = ["--recurse", "--worker=all", *self.ssh_flags]
        self._on_nodes(
            self.nodes, lambda node: self.gcloud.tpus("tpu-vm", "scp", str(folder), f"{node}:{self._folder}/", *flags)
        )

    def setup(self) -> None:
        """Unpack and install the uploaded code on all hosts.

        Raises:
            GcloudError: if it fails on a host; the message contains the end of the output.
        """
        self._ssh(self._script("setup"), timeout=LONG_TIMEOUT)

    def start(self, job: str, worker: str) -> None:
        """Start a job on hosts where it does not run; `worker` is `all`, or the index of a host of the first slice."""
        self._ssh(self._script("start", job), worker)

    def stop(self, job: str, seconds: float) -> None:
        """Stop a job on all hosts, and kill it after some seconds."""
        self._ssh(self._script("stop", job, f"{seconds:g}"), timeout=seconds + STATUS_TIMEOUT)

    def statuses(self) -> list[JobStatus]:
        """Status of every job on every host that has started it."""
        output = self._ssh(self._script("status"), timeout=STATUS_TIMEOUT)
        return [JobStatus(*match.groups()) for match in _STATUS.finditer(output)]

    def logs(self, worker: str, lines: int, *, follow: bool) -> int:
        """Print the end of the logs of all jobs.

        Args:
            worker: `all`, or the index of a host in each slice.
            lines: number of lines of each log.
            follow: whether to continue with new lines until this process is interrupted.

        Returns:
            The exit status of the command that failed, or 0.
        """
        flags = self._ssh_flags(self._script("logs", str(lines), *(["--follow"] if follow else [])), worker)
        ended = self._on_nodes(self.nodes, lambda node: self.gcloud.stream_tpus("tpu-vm", "ssh", node, *flags))
        return next((status for status in ended if status != 0), 0)

    @property
    def _folder(self) -> str:
        return f"marin_rl_launch/{self.name}"

    def _describe(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.gcloud.tpus(kind, "describe", name, "--format=json"))
        except NotFoundError:
            return None

    def _script(self, *arguments: str) -> list[str]:
        """Command that runs the uploaded script, or does nothing on a new host without it."""
        script = f"{self._folder}/upload/host.sh"
        return ["bash", "-c", 'test ! -e "$0" || exec bash "$0" "$@"', script, *arguments]

    def _ssh(self, command: Sequence[str], worker: str = "all", timeout: float = 600.0) -> str:
        nodes, flags = self.nodes if worker == "all" else self.nodes[:1], self._ssh_flags(command, worker)
        call = self._on_nodes(nodes, lambda node: self.gcloud.tpus("tpu-vm", "ssh", node, *flags, timeout=timeout))
        return "\n".join(call)

    def _ssh_flags(self, command: Sequence[str], worker: str) -> list[str]:
        return [f"--worker={worker}", *self.ssh_flags, f"--command={shlex.join(command)}"]

    def _on_nodes(self, nodes: Sequence[str], call: Callable[[str], T]) -> list[T]:
        with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
            return list(pool.map(call, nodes))
