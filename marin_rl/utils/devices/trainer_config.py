# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The section `trainer` of a run: mesh, precision, microbatches, trackers and settings of JAX.

Its keys are those of levanter's trainer section up to its version 1.2. Levanter has renamed them since.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast

import draccus
import jax
import jax.numpy as jnp
import jmp
from annotated_types import Ge
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from marin_rl.utils.devices.sharding import POSITION
from marin_rl.utils.errors import nearest
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.section_types import Deferred
from marin_rl.utils.storage import storage_path, user_cache

REPLICA, DATA, MODEL = "replica", "data", "model"
"""Names of the axes of the mesh. Rows are split over `replica` and `data`, parameters over `data` and `model`."""
BATCH = "batch"
"""Name of the axis of rows."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Several processes that compute together, with `jax.distributed`."""

    coordinator_address: str | None = None
    """`host:port` of process 0; null: found on TPU pods and Slurm."""
    num_processes: int | None = None
    """Number of processes; null: found on TPU pods and Slurm."""
    process_id: int | None = None
    """Number of this process, from 0; null: found on TPU pods and Slurm."""
    initialize_jax_distributed: bool = False
    """Whether several processes compute together."""

    def initialize(self) -> None:
        """Initialize `jax.distributed`, with levanter's detection of Slurm."""
        # Checks of configs do without levanter, which takes seconds to import.
        from levanter.distributed import DistributedConfig as LevanterConfig

        LevanterConfig(**dataclasses.asdict(self)).initialize()


def _trackers() -> Any:
    from levanter.tracker import TrackerConfig

    return TrackerConfig | tuple[TrackerConfig, ...]


if TYPE_CHECKING:
    from levanter.tracker import TrackerConfig

    Trackers = TrackerConfig | tuple[TrackerConfig, ...]
else:
    Trackers = Annotated[Any, Deferred(_trackers)]


def _compilation_cache() -> str:
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(user_cache("jax"))


