# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Files that a launch copies to every host: the code, environment variables, and a script for each job."""

import dataclasses
import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from marin_rl.errors import UserError

HOST_SCRIPT = Path(__file__).parent / "host.sh"
MAX_MEGABYTES = 200.0
"""Maximum size of the uncompressed code."""
INSTALL = """\
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --allow-existing --python 3.11 ../venv
python3 -m uv pip install --quiet --python ../venv/bin/python --editable '.[tpu,ray]'
"""
"""Default installation: a Python of its own, because the one of the runtime versions is too old."""
PYTHON = "../venv/bin/python"
"""Python of the hosts, from the folder of the code."""
HIDDEN = "<hidden>"


class UploadError(UserError):
    """The code or the environment cannot be uploaded. The message names the cause and the remedy."""


@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """Code and environment of the hosts."""

    folder: str = "."
    """Git work tree to copy to the hosts; commands run in the copy. Tracked and untracked files are copied; ignored
    ones and submodules are not."""
    install: str = INSTALL
    """Shell commands that install the copied code into `../venv`; run in the copy on every host before a start, unless
    a job still runs there."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the hosts."""
    secrets: tuple[str, ...] = ()
    """Names of environment variables of this machine to copy to the hosts, such as HF_TOKEN or WANDB_API_KEY. Their
    values are sent in a file that only the user of the host can read; they are in no command line, log or metadata."""

    def __post_init__(self) -> None:
        wrong = [name for name in (*self.env, *self.secrets) if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
        if wrong:
            raise ValueError(f"invalid name of an environment variable: {', '.join(map(repr, wrong))}")
        if unfit := [name for name, value in self.env.items() if not _is_script_text(value)]:
            raise ValueError(f"env.{unfit[0]} has a zero byte or half a character; correct its value")
        if both := sorted(set(self.env) & set(self.secrets)):
            raise ValueError(f"{', '.join(both)} is in both env and secrets; keep one of them")


def code_files(folder: Path) -> list[str]:
    """List the files of a git work tree below a folder that git does not ignore, relative to the folder.

    Raises:
        UploadError: if the folder is not in a git work tree, has no files, or is too large.
    """
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        raise UploadError(
            f"cannot list the files of code.folder {str(folder)!r}: {reason}. It must be a git work tree, because "
            "files that git ignores are not copied to the hosts"
        ) from error
    names = sorted(name for name in set(listed.split("\0")) - {""} if (folder / name).is_file())
    if not names:
        raise UploadError(f"code.folder {str(folder)!r} has no files; set it to the root of your repository")
    sizes = {name: (folder / name).stat().st_size for name in names}
    if sum(sizes.values()) > MAX_MEGABYTES * 1e6:
        largest = ", ".join(sorted(names, key=lambda name: -sizes[name])[:3])
        raise UploadError(
            f"code.folder {str(folder)!r} has {sum(sizes.values()) / 1e6:.0f} MB, more than {MAX_MEGABYTES:g}; list "
            f"large files in .gitignore and put data in a bucket. The largest: {largest}"
        )
    return names


def write_upload(target: Path, config: CodeConfig, names: Sequence[str], jobs: Mapping[str, Sequence[str]]) -> None:
    """Write the files to copy to a host.

    Args:
        target: an empty folder that only this user can read.
        config: code and environment.
        names: files of the code, see `code_files`.
        jobs: command of each job by name.

    Raises:
        UploadError: if a secret is not set.
    """
    with tarfile.open(target / "code.tar.gz", "w:gz", compresslevel=6) as archive:
        for name in names:
            archive.add(Path(config.folder) / name, name, recursive=False)
    _write(target / "environment.sh", environment_script(config), 0o600)
    _write(target / "install.sh", config.install)
    _write(target / "host.sh", HOST_SCRIPT.read_text(encoding="utf-8"))
    for name, command in jobs.items():
        _write(target / f"{name}.sh", job_script(command))


def show_upload(config: CodeConfig, names: Sequence[str], jobs: Mapping[str, Sequence[str]]) -> str:
    """Describe the files of `write_upload`, without the values of secrets."""
    files = {
        "environment.sh (mode 600)": environment_script(config, hide=True),
        "install.sh": config.install,
        "host.sh": HOST_SCRIPT.read_text(encoding="utf-8"),
        **{f"{name}.sh": job_script(command) for name, command in jobs.items()},
    }
    text = io.StringIO()
    text.write(f"# upload/code.tar.gz: {len(names)} files of {config.folder}\n")
    for name, content in files.items():
        text.write(f"# upload/{name}:\n" + "".join(f"    {line}\n" for line in content.splitlines()))
    return text.getvalue().rstrip("\n")


def environment_script(config: CodeConfig, *, hide: bool = False) -> str:
    """Shell assignments of the environment variables.

    Args:
        config: names and values.
        hide: whether to replace the values of secrets.

    Raises:
        UploadError: if a secret is not set in the environment of this process, or is not text.
    """
    if absent := [name for name in config.secrets if name not in os.environ]:
        raise UploadError(
            f"secrets names {', '.join(absent)}, which is not set in the environment of this command; export it, or "
            "remove it from secrets"
        )
    if unfit := [name for name in config.secrets if not _is_script_text(os.environ[name])]:
        raise UploadError(f"the value of the secret {unfit[0]} is not UTF-8 text; export it again")
    values = config.env | {name: HIDDEN if hide else os.environ[name] for name in config.secrets}
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _is_script_text(text: str) -> bool:
    """Whether a script can contain the text."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def job_script(command: Sequence[str]) -> str:
    """Shell script that is replaced by a command."""
    return f"exec {shlex.join(command)}\n"


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
