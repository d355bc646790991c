# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of the `gcloud` command, with its errors as one sentence, and the checks before anything is created."""

import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Set

from marin_rl.errors import UserError, nearest
from marin_rl.escaping import escape_line
from marin_rl.slice_names import generation_of

DETAIL = 400
"""Maximum characters of gcloud's message in an error."""


_FLAG = re.compile(r"--([a-z][-a-z0-9]*)(=.*)?", re.DOTALL)


def check_flags(key: str, flags: Iterable[str], own: Set[str]) -> None:
    """Check further flags of a gcloud command.

    Args:
        key: key of the setting, for the error message.
        flags: the flags.
        own: names of the flags that the launch sets itself.

    Raises:
        ValueError: if one is not of the form --NAME or --NAME=VALUE, or is set by the launch.
    """
    for flag in flags:
        match = _FLAG.fullmatch(flag)
        if match is None or match[1] in own or "\0" in flag:
            raise ValueError(
                f"{key} contains {flag!r}; give further flags as --NAME=VALUE, and use the keys of this config for the "
                "others"
            )


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
    report: Callable[[str], None]
    """Prints a message."""
    dry_run: bool = False
    """Print the commands that would run, and return empty output."""

    def run(self, *arguments: str, stdin: str = "", timeout: float = 600.0) -> str:
        """Run a command.

        Args:
            *arguments: arguments of gcloud, without secrets: other users of this machine can read them.
            stdin: text for its standard input.
            timeout: seconds after which it is killed.

        Returns:
            Its standard output.

        Raises:
            NotFoundError: if the resource does not exist.
            UnreachableError: if a host cannot be reached, or the command takes too long.
            GcloudError: if the command fails.
        """
        command = self._command(arguments)
        if self.dry_run:
            self.report(f"$ {shlex.join(command)}")
            return ""
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
        except FileNotFoundError as error:
            raise GcloudError(_NOT_INSTALLED) from error
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(f"`{shlex.join(command)}` did not end within {timeout:g} s") from error
        if done.returncode == 0:
            return done.stdout
        raise _error(command, done.stderr)

    def tpus(self, *arguments: str, timeout: float = 600.0) -> str:
        """Run a command of `gcloud compute tpus` in the zone; see `run`."""
        return self.run("compute", "tpus", *arguments, f"--zone={self.zone}", timeout=timeout)

    def stream_tpus(self, *arguments: str) -> int:
        """Run a command of `gcloud compute tpus` with the output of this process; returns its exit status."""
        command = self._command(("compute", "tpus", *arguments, f"--zone={self.zone}"))
        if self.dry_run:
            self.report(f"$ {shlex.join(command)}")
            return 0
        try:
            return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        except FileNotFoundError as error:
            raise GcloudError(_NOT_INSTALLED) from error

    def _command(self, arguments: Iterable[str]) -> list[str]:
        project = [] if self.project is None else [f"--project={self.project}"]
        return [shutil.which("gcloud") or "gcloud", *arguments, *project, "--quiet"]


_NOT_INSTALLED = (
    "gcloud is not on PATH; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), then run "
    "gcloud auth login and gcloud config set project PROJECT"
)
_CAUSES = (
    (
        r"active account|gcloud auth login|[Rr]eauthentication|UNAUTHENTICATED|credentials",
        "you are not logged in to Google Cloud; run gcloud auth login",
    ),
    (
        r"[Qq]uota|RESOURCE_EXHAUSTED",
        "the project has no quota for this request; request more quota, or choose another zone, tpu_type or "
        "capacity_type",
    ),
    (
        r"has not been used in project|SERVICE_DISABLED",
        "the Cloud TPU API is not enabled; run gcloud services enable tpu.googleapis.com",
    ),
    (
        r"\[project\]|core/project|project ID",
        "no project is set, or it does not exist; set project, or run gcloud config set project PROJECT",
    ),
    (
        r"PERMISSION_DENIED|[Pp]ermission|HTTPError 403|AccessDenied|does not have .* access",
        "your account lacks a permission; ask an owner of the project for the roles TPU Admin, Service Account User "
        "and Storage Object User",
    ),
)
"""Patterns in gcloud's messages, and what they mean."""


_UNREACHABLE = (
    r"return code \[255\]|exit status 255|[Cc]onnection (refused|reset|closed|timed out)|Unable to find the server|"
    r"Network is unreachable|HTTPError 50[0-9]|\bUNAVAILABLE\b"
)


def _error(command: list[str], stderr: str) -> GcloudError:
    name = shlex.join(["gcloud", *command[1:]])
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if "ssh" in command or "scp" in command:
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
    cause = next((text for pattern, text in _CAUSES if re.search(pattern, detail)), None)
    return GcloudError(f"`{name}` failed: {detail}" if cause is None else f"{cause} (`{name}`: {detail})")


def check_login(gcloud: Gcloud) -> None:
    """Check that an account is logged in.

    Raises:
        GcloudError: if gcloud is not installed, or no account is active.
    """
    account = gcloud.run("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
    if not account.strip() and not gcloud.dry_run:
        raise GcloudError("you are not logged in to Google Cloud; run gcloud auth login")


def check_tpu_types(gcloud: Gcloud, tpu_types: Iterable[str]) -> None:
    """Check that the zone exists and has slices of the given types, as gcloud lists them.

    Raises:
        GcloudError: if not; the message names the nearest valid names.
    """
    zones = gcloud.run("compute", "tpus", "locations", "list", "--format=value(locationId)").split()
    if gcloud.zone not in zones and not gcloud.dry_run:
        raise GcloudError(f"zone {gcloud.zone!r} has no TPUs or does not exist; {nearest(gcloud.zone, zones)}")
    valid = gcloud.tpus("tpu-vm", "accelerator-types", "list", "--format=value(type)").split()
    for name in tpu_types:
        if name not in valid and not gcloud.dry_run:
            raise GcloudError(
                f"tpu_type {name!r} does not exist in zone {gcloud.zone}; {nearest(name, valid)} "
                f"({generation_of(name).counted})"
            )


def check_writable(gcloud: Gcloud, folder: str) -> None:
    """Check that a folder of Cloud Storage can be written, with a file that is removed again.

    Args:
        gcloud: runs the commands.
        folder: address such as `gs://bucket/runs/a`.

    Raises:
        GcloudError: if it cannot be written.
    """
    if wrong := sorted(set("*?[]#") & set(folder)):
        raise GcloudError(f"run_dir is {folder!r}; gcloud reads {wrong[0]} as a pattern, so choose a name without it")
    file = f"{folder.rstrip('/')}/.launch_write_check"
    try:
        gcloud.run("storage", "cp", "-", file, stdin="written by marin_rl.launch\n")
        gcloud.run("storage", "rm", file)
    except GcloudError as error:
        raise GcloudError(
            f"cannot write to run_dir {folder!r}; create its bucket with gcloud storage buckets create, or choose "
            f"another run_dir: {error}"
        ) from error
