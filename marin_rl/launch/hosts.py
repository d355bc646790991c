# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Commands on all hosts of the slices of a queued resource, over `gcloud compute tpus tpu-vm ssh` and `scp`."""

import concurrent.futures
import dataclasses
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from marin_rl.launch.gcloud import Gcloud, UnreachableError

T = TypeVar("T")

INSTALL_TIMEOUT = 3600.0
STATUS_TIMEOUT = 120.0
"""Seconds after which a command on the hosts is given up."""
ATTEMPTS = 3
"""Attempts of a command if a host cannot be reached, which is common on new hosts."""
RETRY_DELAY = 10.0
"""Seconds before the second attempt; the third follows after twice as long."""


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """Status of a job on a host."""

    job: str
    """Name of the job."""
    running: bool
    """Whether the supervisor or its command runs."""
    host: str = ""
    """Name of the host; empty if the supervisor has not started."""
    state: str = ""
    """`running` or `exited`, as the supervisor wrote it last; empty if it has not started."""
    exit_status: int | None = None
    """Exit status of the last command that ended."""
    restarts: int = 0
    """Number of restarts."""
    command: tuple[str, ...] = ()
    """The supervised command."""


_STATUS = re.compile(r"^status (\S+) (running|ended) (\{.*\})$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts of the slices of a queued resource."""

    gcloud: Gcloud
    name: str
    """Name of the queued resource."""
    nodes: Sequence[str]
    """Names of the slices."""
    ssh_flags: tuple[str, ...] = ()
    """Further flags of ssh and scp."""

    def upload(self, folder: Path) -> None:
        """Copy a folder named `upload` to all hosts.

        Raises:
            GcloudError: if a host cannot be reached.
        """
        # Only the user of the host may read the folder, which contains secrets.
        self._repeated(lambda: self._ssh(["bash", "-c", f"umask 077; mkdir -p {self._folder}"], "all"))
        flags = ["--recurse", "--worker=all", *self.ssh_flags]

        def copy(node: str) -> str:
            return self.gcloud.tpus("tpu-vm", "scp", str(folder), f"{node}:{self._folder}/", *flags)

        self._repeated(lambda: self._on_nodes(self.nodes, copy))

    def setup(self) -> None:
        """Unpack and install the uploaded code on all hosts.

        Raises:
            GcloudError: if it fails on a host; the message contains the end of the output.
        """
        self._ssh([*self._script, "setup"], "all", INSTALL_TIMEOUT)

    def start(self, job: str, worker: str) -> None:
        """Start the supervisor of a job, on hosts where it does not run.

        Args:
            job: name of the job.
            worker: `all`, or the index of a host of the first slice.

        Raises:
            GcloudError: if it does not start on a host.
        """
        self._repeated(lambda: self._ssh([*self._script, "start", job], worker))

    def stop(self, job: str, seconds: float) -> None:
        """Stop a job on all hosts, and kill it after some seconds.

        Raises:
            GcloudError: if a host cannot be reached.
        """
        command = self._if_uploaded("stop", job, f"{seconds:g}")
        self._repeated(lambda: self._ssh(command, "all", seconds + STATUS_TIMEOUT))

    def statuses(self) -> list[JobStatus]:
        """Status of every job on every host.

        Raises:
            GcloudError: if a host cannot be reached.
        """
        output = self._ssh(self._if_uploaded("status"), "all", STATUS_TIMEOUT)
        return [_status(*match.groups()) for match in _STATUS.finditer(output)]

    def logs(self, worker: str, lines: int, *, follow: bool) -> int:
        """Print the end of the logs of all jobs.

        Args:
            worker: `all`, or the index of a host in each slice.
            lines: number of lines of each log.
            follow: whether to continue with new lines until this process is interrupted.

        Returns:
            The exit status of the command that failed, or 0.
        """
        command = self._if_uploaded("logs", str(lines), *(["--follow"] if follow else []))

        def show(node: str) -> int:
            return self.gcloud.stream_tpus("tpu-vm", "ssh", node, *self._ssh_flags(command, worker))

        return next((status for status in self._on_nodes(self.nodes, show) if status != 0), 0)

    @property
    def _folder(self) -> str:
        return f"marin_rl_launch/{self.name}"

    @property
    def _script(self) -> list[str]:
        return ["bash", f"{self._folder}/upload/host.sh"]

    def _if_uploaded(self, *arguments: str) -> list[str]:
        """Command that runs the script, or does nothing on a new host without it."""
        return ["bash", "-c", 'test ! -e "$0" || exec bash "$0" "$@"', self._script[1], *arguments]

    def _ssh(self, command: Sequence[str], worker: str, timeout: float = 600.0) -> str:
        nodes = self.nodes if worker == "all" else self.nodes[:1]

        def run(node: str) -> str:
            return self.gcloud.tpus("tpu-vm", "ssh", node, *self._ssh_flags(command, worker), timeout=timeout)

        return "\n".join(self._on_nodes(nodes, run))

    def _ssh_flags(self, command: Sequence[str], worker: str) -> list[str]:
        return [f"--worker={worker}", *self.ssh_flags, f"--command={shlex.join(command)}"]

    def _on_nodes(self, nodes: Sequence[str], call: Callable[[str], T]) -> list[T]:
        with concurrent.futures.ThreadPoolExecutor(max(1, len(nodes))) as pool:
            return list(pool.map(call, nodes))

    def _repeated(self, call: Callable[[], object]) -> None:
        for attempt in range(1, ATTEMPTS):
            try:
                call()
                return
            except UnreachableError as error:
                self.gcloud.report(f"{error}; trying again")
                time.sleep(RETRY_DELAY * attempt)
        call()


def _status(job: str, lock: str, record: str) -> JobStatus:
    values: Mapping[str, Any] = json.loads(record)
    if not values:
        return JobStatus(job, lock == "running")
    known = {name: values[name] for name in ("host", "state", "exit_status", "restarts")}
    return JobStatus(job, lock == "running", command=tuple(values["command"]), **known)
