# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""TPU slices by the `gcloud` command: their queued resource, Google's request for one or several, and their hosts."""

import concurrent.futures
import dataclasses
import hashlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from marin_rl.pods.config import CapacityType, SlicesConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.output import escape_line

T = TypeVar("T")

DETAIL = 600
"""Maximum characters of gcloud's message in an error."""
LONG_TIMEOUT = 3600.0
"""Timeout in seconds for a request, a deletion, a copy to the hosts and an installation there."""
SHORT_TIMEOUT = 120.0
"""Timeout in seconds for other commands."""
ABSENT = "ABSENT"
"""State of a queued resource or slice that does not exist."""
_LOST = {"PREEMPTED", "TERMINATED", "STOPPED", ABSENT}
_CAPACITY_FLAGS = {CapacityType.SPOT: ["--spot"], CapacityType.RESERVED: ["--reserved"], CapacityType.ON_DEMAND: []}


class GcloudError(UserError):
    """A gcloud command failed. The message names the cause and the remedy."""


class NotFoundError(GcloudError):
    """The resource of a gcloud command does not exist."""


class UnreachableError(GcloudError):
    """A host or Google Cloud cannot be reached; another attempt may succeed."""


_CAUSES: tuple[tuple[type[GcloudError], str, str], ...] = (
    (NotFoundError, r"NOT_FOUND|was not found|HTTPError 404", "there is no such resource"),
    (
        UnreachableError,
        r"return code \[255\]|exit status 255|[Cc]onnection (refused|reset|closed|timed out)|Unable to find the server|"
        r"Network is unreachable|HTTPError 50[0-9]|\bUNAVAILABLE\b",
        "a host or Google Cloud cannot be reached",
    ),
    (
        GcloudError,
        r"[Qq]uota|RESOURCE_EXHAUSTED",
        "the project has no quota for this request; request more quota, or choose another zone, tpu_type or "
        "capacity_type",
    ),
    (
        GcloudError,
        r"PERMISSION_DENIED|[Pp]ermission|HTTPError 403|AccessDenied|does not have .* access",
        "your account lacks a permission, or the zone or bucket does not exist; correct the name, or ask an owner of "
        "the project for the roles TPU Admin, Service Account User and Storage Object User",
    ),
    (GcloudError, "", "the command failed"),
)
"""Kind of error, pattern in the message of gcloud, and its meaning; the first that matches."""


def _error(command: Sequence[str], stderr: str) -> GcloudError:
    name = shlex.join(["gcloud", *command[1:]])
    if "ssh" in command or "scp" in command:
        # The message ends with the output of programs on the hosts, which may contain any words.
        detail = escape_line(" ".join(stderr.split()))[-DETAIL:]
        causes = [cause for cause in _CAUSES if cause[0] is UnreachableError] + [_CAUSES[-1]]
    else:
        # gcloud's own message begins with ERROR; the lines before are warnings and progress.
        begin = re.search(r"^ERROR", stderr, re.MULTILINE)
        detail, causes = escape_line(" ".join(stderr[begin.start() if begin else 0 :].split()))[:DETAIL], _CAUSES
    kind, _, meaning = next(cause for cause in causes if re.search(cause[1], stderr))
    return kind(f"{meaning}: `{name}`: {detail or 'no message'}")


def run_gcloud(*arguments: str, project: str | None, timeout: float = SHORT_TIMEOUT) -> str:
    """Run a gcloud command and return its standard output.

    Pass no secrets: other users of this machine can read the arguments. `project` is None for gcloud's default. The
    command is killed after `timeout` seconds.

    Raises:
        NotFoundError: if the resource does not exist.
        UnreachableError: if a host cannot be reached, or the command takes too long.
        GcloudError: if the command fails.
    """
    command, options = _command(arguments, project), {"stdin": subprocess.DEVNULL, "errors": "backslashreplace"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"`{shlex.join(command)}` did not end within {timeout:g} s") from error
    if done.returncode != 0:
        raise _error(command, done.stderr)
    return done.stdout


def stream_gcloud(*arguments: str, project: str | None) -> int:
    """Run a gcloud command with the output of this process; returns its exit status."""
    return subprocess.run(_command(arguments, project), stdin=subprocess.DEVNULL, check=False).returncode


def _command(arguments: Sequence[str], project: str | None) -> list[str]:
    program = shutil.which("gcloud")
    if program is None:
        raise GcloudError(
            "gcloud is not on PATH; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then "
            "run gcloud auth login and gcloud config set project PROJECT"
        )
    return [program, *arguments, *([f"--project={project}"] if project else []), "--quiet"]


class Description(NamedTuple):
    """State of a queued resource, `ABSENT` or Cloud TPU's, such as ACTIVE; message of a failed request, and slices."""

    state: str
    error: str = ""
    slices: str = ""
    """Their number and type, such as `2 x v5p-16`; empty if they are not known."""