@dataclasses.dataclass(frozen=True)
class TrainerConfig(ConfigSection):
    """Mesh, precision, microbatches, trackers and settings of JAX."""

    keys_without_effect: ClassVar[Mapping[str, str]] = {
        "seed": "set seed",
        "train_batch_size": "set rollouts.prompts_per_step and rollouts.group_size, whose product is the batch",
        "num_train_steps": "set num_steps",
        "steps_per_eval": "set evaluation.every",
        "max_eval_batches": "set evaluation.tasks",
        "load_checkpoint": "rerun in the same run_dir to resume",
        "load_checkpoint_path": "rerun in the same run_dir to resume",
        "initialize_from": "set initialize_from at the top level",
        "checkpointer": "set checkpoint",
        "quantization": "not supported; leave it out",
        "model_averaging": "not supported; leave it out",
        "batch_axis": "the axis of rows is always named batch",
        "profiler_perfetto_link": "open profile/ in the run directory with TensorBoard or Perfetto",
        "wandb": "set trainer.tracker: {type: wandb}",
        "watch": "not supported; leave it out",
        "crash_on_nan": "a run always ends at an update that is not finite",
        "crash_on_inf": "a run always ends at an update that is not finite",
        "log_dir": "the log is in the run directory",
        "log_jaxprs": "the environment variable XLA_FLAGS=--xla_dump_to=FOLDER writes compiled programs",
        "log_xla_hlo": "the environment variable XLA_FLAGS=--xla_dump_to=FOLDER writes compiled programs",
        "shutdown_at_exit": "python -m marin_rl.launch releases slices at the end of its job",
        "per_device_eval_parallelism": "set sampling.max_seqs",
        "allow_partial_checkpoint": "a checkpoint must be complete",
        "allow_nondivisible_batch_size": "rows that fill up a batch need no setting",
        "ray": "set ray_address at the top level",
        "mesh": "set model_axis_size, tensor_parallel_axes, fsdp_axis and the sizes of the replica axes in trainer",
        "use_explicit_mesh_axes": "not supported; leave it out",
        "xla_dump_upload": "not supported; leave it out",
        "progress_watchdog": "workers.no_progress_timeout limits the time without progress",
    }
    """Keys of levanter's trainer section that a run does not use, each with the setting to use instead."""

    mp: jmp.Policy = dataclasses.field(default_factory=lambda: jmp.get_policy("f32"))
    """Precision of parameters and computation, such as `p=f32,c=bf16`."""
    id: str | None = None
    """Name of the run in trackers; null: the name of the run directory."""
    tracker: Trackers = ()
    """Where metrics are logged besides the run directory, such as `[{type: wandb}]`."""
    profiler: bool = False
    """Whether to write a trace of some steps to profile/ in the run directory."""
    profiler_start_step: Annotated[int, Ge(1)] = 5
    """First traced step."""
    profiler_num_steps: Annotated[int, Ge(1)] = 100
    """Number of traced steps."""
    fsdp_axis: str | list[str] | None = "embed"
    """Axis or axes of the parameters that are split over the data axis of the mesh, and over its model axis, too, if
    that splits positions; null: none."""
    tensor_parallel_axes: list[str] | None = None
    """Axes that are split over the model axis of the mesh, such as `[mlp, heads, kv_head]`, or `[position]`."""
    axis_resources: dict[str, str | list[str]] = dataclasses.field(default_factory=dict)
    """Axes of the mesh, by the axis of parameters and activations that is split over them. `fsdp_axis` and
    `tensor_parallel_axes` are preferred."""
    parameter_axis_resources: dict[str, str | list[str]] = dataclasses.field(default_factory=dict)
    """Like `axis_resources`, for parameters and optimizer state only."""
    replica_ici_axis_size: Annotated[int, Ge(1)] = 1
    """Replicas of the parameters within a slice."""
    model_axis_size: Annotated[int, Ge(1)] = 1
    """Size of the model axis of the mesh."""
    replica_dcn_axis_size: Annotated[int, Ge(1)] = 1
    """Slices that hold whole replicas of the parameters, which are otherwise split over slices."""
    per_device_parallelism: int = -1
    """Rows of a microbatch on each data-parallel device; -1: chosen for the platform and the length of a row."""
    jax_config: dict[str, str | int | float | bool | None] = dataclasses.field(
        default_factory=lambda: {"jax_threefry_partitionable": True, "jax_softmax_custom_jvp": True}
    )
    """Settings of `jax.config`."""
    jax_compilation_cache_dir: str | None = dataclasses.field(default_factory=_compilation_cache)
    """Folder of compiled programs, or a `gs://` or `s3://` address; by default JAX_COMPILATION_CACHE_DIR or a folder in
    the user's cache. Null: programs are compiled at every start."""
    distributed: DistributedConfig = DistributedConfig()
    """Several processes that train together."""
    require_accelerator: bool = False
    """Whether a machine without a TPU or GPU is an error."""

    def __post_init__(self) -> None:
        check_fields(self)
        if problems := list(_trainer_problems(self)):
            raise ValueError("\n".join(problems))

    @property
    def num_slices(self) -> int:
        """Number of slices of the devices."""
        return max(getattr(device, "slice_index", 0) for device in jax.devices()) + 1

    @property
    def num_devices_per_slice(self) -> int:
        """Number of devices of a slice."""
        return jax.device_count() // self.num_slices

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of all devices, with the axes `replica`, `data` and `model`.

        Within a slice, `data` takes the devices that the other two axes leave; over slices, those that
        `replica_dcn_axis_size` leaves.
        """
        replicas, models, slices = self.replica_ici_axis_size, self.model_axis_size, self.num_slices
        within = (replicas, self.num_devices_per_slice // (replicas * models), models)
        between = (self.replica_dcn_axis_size, slices // self.replica_dcn_axis_size, 1)
        return Mesh(arrange_devices(within, between), (REPLICA, DATA, MODEL))

    def use_device_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Set the mesh of compiled programs, while a `with` block runs."""
        import haliax.partitioning

        return haliax.partitioning.set_mesh(self.device_mesh)

    @property
    def data_axis_size(self) -> int:
        """Number of devices over which rows are split."""
        return jax.device_count() // self.model_axis_size

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of a microbatch over all devices, of a config completed by `start_devices`."""
        if self.per_device_parallelism < 1:
            raise ValueError("per_device_parallelism is not set; start_devices sets it")
        return self.per_device_parallelism * self.data_axis_size

    @property
    def compute_axis_mapping(self) -> dict[str, Any]:
        """Axes of the mesh by axis of activations."""
        split: dict[str, Any] = dict.fromkeys(self.tensor_parallel_axes or (), MODEL)
        return {**_as_tuples(self.axis_resources), **split, BATCH: (REPLICA, DATA)}

    @property
    def parameter_axis_mapping(self) -> dict[str, Any]:
        """Axes of the mesh by axis of parameters and optimizer state."""
        fsdp = [self.fsdp_axis] if isinstance(self.fsdp_axis, str) else self.fsdp_axis or []
        # A model axis that splits positions splits no axis of the parameters: each of its devices would hold the same.
        over: Any = (DATA, MODEL) if POSITION in (self.tensor_parallel_axes or ()) else DATA
        return {**self.compute_axis_mapping, **_as_tuples(self.parameter_axis_resources), **dict.fromkeys(fsdp, over)}

    def configure_jax(self) -> None:
        """Apply `jax_config` and the folder of compiled programs."""
        for name, value in self.jax_config.items():
            jax.config.update(name, value)
        if self.jax_compilation_cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", self.jax_compilation_cache_dir)


def _trainer_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Settings that a run ignores or does not support."""
    cache = trainer.jax_compilation_cache_dir
    if cache is not None and "://" in cache:
        path = storage_path(cache, "trainer.jax_compilation_cache_dir")
        if not isinstance(path, RemotePath) or path.protocol not in ("gs", "s3"):
            yield (
                f"trainer.jax_compilation_cache_dir is {cache!r}, but jax supports only gs:// and s3:// addresses "
                "besides paths on a mounted file system"
            )
    if trainer.per_device_parallelism < 1 and trainer.per_device_parallelism != -1:
        yield f"trainer.per_device_parallelism is {trainer.per_device_parallelism}; it must be at least 1, or -1"
    for name in trainer.jax_config.keys() - jax.config.values.keys():
        yield f"trainer.jax_config has {name!r}, which jax does not know; {nearest(name, sorted(jax.config.values))}"
    yield from _axis_problems(trainer)
    precision = trainer.mp
    if jnp.float16 in (precision.param_dtype, precision.compute_dtype, precision.output_dtype):
        yield (
            f"trainer.mp is '{precision}', but gradients of many tokens underflow in float16, because the loss is "
            "not scaled; use bfloat16, such as p=f32,c=bf16"
        )


