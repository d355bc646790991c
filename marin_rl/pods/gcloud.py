# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of the `gcloud` command, with its errors as one sentence."""

import dataclasses
import re
import shlex
import shutil
import subprocess

from marin_rl.utils.errors import UserError
from marin_rl.utils.output import escape_line

DETAIL = 600
"""Maximum characters of gcloud's message in an error."""


class GcloudError(UserError):
    """A gcloud command failed. The message names the cause and the remedy."""


class NotFoundError(GcloudError):
    """The resource of a gcloud command does not exist."""


class UnreachableError(GcloudError):
    """A host or Google Cloud cannot be reached; another attempt may succeed."""


@dataclasses.dataclass(frozen=True)
class Gcloud:
    """Runs gcloud commands in one project and zone."""

    zone: str
    """Zone of all TPUs."""
    project: str | None
    """Project; None for gcloud's default."""

    def run(self, *arguments: str, timeout: float = 600.0) -> str:
        """Run a command.

        Args:
            *arguments: arguments of gcloud, without secrets: other users of this machine can read them.
            timeout: seconds after which it is killed.

        Returns:
            Its standard output.

        Raises:
            NotFoundError: if the resource does not exist.
            UnreachableError: if a host cannot be reached, or the command takes too long.
            GcloudError: if the command fails.
        """
        command = self._command(arguments)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"`{shlex.join(command)}` did not end within {timeout:g} s") from error
        if done.returncode == 0:
            return done.stdout
        raise _error(shlex.join(["gcloud", *command[1:]]), done.stderr, of_hosts="ssh" in command or "scp" in command)

    def tpus(self, *arguments: str, timeout: float = 600.0) -> str:
        """Run a command of `gcloud compute tpus` in the zone; see `run`."""
        return self.run("compute", "tpus", *arguments, f"--zone={self.zone}", timeout=timeout)

    def stream_tpus(self, *arguments: str) -> int:
        """Run a command of `gcloud compute tpus` with the output of this process; returns its exit status."""
        command = self._command(("compute", "tpus", *arguments, f"--zone={self.zone}"))
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode

    def _command(self, arguments: tuple[str, ...]) -> list[str]:
        program = shutil.which("gcloud")
        if program is None:
            raise GcloudError(
                "gcloud is not on PATH; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then "
                "run gcloud auth login and gcloud config set project PROJECT"
            )
        project = [] if self.project is None else [f"--project={self.project}"]
        return [program, *arguments, *project, "--quiet"]


_REMEDIES = (
    (
        r"[Qq]uota|RESOURCE_EXHAUSTED",
        "the project has no quota for this request; request more quota, or choose another zone, tpu_type or "
        "capacity_type",
    ),
    (
        r"PERMISSION_DENIED|[Pp]ermission|HTTPError 403|AccessDenied|does not have .* access",
        "your account lacks a permission, or the zone or bucket does not exist; correct the name, or ask an owner of "
        "the project for the roles TPU Admin, Service Account User and Storage Object User",
    ),
)
"""Patterns in messages of gcloud that do not state a remedy, and what they mean."""
_UNREACHABLE = (
    r"return code \[255\]|exit status 255|[Cc]onnection (refused|reset|closed|timed out)|Unable to find the server|"
    r"Network is unreachable|HTTPError 50[0-9]|\bUNAVAILABLE\b"
)


def _error(name: str, stderr: str, *, of_hosts: bool) -> GcloudError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if of_hosts:
        # The message contains the output of programs on the hosts, which may contain any words.
        detail = escape_line(" ".join(lines))[-DETAIL:] or "no message"
        if re.search(_UNREACHABLE, stderr):
            return UnreachableError(f"`{name}` cannot reach a host: {detail}")
        return GcloudError(f"`{name}` failed: {detail}")
    # gcloud's own message begins with ERROR; other lines are warnings and progress.
    start = next((index for index, line in enumerate(lines) if line.startswith("ERROR")), 0)
    detail = escape_line(" ".join(lines[start:]))[:DETAIL] or "no message"
    if re.search(r"NOT_FOUND|was not found|HTTPError 404", detail):
        return NotFoundError(f"`{name}` found no such resource: {detail}")
    if re.search(_UNREACHABLE, detail):
        return UnreachableError(f"`{name}` cannot reach Google Cloud: {detail}")
    remedy = next((f"{text}: " for pattern, text in _REMEDIES if re.search(pattern, detail)), "")
    return GcloudError(f"{remedy}`{name}` failed: {detail}")
