# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Files that a launch copies to every host: the code, environment variables, and a script for each job."""

import os
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from marin_rl.pods.config import CodeConfig, is_script_text
from marin_rl.utils.errors import UserError

HOST_SCRIPT = Path(__file__).parent / "host.sh"
MAX_MEGABYTES = 200.0
"""Maximum size of the uncompressed code."""
PYTHON = "../venv/bin/python"
"""Python of the hosts, from the folder of the code."""


class UploadError(UserError):
    """The code or the environment cannot be uploaded. The message names the cause and the remedy."""


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
    sizes = {name: (folder / name).stat().st_size for name in listed.split("\0") if (folder / name).is_file()}
    if not sizes:
        raise UploadError(f"code.folder {str(folder)!r} has no files; set it to the root of your repository")
    if sum(sizes.values()) > MAX_MEGABYTES * 1e6:
        largest = ", ".join(sorted(sizes, key=lambda name: -sizes[name])[:3])
        raise UploadError(
            f"code.folder {str(folder)!r} has {sum(sizes.values()) / 1e6:.0f} MB, more than {MAX_MEGABYTES:g}; list "
            f"large files in .gitignore and put data in a bucket. The largest: {largest}"
        )
    return sorted(sizes)


def write_upload(target: Path, config: CodeConfig, names: Sequence[str]) -> None:
    """Write the files to copy to a host, except those of the jobs.

    Args:
        target: an empty folder that only this user can read.
        config: code and environment.
        names: files of the code, see `code_files`.

    Raises:
        UploadError: if a secret is not set.
    """
    with tarfile.open(target / "code.tar.gz", "w:gz", compresslevel=6) as archive:
        for name in names:
            archive.add(Path(config.folder) / name, name, recursive=False)
    (target / "install.sh").write_text(config.install, encoding="utf-8")
    (target / "host.sh").write_bytes(HOST_SCRIPT.read_bytes())
    environment = target / "environment.sh"
    environment.touch(mode=0o600)
    environment.write_text(environment_script(config), encoding="utf-8")


def environment_script(config: CodeConfig) -> str:
    """Shell assignments of the environment variables.

    Raises:
        UploadError: if a secret is not set in the environment of this process, or is not text.
    """
    if absent := [name for name in config.secrets if name not in os.environ]:
        raise UploadError(
            f"secrets names {', '.join(absent)}, which is not set in the environment of this command; export it, or "
            "remove it from secrets"
        )
    if unfit := [name for name in config.secrets if not is_script_text(os.environ[name])]:
        raise UploadError(f"the value of the secret {unfit[0]} is not UTF-8 text; export it again")
    values = config.env | {name: os.environ[name] for name in config.secrets}
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def job_script(command: Sequence[str]) -> str:
    """Shell script that is replaced by a command."""
    return f"exec {shlex.join(command)}\n"