def _axis_problems(trainer: TrainerConfig) -> Iterator[str]:
    mesh = (REPLICA, DATA, MODEL)
    for key in ("axis_resources", "parameter_axis_resources"):
        for name, given in getattr(trainer, key).items():
            axes = [given] if isinstance(given, str) else given
            if not set(axes) <= set(mesh) or len(set(axes)) < len(axes):
                yield f"trainer.{key}.{name} is {given!r}; it must be one of {', '.join(mesh)}, or a list of them"


TrainerT = TypeVar("TrainerT", bound=TrainerConfig)


def _as_tuples(resources: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(axes) if isinstance(axes, list) else axes for name, axes in resources.items()}


def arrange_devices(within: tuple[int, int, int], between: tuple[int, int, int]) -> Any:
    """Arrange all devices in an array by their place in the network.

    `within` has the sizes of the axes within a slice, and `between` those over slices.
    """
    devices = jax.devices()
    if hasattr(devices[0], "slice_index"):
        return mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)


def _encode_policy(policy: jmp.Policy) -> str:
    kinds = {"compute": policy.compute_dtype, "params": policy.param_dtype, "output": policy.output_dtype}
    return ",".join(f"{name}={jnp.dtype(kind).name}" for name, kind in kinds.items())


# Levanter registers equivalent functions, before or after these.
cast(Any, draccus.decode).register(jmp.Policy, jmp.get_policy)
cast(Any, draccus.encode).register(jmp.Policy, _encode_policy)
