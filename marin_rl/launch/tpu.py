# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configs of launches on Cloud TPU, and their jobs: training on slices, alone or with rollout slices under Ray."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from marin_rl.config.imports import IMPORTS
from marin_rl.config.section_types import ConfigError
from marin_rl.config_fields import check_at_least, input_files, local_inputs
from marin_rl.launch.gcloud import Gcloud, check_flags
from marin_rl.launch.hosts import Hosts
from marin_rl.launch.jobs import Group, Job, JobsConfig, Launch
from marin_rl.launch.queued_resource import QueuedResource, SlicesConfig
from marin_rl.launch.supervise import SupervisorConfig
from marin_rl.launch.upload import PYTHON, CodeConfig, UploadError, code_files, environment_script
from marin_rl.slice_names import hosts_of
from marin_rl.user_code import imported_files, is_module_name

if TYPE_CHECKING:
    from marin_rl.config.train_config import TrainConfig
    from marin_rl.config.workers_config import WorkersConfig

NO_ARGUMENTS = "no training arguments; give those of marin_rl.train after --, such as -- --config FILE"
RAY_PORT = 6379
"""Port of Ray on the first host of the trainer."""
_MAX_NODE_NAME = 63
"""Maximum number of characters of the name of a slice in Cloud TPU."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,52}[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Training on one or several TPU slices."""

    tpu_name: str
    """Name of the queued resource and its slices, unique in the zone."""
    zone: str
    """Zone, such as us-east5-a."""
    slices: SlicesConfig
    """Slices of the trainer."""
    rollout_slices: SlicesConfig | None = None
    """Further slices whose hosts join a Ray cluster for rollout workers, with `mode: async`. Each of the `num_slices`
    is a separate request, and may be preempted without the others. Null for none."""
    project: str | None = None
    """Google Cloud project; gcloud's default if null."""
    ssh_flags: tuple[str, ...] = ()
    """Further flags of `gcloud compute tpus tpu-vm ssh` and `scp`, such as `--internal-ip`."""
    worker: str = "all"
    """Index of the host whose logs are shown, in each slice; `all` for all hosts."""
    log_lines: int = 100
    """Lines of each log to show."""
    code: CodeConfig = CodeConfig()
    """Code and environment of the hosts."""
    supervisor: SupervisorConfig = SupervisorConfig()
    """Restarts of a job on its host."""
    jobs: JobsConfig = JobsConfig()
    """Waiting for slices, and reactions to their loss."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.tpu_name):
            raise ValueError(
                f"tpu_name is {self.tpu_name!r}; it must have at most 54 lower-case letters, digits and dashes, and "
                "begin with a letter"
            )
        if self.rollout_slices is not None:
            suffix = _rollouts_suffix(self.rollout_slices.num_slices - 1)
            if len(self.tpu_name) + len(suffix) > _MAX_NODE_NAME:
                raise ValueError(
                    f"tpu_name is {self.tpu_name!r}; it must have at most {_MAX_NODE_NAME - len(suffix)} characters, "
                    f"because the last of the rollout_slices is named TPU_NAME{suffix}; shorten it"
                )
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", self.zone):
            raise ValueError(f"zone is {self.zone!r}; it must be a zone, such as us-east5-a")
        if not re.fullmatch(r"all|[0-9]+", self.worker):
            raise ValueError(f"worker is {self.worker!r}; it must be the index of a host, or all")
        if self.project is not None and not re.fullmatch(r"[a-z0-9][-.:a-z0-9]*", self.project):
            raise ValueError(f"project is {self.project!r}; it must be the id of a project, such as my-project-123")
        check_flags("ssh_flags", self.ssh_flags, {"command", "worker", "recurse", "zone", "project"})
        if self.supervisor.folder is not None:
            raise ValueError("supervisor.folder is set by this command; remove it")
        check_at_least(self, "tpu", log_lines=1)


def training_run(config: TpuConfig, arguments: Sequence[str], report: Callable[[str], None] = print) -> str:
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
    from marin_rl.config.command_line import CONFIG_OPTIONS, RESUME_FLAGS, check_command_line, parse_arguments
    from marin_rl.config.sections import Mode

    if not arguments:
        raise ConfigError(NO_ARGUMENTS)
    # This command sets ray_address, on which other settings depend.
    own = [] if config.rollout_slices is None else ["--ray_address", f"HOST:{RAY_PORT}"]
    if own and any(name == "ray_address" for name, _ in _options(arguments)):
        raise ConfigError("rollout_slices is set, so this command sets ray_address; remove it from the arguments")
    # A missing secret must be found before slices are requested.
    environment_script(config.code)
    names = set(code_files(Path(config.code.folder)))
    # The hosts run the command in a copy of this folder.
    with contextlib.chdir(config.code.folder):
        # The hosts may have other disks.
        checked = check_command_line([*arguments, *own], RESUME_FLAGS, reads_files=False)
        from marin_rl.config.train_config import TrainConfig
        from marin_rl.distributed.ray_cluster import check_ray

        parsed = parse_arguments(TrainConfig, checked, RESUME_FLAGS).config
    files = [(f"--{name}", value) for name, value in _options(arguments) if name in CONFIG_OPTIONS]
    with contextlib.chdir(config.code.folder):
        _check_copied([*files, *_local_files(parsed)], names, config.code.folder)
    for key, text in sorted({*input_files(parsed), *local_inputs(parsed)}):
        if os.path.isabs(text):
            report(f"{key} {text} is not copied to the hosts, and is not checked: every host must mount it")
    if config.rollout_slices is None and parsed.mode is Mode.ASYNC and parsed.ray_address is None:
        raise ConfigError(
            "mode is async, which needs hosts for its workers; use `launch ray` with rollout_slices, or set "
            "ray_address to a cluster of yours"
        )
    # The hosts would check this only after slices have been requested.
    check_ray(parsed)
    if config.rollout_slices is not None:
        if parsed.mode is Mode.SYNC:
            raise ConfigError("rollout_slices needs --mode async")
        _check_workers(parsed.workers, config.rollout_slices)
    if "://" not in parsed.run_dir and not Path(parsed.run_dir).is_absolute():
        raise ConfigError(
            f"run_dir is {parsed.run_dir!r}, on the disk of each host, which is deleted with the slices; set it to a "
            "folder of a bucket, --run_dir gs://BUCKET/RUN, or to the absolute path of a mounted file system"
        )
    return parsed.run_dir


def _local_files(parsed: "TrainConfig") -> list[tuple[str, str]]:
    """Keys and paths, as in the config, of the files that training reads, with those that its Python files import.

    Absolute paths may be on a file system that the hosts mount, and folders that are not on this machine names on the
    hub: only imports and existing relative paths are certainly read from the copied code.
    """
    imports = [(IMPORTS, text) for text in parsed.imports if not is_module_name(text)]
    files = {(key, text) for key, text in input_files(parsed) if not os.path.isabs(text)}
    folders = {(key, text) for key, text in local_inputs(parsed) if not os.path.isabs(text) and os.path.exists(text)}
    found = [*imports, *sorted(files | folders)]
    return found + [
        (key, str(file)) for key, text in found if text.endswith(".py") for file in imported_files(Path(text))
    ]


def _check_copied(files: Sequence[tuple[str, str]], names: Set[str], folder: str) -> None:
    """Check that files and folders are among the copied files, or contain some of them."""
    for key, value in files:
        if not os.path.exists(value):
            raise UploadError(f"{key} {value} does not exist in code.folder {folder!r}; correct its path")
        path = os.path.normpath(value)
        if path not in names and not any(name.startswith(f"{path}/") for name in names):
            raise UploadError(
                f"{key} {value} is not copied to the hosts; give its path relative to code.folder {folder!r}, and "
                "remove it from .gitignore if it is there"
            )


def _check_workers(workers: "WorkersConfig", slices: SlicesConfig) -> None:
    """Check that rollout workers fit on the rollout slices, and use them."""
    from marin_rl.config.workers_config import TPU, parse_worker_slice

    if TPU not in workers.reserved:
        raise ConfigError(
            "workers.resources has no TPU, so workers would run on the CPUs of the rollout slices; set "
            "workers.tpu_slice to the shape of a slice, such as v5p:2x2x1"
        )
    if workers.tpu_slice is None:
        _check_resources(workers.num_workers, workers.reserved[TPU], slices)
        return
    kind = parse_worker_slice(workers.tpu_slice)
    if kind.type != slices.tpu_type:
        raise ConfigError(
            f"workers.tpu_slice is {workers.tpu_slice}, a {kind.type}, but rollout_slices.tpu_type is "
            f"{slices.tpu_type}; correct one of them"
        )
    needed = workers.num_workers // kind.num_hosts
    if needed > slices.num_slices:
        raise ConfigError(
            f"workers.num_workers is {workers.num_workers}, which needs {needed} slices of {kind.num_hosts} hosts, but "
            f"rollout_slices.num_slices is {slices.num_slices}; raise it, or lower workers.num_workers"
        )


def _check_resources(num_workers: int, chips: float, slices: SlicesConfig) -> None:
    """Check that the hosts of the rollout slices have as many chips as the workers reserve."""
    hosts, per_host = hosts_of(slices.tpu_type)
    hosts *= slices.num_slices
    most = hosts * int(per_host // chips)
    if num_workers > most:
        raise ConfigError(
            f"workers.num_workers is {num_workers} and workers.resources.TPU is {chips:g}, but the rollout_slices have "
            f"{hosts} hosts of {per_host} chips, which is room for {most} workers; change one of them"
        )


def open_launch(
    config: TpuConfig, arguments: Sequence[str], report: Callable[[str], None], *, dry_run: bool = False
) -> Launch:
    """Build the launch of a training run.

    Args:
        config: the launch.
        arguments: arguments of `marin_rl.train`.
        report: prints a message.
        dry_run: whether to print commands instead of running them.
    """
    gcloud = Gcloud(config.zone, config.project, report, dry_run)
    trainer = QueuedResource(config.tpu_name, config.slices)
    groups = [Group(trainer, lambda head: _trainer_jobs(config, arguments, head), _hosts(config, gcloud, trainer))]
    command = "tpu"
    if config.rollout_slices is not None:
        command = "ray"
        one = dataclasses.replace(config.rollout_slices, num_slices=1)
        for index in range(config.rollout_slices.num_slices):
            resource = QueuedResource(config.tpu_name + _rollouts_suffix(index), one)
            groups.append(Group(resource, lambda head: [_ray_worker(config, head)], _hosts(config, gcloud, resource)))
    return Launch(gcloud, groups, config.code, config.jobs, config.supervisor.stop_timeout, command)


def _rollouts_suffix(index: int) -> str:
    return f"-rollouts-{index}"


def _hosts(config: TpuConfig, gcloud: Gcloud, resource: QueuedResource) -> Hosts:
    return Hosts(gcloud, resource.name, resource.nodes, config.ssh_flags)


def _trainer_jobs(config: TpuConfig, arguments: Sequence[str], head: str) -> list[Job]:
    train = [
        PYTHON,
        "-u",
        "-m",
        "marin_rl.train",
        *arguments,
        "--trainer.distributed.initialize_jax_distributed",
        "true",
    ]
    if config.rollout_slices is None:
        return [_job(config, "train", train, main=True)]
    # No CPUs and TPUs of this host for Ray: they are the trainer's, and workers must not be placed here.
    resources = ["--num-cpus=0", '--resources={"TPU": 0}']
    ray = [*_RAY, "--head", f"--port={RAY_PORT}", *resources]
    return [
        _job(config, "ray_head", ray, worker="0"),
        _job(config, "train", [*train, "--ray_address", f"{head}:{RAY_PORT}"], main=True),
    ]


def _ray_worker(config: TpuConfig, head: str) -> Job:
    return _job(config, "ray_worker", [*_RAY, f"--address={head}:{RAY_PORT}"])


_RAY = (f"{Path(PYTHON).parent}/ray", "start", "--block", "--disable-usage-stats")


def _job(config: TpuConfig, name: str, command: Sequence[str], *, worker: str = "all", main: bool = False) -> Job:
    limits = config.supervisor
    options = {
        "max_restarts": limits.max_restarts,
        "restart_window": limits.restart_window,
        "restart_delay": limits.restart_delay,
        "stop_timeout": limits.stop_timeout,
        "folder": f"../jobs/{name}",
    }
    own = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    return Job(name, (PYTHON, "-m", "marin_rl.launch", "supervise", *own, "--", *command), worker, main)


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Names and values of the options of a command line."""
    found = []
    for index, argument in enumerate(arguments):
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--"):
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            found.append((name.replace("-", "_"), value if equals else following))
    return found
