# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The files that a launch copies to every host, and checks of them and of the training before slices are requested."""

import contextlib
import os
import shlex
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marin_rl.pods.config import CodeConfig, SlicesConfig, TpuConfig
from marin_rl.utils.devices.slice_names import parse_slice
from marin_rl.utils.errors import UserError
from marin_rl.utils.settings.fields import input_files, local_inputs
from marin_rl.utils.settings.imports import IMPORTS
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.user_code import imported_files, is_module_name

if TYPE_CHECKING:
    from marin_rl.config.train_config import TrainConfig
    from marin_rl.config.workers_config import WorkersConfig

HOST_SCRIPT = Path(__file__).parent / "host.sh"
MAX_MEGABYTES = 200.0
"""Maximum size of the uncompressed code."""
RAY_PORT = 6379
"""Port of Ray on the first host of the trainer."""


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
    if (total := sum(sizes.values()) / 1e6) > MAX_MEGABYTES:
        raise UploadError(
            f"code.folder {str(folder)!r} has {total:.0f} MB, more than {MAX_MEGABYTES:g}; list large files in "
            f".gitignore and put data in a bucket. The largest is {max(sizes, key=lambda name: sizes[name])}"
        )
    return sorted(sizes)


def write_upload(target: Path, config: CodeConfig) -> None:
    """Write the files to copy to a host, except those of the jobs.

    The folder is empty, and only this user can read it.

    Raises:
        UploadError: see `code_files` and `environment_script`.
    """
    with tarfile.open(target / "code.tar.gz", "w:gz", compresslevel=6) as archive:
        for name in code_files(Path(config.folder)):
            archive.add(Path(config.folder) / name, name, recursive=False)
    (target / "install.sh").write_text(config.install, encoding="utf-8")
    (target / "host.sh").write_bytes(HOST_SCRIPT.read_bytes())
    environment = target / "environment.sh"
    environment.touch(mode=0o600)
    environment.write_text(environment_script(config), encoding="utf-8")


def environment_script(config: CodeConfig) -> str:
    """Shell assignments of the environment variables.

    Raises:
        UploadError: if a secret is not set in the environment of this process, or a value is not text.
    """
    if absent := [name for name in config.secrets if name not in os.environ]:
        raise UploadError(
            f"secrets names {', '.join(absent)}, which is not set in the environment of this command; export it, or "
            "remove it from secrets"
        )
    values = config.env | {name: os.environ[name] for name in config.secrets}
    for name, value in values.items():
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise UploadError(f"the value of the variable {name} has a zero byte or half a character; correct it")
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def check_training(config: TpuConfig, arguments: Sequence[str], report: Callable[[str], None]) -> str:
    """Check the arguments of `marin_rl.train`, and that the hosts can execute them.

    Args:
        config: the launch.
        arguments: arguments of `marin_rl.train`.
        report: prints a message about what is not checked.

    Returns:
        The run directory.

    Raises:
        MissingPackageError: if the training has rollout workers, and Ray is not installed here.
        ConfigError: if the training config is invalid, or its run directory is on the disk of a host.
        UploadError: if a local file that training reads is not among the uploaded files, or a secret is not set.
    """
    # Imported here because jax and levanter take seconds to import, and the other actions do not need them.
    from marin_rl.config.command_line import read_arguments
    from marin_rl.config.sections import Mode
    from marin_rl.sessions.command import RESUME_FLAGS, check_command_line

    environment_script(config.code)
    copied = {Path(name) for name in code_files(Path(config.code.folder))}
    # The launch sets the address, on which other settings depend.
    own = [] if config.rollout_slices is None else ["--ray_address", f"HOST:{RAY_PORT}"]
    # The hosts run the command in a copy of this folder, and may have other disks.
    with contextlib.chdir(config.code.folder):
        if own and any("ray_address" in layer for layer in read_arguments(arguments, RESUME_FLAGS).layers()):
            raise ConfigError("rollout_slices is set, so the launch sets ray_address; remove it from the training")
        checked = check_command_line([*arguments, *own], RESUME_FLAGS, reads_files=False)
        from marin_rl.config.ray_cluster import check_ray

        parsed = checked.complete().config
        files = [("--config", str(path)) for path in checked.arguments.config_paths]
        for key, text in [*files, *_inputs(parsed, report)]:
            path = Path(os.path.normpath(text))
            if not any(path in (name, *name.parents) for name in copied):
                raise UploadError(
                    f"{key} {path} is not copied to the hosts; give the path of a file in code.folder "
                    f"{config.code.folder!r}, relative to it, and remove it from .gitignore if it is there"
                )
    # The hosts would check this only after slices have been requested.
    check_ray(parsed.mode, parsed.workers.tpu_slice)
    if config.rollout_slices is not None:
        if parsed.mode is Mode.SYNC:
            raise ConfigError("rollout_slices needs --mode async")
        _check_workers(parsed.workers, config.rollout_slices)
    elif parsed.mode is Mode.ASYNC and parsed.ray_address is None:
        raise ConfigError(
            "mode is async, which needs hosts for its workers; set rollout_slices of the launch, such as "
            "{tpu_type: v5p-8}, or ray_address to a cluster of yours"
        )
    if "://" not in parsed.run_dir and not Path(parsed.run_dir).is_absolute():
        raise ConfigError(
            f"run_dir is {parsed.run_dir!r}, on the disk of each host, which is deleted with the slices; set it to a "
            "folder of a bucket, --run_dir gs://BUCKET/RUN, or to the absolute path of a mounted file system"
        )
    return parsed.run_dir


def _inputs(parsed: "TrainConfig", report: Callable[[str], None]) -> list[tuple[str, str]]:
    """Keys and paths of the files that training reads from the copied code, with those that its Python files import."""
    found = {(IMPORTS, text) for text in parsed.imports if not is_module_name(text)} | set(input_files(parsed))
    # Folders that do not exist are names on the hub.
    found |= {(key, text) for key, text in local_inputs(parsed) if os.path.isabs(text) or os.path.exists(text)}
    for key, text in sorted(found):
        if os.path.isabs(text):
            report(f"{key} {text} is not copied to the hosts, and is not checked: every host must mount it")
    relative = sorted((key, text) for key, text in found if not os.path.isabs(text))
    python = [(key, Path(text)) for key, text in relative if text.endswith(".py") and os.path.isfile(text)]
    return relative + [(key, str(file)) for key, path in python for file in imported_files(path)]


def _check_workers(workers: "WorkersConfig", slices: SlicesConfig) -> None:
    """Check that the rollout slices have the hosts or chips that the rollout workers reserve."""
    from marin_rl.config.workers_config import TPU

    chips, kind = workers.reserved.get(TPU, 0), slices.kind
    is_other = workers.tpu_slice is not None and parse_slice(workers.tpu_slice).type != kind.type
    room = 0 if is_other or not chips else slices.num_slices * kind.num_hosts * int(kind.chips_per_host // chips)
    if workers.num_workers > room:
        where = f"{chips:g} TPU chips each" if workers.tpu_slice is None else f"tpu_slice {workers.tpu_slice}"
        raise ConfigError(
            f"workers.num_workers is {workers.num_workers}, with {where}, but the rollout_slices, {slices} with hosts "
            f"of {kind.chips_per_host} chips, have room for {room}; correct workers.tpu_slice, workers.resources or "
            "rollout_slices"
        )
