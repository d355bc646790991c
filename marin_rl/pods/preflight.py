# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of a command and of the files that it reads, before a job is submitted."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from marin_rl.pods.config import LaunchConfig
from marin_rl.utils.errors import UserError, nearest
from marin_rl.utils.settings.fields import input_files, local_inputs
from marin_rl.utils.settings.imports import IMPORTS
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.user_code import imported_files, is_module_name

COMMANDS = sorted({path.stem for path in Path(__file__).parents[1].glob("[a-z]*.py")} - {"types", "launch"})
"""Names of the commands that a job can run: the modules of this package, but the records and this command."""
TRAINING = ("train", "sft", "dpo")
"""Commands that train."""
OWN_FOLDERS = {"tmp", "app"}
"""Folders at the root of the file system that a job has for itself, and that end with it."""
DOES_NOT_FIT = 2
"""Exit status of `marin_rl.plan` if a program does not fit."""


class UploadError(UserError):
    """The hosts would lack a file or a secret. The message names the cause and the remedy."""


def check_command(
    config: LaunchConfig, command: Sequence[str], report: Callable[[str], None], *, is_local: bool
) -> str | None:
    """Check a command, and that the hosts can execute it.

    Args:
        config: the launch.
        command: a command of this package with its arguments.
        report: prints a message about what is not checked.
        is_local: whether the hosts are processes in this folder.

    Returns:
        The run directory; None if the command does not train.

    Raises:
        ConfigError: if the command is unknown, its config is invalid or does not fit the memory of the slices, or its
            run directory is on the disk of a host.
        UploadError: if a file that training reads would not be copied to the hosts, or a secret is not set.
    """
    name, *arguments = command
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}; {nearest(name, COMMANDS)}")
    if absent := [secret for secret in config.secrets if secret not in os.environ]:
        raise UploadError(
            f"secrets names {', '.join(absent)}, which is not set in the environment of this command; export it, or "
            "remove it from secrets"
        )
    if name not in TRAINING:
        return None
    # Imported here because jax and levanter take seconds to import.
    from marin_rl.sessions.command import RESUME_FLAGS, check_command_line

    checked = check_command_line(arguments, RESUME_FLAGS, name, reads_files=is_local)
    parsed = checked.complete().config
    if is_local:
        return str(Path(parsed.run_dir).absolute()) if "://" not in parsed.run_dir else parsed.run_dir
    _check_copied([("--config", str(path)) for path in checked.arguments.config_paths], parsed, report)
    ends_with_job = not os.path.isabs(parsed.run_dir) or OWN_FOLDERS & {*Path(parsed.run_dir).parts[1:2]}
    if ends_with_job and "://" not in parsed.run_dir:
        raise ConfigError(
            f"run_dir is {parsed.run_dir!r}, on the disk of each host, which the end of the job deletes; set it to a "
            "folder of a bucket, --run_dir gs://BUCKET/RUN, or to the absolute path of a mounted file system"
        )
    if config.slice is not None:
        flags = {"--" + flag.replace("_", mark) for flag in RESUME_FLAGS for mark in "_-"}
        _check_memory(config.slice, [argument for argument in arguments if argument not in flags], report)
    return parsed.run_dir


def _check_copied(files: Sequence[tuple[str, str]], parsed: Any, report: Callable[[str], None]) -> None:
    """Check that the hosts get the files, and all that the config names."""
    from iris.cluster.client.bundle import collect_workspace_files

    copied = {path.relative_to(Path.cwd()) for path in collect_workspace_files(Path.cwd())}
    for key, text in [*files, *_inputs(parsed, report)]:
        path = Path(os.path.normpath(text))
        if not any(path in (name, *name.parents) for name in copied):
            raise UploadError(
                f"{key} {path} is not copied to the hosts: Iris copies the files of this folder that git does not "
                "ignore, without docs and tests. Give a path in this folder, relative to it, and remove it from "
                ".gitignore or list it in [tool.iris.bundle] of pyproject.toml"
            )


def _inputs(parsed: Any, report: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """Keys and paths of the files that training reads from the copied code, with those that its Python files import."""
    found = {(IMPORTS, text) for text in parsed.imports if not is_module_name(text)} | set(input_files(parsed))
    # Folders that do not exist are names on the hub.
    found |= {(key, text) for key, text in local_inputs(parsed) if os.path.isabs(text) or os.path.exists(text)}
    for key, text in sorted(found):
        if os.path.isabs(text):
            report(f"{key} {text} is not copied to the hosts, and is not checked: every host must mount it")
            continue
        yield key, text
        if text.endswith(".py") and os.path.isfile(text):
            yield from ((key, str(file)) for file in imported_files(Path(text)))


def _check_memory(slice_name: str, arguments: Sequence[str], report: Callable[[str], None]) -> None:
    """Compile the programs of the run for the slices, in a process of its own, and check that they fit."""
    if importlib.util.find_spec("libtpu") is None:
        report("the memory of the run is not checked, because the compiler for TPUs is not installed (extra tpu)")
        return
    plan = [sys.executable, "-m", "marin_rl.plan", "--topology", slice_name, *arguments]
    planned = subprocess.run(plan, stdout=subprocess.PIPE, text=True, check=False)
    if planned.returncode == DOES_NOT_FIT:
        raise ConfigError(f"the run does not fit {slice_name}:\n{planned.stdout}".rstrip())
    report(planned.stdout.rstrip() if planned.returncode == 0 else "the memory of the run is not checked")
