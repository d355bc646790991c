# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Checks of a launch before slices are requested: training arguments, files to copy, workers and bucket."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marin_rl.pods.config import SlicesConfig, TpuConfig
from marin_rl.pods.gcloud import Gcloud, GcloudError
from marin_rl.pods.tpu import RAY_PORT
from marin_rl.pods.upload import UploadError, code_files, environment_script
from marin_rl.utils.devices.slice_names import parse_slice
from marin_rl.utils.settings.fields import input_files, local_inputs
from marin_rl.utils.settings.imports import IMPORTS
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.user_code import imported_files, is_module_name

if TYPE_CHECKING:
    from marin_rl.config.train_config import TrainConfig
    from marin_rl.config.workers_config import WorkersConfig


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
    from marin_rl.config.command_line import RESUME_FLAGS, check_command_line, parse_arguments, read_arguments
    from marin_rl.config.sections import Mode

    # A missing secret must be found before slices are requested.
    environment_script(config.code)
    copied = {Path(name) for name in code_files(Path(config.code.folder))}
    # The launch sets the address, on which other settings depend.
    own = [] if config.rollout_slices is None else ["--ray_address", f"HOST:{RAY_PORT}"]
    # The hosts run the command in a copy of this folder, and may have other disks.
    with contextlib.chdir(config.code.folder):
        if own and any("ray_address" in layer for layer in read_arguments(arguments, RESUME_FLAGS).layers()):
            raise ConfigError("rollout_slices is set, so the launch sets ray_address; remove it from the training")
        checked = check_command_line([*arguments, *own], RESUME_FLAGS, reads_files=False)
        from marin_rl.config.train_config import TrainConfig
        from marin_rl.distributed.ray_cluster import check_ray

        parsed = parse_arguments(TrainConfig, checked, RESUME_FLAGS).config
        files = [("--config", str(path)) for path in checked.config_paths]
        for key, text in [*files, *_inputs(parsed, report)]:
            _check_copied(key, os.path.normpath(text), copied, config.code.folder)
    # The hosts would check this only after slices have been requested.
    check_ray(parsed)
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


def check_bucket(gcloud: Gcloud, run_dir: str, report: Callable[[str], None]) -> None:
    """Check that the bucket of the run directory exists, and that this account can list it.

    Raises:
        GcloudError: if not.
    """
    if not run_dir.startswith("gs://"):
        report(f"run_dir {run_dir} is not in Cloud Storage, and is not checked before the request")
        return
    bucket = "/".join(run_dir.split("/")[:3])
    try:
        gcloud.run("storage", "ls", bucket)
    except GcloudError as error:
        raise GcloudError(
            f"cannot list the bucket of run_dir {run_dir!r}; create it with `gcloud storage buckets create {bucket}`, "
            f"or choose another run_dir: {error}"
        ) from error


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


def _check_copied(key: str, path: str, copied: set[Path], folder: str) -> None:
    """Check that a file, or some files of a folder, are among the copied ones."""
    if not any(Path(path) in (name, *name.parents) for name in copied):
        raise UploadError(
            f"{key} {path} is not copied to the hosts; give the path of a file in code.folder {folder!r}, relative to "
            "it, and remove it from .gitignore if it is there"
        )


def _check_workers(workers: "WorkersConfig", slices: SlicesConfig) -> None:
    """Check that the rollout slices have the hosts or chips that the rollout workers reserve."""
    from marin_rl.config.workers_config import TPU

    if TPU not in workers.reserved:
        raise ConfigError(
            "workers.resources has no TPU, so workers would run on the CPUs of the rollout slices; set "
            "workers.tpu_slice to the shape of a slice, such as v5p:2x2x1"
        )
    kind, hosts = slices.kind, slices.num_slices * slices.kind.num_hosts
    if workers.tpu_slice is not None and parse_slice(workers.tpu_slice).type != kind.type:
        raise ConfigError(
            f"workers.tpu_slice is {workers.tpu_slice}, a {parse_slice(workers.tpu_slice).type}, but "
            f"rollout_slices.tpu_type is {kind.type}; correct one of them"
        )
    most = hosts * int(kind.chips_per_host // workers.reserved[TPU])
    if workers.num_workers > most:
        raise ConfigError(
            f"workers.num_workers is {workers.num_workers}, with {workers.reserved[TPU]:g} TPU chips each, but the "
            f"{slices.num_slices} rollout_slices have {hosts} hosts of {kind.chips_per_host} chips, which is room for "
            f"{most} workers; lower it, or raise rollout_slices.num_slices"
        )