class JobStatus(NamedTuple):
    """Status of a job on a host."""

    job: str
    host: str
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

    zone: str
    project: str | None
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
        kind, error = spec.get("node", {}).get("acceleratorType"), state.get("failedData", {}).get("error", {})
        slices = f"{count} x {kind}" if count and kind else ""
        return Description(state.get("state", "UNKNOWN"), error.get("message", ""), slices)

    def create_arguments(self) -> list[str]:
        """Arguments of gcloud that request the slices."""
        config, count = self.config, self.config.num_slices
        several = [f"--node-count={count}", f"--node-prefix={self.name}"]
        return [
            *("compute", "tpus", "queued-resources", "create", self.name, f"--zone={self.zone}"),
            f"--accelerator-type={config.kind.type}",
            f"--runtime-version={config.runtime_version or config.kind.generation.runtime_version}",
            *([f"--node-id={self.name}"] if count == 1 else several),
            *_CAPACITY_FLAGS[config.capacity_type],
            *config.create_flags,
        ]

    def create(self) -> None:
        """Request the slices."""
        run_gcloud(*self.create_arguments(), project=self.project, timeout=LONG_TIMEOUT)

    def delete(self) -> bool:
        """Delete the queued resource with its slices; returns whether there was one."""
        try:
            self._tpus("queued-resources", "delete", self.name, "--force", timeout=LONG_TIMEOUT)
        except NotFoundError:
            return False
        return True

    def addresses(self) -> list[str] | None:
        """Internal address of each host; none while a slice is created or repaired, and None if a slice is lost."""
        found = [self._describe("tpu-vm", node) or {"state": ABSENT} for node in self.nodes]
        if any(values.get("state") in _LOST for values in found):
            return None
        addresses = [point.get("ipAddress", "") for values in found for point in values.get("networkEndpoints", ())]
        return addresses if all(addresses) and all(values.get("state") == "READY" for values in found) else []

    def upload(self, folder: Path) -> None:
        """Copy a folder named `upload` to all hosts."""
        # Only the user of the host may read the folder, which contains secrets.
        self._ssh(["bash", "-c", f"umask 077; mkdir -p {self._folder}"])
        scp = ["tpu-vm", "scp", "--recurse", "--worker=all", *self.ssh_flags, str(folder)]
        _on_nodes(self.nodes, lambda node: self._tpus(*scp, f"{node}:{self._folder}/", timeout=LONG_TIMEOUT))

    def setup(self) -> None:
        """Unpack and install the uploaded code on all hosts.

        Raises:
            GcloudError: if it fails on a host; the message contains the end of the output.
        """
        self._ssh(self._script("setup"), timeout=LONG_TIMEOUT)

    def start(self, job: str, *, on_all: bool) -> None:
        """Start a job on the hosts where it does not run: on all of them, or on the first one only."""
        self._ssh(self._script("start", job), on_all=on_all)

    def stop(self, job: str, seconds: float) -> None:
        """Stop a job on all hosts, and kill it after some seconds."""
        self._ssh(self._script("stop", job, f"{seconds:g}"), timeout=seconds + SHORT_TIMEOUT)

    def statuses(self) -> list[JobStatus]:
        """Status of every job on every host that has started it."""
        return [JobStatus(*match.groups()) for match in _STATUS.finditer(self._ssh(self._script("status")))]

    def logs(self, lines: int, *, worker: str = "all", follow: bool = False) -> int:
        """Print the end of the logs of all jobs.

        `worker` is `all`, or the index of a host in each slice. `follow` continues with new lines until this process is
        interrupted. The exit status is that of the command that failed, or 0.
        """
        flags = self._ssh_flags(self._script("logs", str(lines), *(["--follow"] if follow else [])), worker)
        ssh = ("compute", "tpus", "tpu-vm", "ssh", f"--zone={self.zone}")
        ended = _on_nodes(self.nodes, lambda node: stream_gcloud(*ssh, node, *flags, project=self.project))
        return next((status for status in ended if status != 0), 0)

    @property
    def _folder(self) -> str:
        return f"marin_rl_launch/{self.name}"

    def _tpus(self, *arguments: str, timeout: float = SHORT_TIMEOUT) -> str:
        return run_gcloud("compute", "tpus", *arguments, f"--zone={self.zone}", project=self.project, timeout=timeout)

    def _describe(self, kind: str, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self._tpus(kind, "describe", name, "--format=json"))
        except NotFoundError:
            return None

    def _script(self, *arguments: str) -> list[str]:
        """Command that runs the uploaded script, or does nothing on a new host without it."""
        script = f"{self._folder}/upload/host.sh"
        return ["bash", "-c", 'test ! -e "$0" || exec bash "$0" "$@"', script, *arguments]

    def _ssh(self, command: Sequence[str], timeout: float = SHORT_TIMEOUT, *, on_all: bool = True) -> str:
        flags, nodes = self._ssh_flags(command, "all" if on_all else "0"), self.nodes if on_all else self.nodes[:1]
        return "\n".join(_on_nodes(nodes, lambda node: self._tpus("tpu-vm", "ssh", node, *flags, timeout=timeout)))

    def _ssh_flags(self, command: Sequence[str], worker: str) -> list[str]:
        return [f"--worker={worker}", *self.ssh_flags, f"--command={shlex.join(command)}"]


def _on_nodes(nodes: Sequence[str], call: Callable[[str], T]) -> list[T]:
    """Call a function with each slice, at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(call, nodes))
