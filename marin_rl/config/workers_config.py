# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sections of the run's config for `mode: async`: rollout workers, and the transfer of weights to them."""

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Annotated, Any

import jax.numpy as jnp
import jmp
from annotated_types import Ge, Gt, Le
from jax.typing import DTypeLike

from marin_rl.utils.devices.slice_names import SliceName, TopologyError, parse_slice
from marin_rl.utils.devices.trainer_config import TrainerT
from marin_rl.utils.retry import RetryConfig
from marin_rl.utils.settings.checks import ConfigSection, check_fields

CPU, GPU, TPU = "CPU", "GPU", "TPU"
"""Ray's names of its predefined resources."""


class Engine(enum.StrEnum):
    """What starts rollout workers, and starts them again after failures."""

    RAY = "ray"
    """Ray: on this machine, or in a cluster at `ray_address`."""
    IRIS = "iris"
    """Iris: jobs of the cluster on which `marin_rl.launch` has started the trainer."""


class Refresh(enum.StrEnum):
    """When a rollout worker loads newer weights."""

    BETWEEN_GROUPS = "between_groups"
    """After all of its running groups have finished. It starts no group once newer weights are available."""
    IN_FLIGHT = "in_flight"
    """As soon as they have arrived, also during answers: later tokens are sampled with the newer weights and the KV
    cache of the older ones (PipelineRL)."""


def parse_worker_slice(text: str) -> SliceName:
    """Parse the topology or type of the slices of workers, such as `v5e:4x4` or `v5e-16`.

    Raises:
        ValueError: if there is no such slice.

    >>> named = parse_worker_slice("v5e-16")
    >>> str(named), named.num_hosts, named.chips_per_host
    ('v5e:4x4', 4, 4)
    """
    try:
        named = parse_slice(text)
    except TopologyError as error:
        raise ValueError(f"workers.tpu_slice is {error}") from error
    if named.slices > 1:
        raise ValueError(
            f"workers.tpu_slice is {text!r}: it is the kind of one slice, and workers.num_workers determines their "
            "number; remove the number"
        )
    return named


@dataclasses.dataclass(frozen=True)
class WorkerMeshConfig(ConfigSection):
    """Mesh of the devices of a worker, whose number may differ from that of the trainer."""

    model_axis_size: Annotated[int, Ge(1)] = 1
    """Devices that share a layer (tensor parallelism); the other devices hold other sequences. It must divide the
    number of devices of a worker."""
    tensor_parallel_axes: tuple[str, ...] | None = None
    """Axes of the model that are split over these devices, such as `[heads, kv_head, mlp]`; null: those of
    `trainer.tensor_parallel_axes`."""


@dataclasses.dataclass(frozen=True)
class WorkersConfig(ConfigSection):
    """Rollout workers. Each is a process with its own sampler."""

    engine: Engine = Engine.RAY
    """What starts the workers: `ray`, or `iris` in a job of `marin_rl.launch`."""
    num_workers: Annotated[int, Ge(1), "or mode: sync"] = 1
    """Number of workers."""
    resources: dict[str, float] = dataclasses.field(default_factory=dict)
    """Resources that Ray reserves for each worker: `CPU` (1 if not set), `GPU`, `TPU` (chips: 1, 2, 4 or 8 of one
    host), and custom resources of the cluster's machines. A worker opens only what it reserves: without `GPU` and `TPU`
    it runs on the CPU. Iris reserves `CPU` or a `tpu_slice`."""
    tpu_slice: str | None = None
    """Topology of a TPU slice, such as v5e:4x4, or its type, such as v5e-16. Slices of the cluster are then reserved as
    a whole, with a worker on each host that has all chips of the host; `num_workers` is a multiple of a slice's hosts.
    Null: the engine chooses the machine of each worker by `resources`."""
    mesh: WorkerMeshConfig | None = None
    """Mesh of the devices of each worker; null: the axes of `trainer`, which must then divide them."""
    precision: jmp.Policy | None = None
    """Precision of the workers' parameters and computation, such as `p=bf16,c=bf16`; null: that of `trainer.mp`.
    Parameters of another type than the trainer's need `weights.dtype: bfloat16`."""
    refresh: Refresh = Refresh.BETWEEN_GROUPS
    """When workers load newer weights: `between_groups`, or `in_flight` for long answers, which would otherwise delay
    the update."""
    decode_steps_per_weight_poll: Annotated[int, Ge(1)] = 32
    """With `in_flight`, tokens sampled per answer between two polls for newer weights; a poll pauses the sampler for a
    few milliseconds."""
    heartbeat_timeout: Annotated[float, Gt(0)] = 30.0
    """Seconds without a heartbeat after which a worker counts as lost and its groups are assigned to other workers."""
    no_progress_timeout: Annotated[float, Gt(0)] = 900.0
    """Seconds without a finished group, or without a coordinator, after which the run fails; must exceed the compile
    time of the workers."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, amount in self.resources.items():
            _check_resource(name, amount)
        self._check_slice()

    def _check_slice(self) -> None:
        if self.tpu_slice is None:
            return
        if chips := sorted({GPU, TPU} & self.resources.keys()):
            raise ValueError(
                f"workers.resources has {chips[0]}, but workers.tpu_slice is {self.tpu_slice}, which gives each worker "
                "all chips of a host; remove one of the two"
            )
        hosts = parse_worker_slice(self.tpu_slice).num_hosts
        if self.num_workers % hosts:
            nearest = -(-self.num_workers // hosts) * hosts
            raise ValueError(
                f"workers.num_workers is {self.num_workers}, but a slice of workers.tpu_slice {self.tpu_slice} has "
                f"{hosts} hosts with a worker each; set a multiple of it, such as {nearest}"
            )

    def run_problems(self, ray_address: str | None, param_dtype: DTypeLike, *, casts: bool) -> Iterator[str]:
        """Problems that prevent a run from providing these workers with hardware and weights.

        `casts` says whether workers may receive weights in another type than the trainer's parameters.

        Yields:
            Messages that name the keys.
        """
        if self.engine is Engine.IRIS:
            yield from self._iris_problems(ray_address)
        elif ray_address is None and (others := sorted(self.reserved.keys() - {CPU, GPU, TPU})):
            yield (
                f"workers.resources has {others[0]!r}, but ray_address is not set, and the cluster that the run starts "
                "on this machine has no such resource; set ray_address to a cluster that offers it"
            )
        elif ray_address is None and self.tpu_slice is not None:
            yield (
                f"workers.tpu_slice is {self.tpu_slice}, but ray_address is not set; set workers.engine: iris in a job "
                "of marin_rl.launch, or ray_address to a cluster of the hosts of such slices"
            )
        own = param_dtype if self.precision is None else self.precision.param_dtype
        if not casts and jnp.dtype(own) != jnp.dtype(param_dtype):
            yield (
                f"workers.precision has parameters in {jnp.dtype(own).name}, but weights are sent in the type of "
                f"trainer.mp, {jnp.dtype(param_dtype).name}; set weights.dtype: bfloat16"
            )

    def _iris_problems(self, ray_address: str | None) -> Iterator[str]:
        if ray_address is not None:
            yield f"ray_address is {ray_address!r}, but workers.engine is iris; remove one of the two"
        if others := sorted(self.resources.keys() - {CPU}):
            yield f"workers.resources has {others[0]!r}, but Iris reserves CPU or workers.tpu_slice; remove it"

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that Ray reserves for each worker, without those of amount 0.

        >>> WorkersConfig(tpu_slice="v6e:2x2", resources={"spot": 1.0}).reserved
        {'CPU': 1.0, 'TPU': 4.0, 'spot': 1.0}
        """
        chips = {} if self.tpu_slice is None else {TPU: float(parse_worker_slice(self.tpu_slice).chips_per_host)}
        return {name: amount for name, amount in ({CPU: 1.0} | chips | self.resources).items() if amount > 0}

    def trainer_config(self, trainer: TrainerT) -> TrainerT:
        """Return the trainer section of a worker, which must find an accelerator if it reserves one."""
        changes: dict[str, Any] = {"require_accelerator": bool({GPU, TPU} & self.reserved.keys())}
        if self.precision is not None:
            changes["mp"] = self.precision
        if self.mesh is not None:
            axes = self.mesh.tensor_parallel_axes
            changes |= {
                "model_axis_size": self.mesh.model_axis_size,
                "replica_ici_axis_size": 1,
                "replica_dcn_axis_size": 1,
                "tensor_parallel_axes": trainer.tensor_parallel_axes if axes is None else list(axes),
            }
        return dataclasses.replace(trainer, **changes)


def _check_resource(name: str, amount: float) -> None:
    if name in ("memory", "object_store_memory") or not name:
        raise ValueError(f"workers.resources has {name!r}, which cannot be reserved here; use CPU, GPU, TPU or a name")
    if name.upper() in (CPU, GPU, TPU) and name not in (CPU, GPU, TPU):
        raise ValueError(f"workers.resources has {name!r}, which Ray calls {name.upper()!r}; correct the name")
    if not (amount >= 0 and math.isfinite(amount)) or (amount > 1 and amount != int(amount)):
        raise ValueError(f"workers.resources.{name} is {amount}; it must be at least 0, and whole if above 1")
    if name == TPU and amount not in (0, 1, 2, 4, 8):
        raise ValueError(f"workers.resources.TPU is {amount:g}; a worker uses 1, 2, 4 or 8 chips of one host")


class TransferDtype(enum.StrEnum):
    """Dtype of floating-point weights during the transfer."""

    PARAMETER = "parameter"
    """The learner's parameter dtype. A receiver with another dtype is rejected."""
    BFLOAT16 = "bfloat16"
    """Round to bfloat16 on the devices, which halves the bytes of float32. The receiver casts to its floating-point
    dtype."""


@dataclasses.dataclass(frozen=True)
class WeightTransferConfig(ConfigSection):
    """Weight transfer: each training host serves its own shards over Arrow Flight; workers fetch what they need.

    Transfers are encrypted with TLS. Server and workers authenticate with certificates derived from the run's secret.
    """

    host: str = "127.0.0.1"
    """Name or address that the server binds. The default accepts connections from this machine only. `0.0.0.0` binds
    every interface and announces the machine's host name. Workers or training hosts on other machines need a reachable
    address; the default is rejected for them."""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port that the server binds; 0 selects a free port."""
    streams: Annotated[int, Ge(1), Le(64)] = 4
    """Concurrent streams from each server to a worker."""
    dtype: TransferDtype = TransferDtype.PARAMETER
    """Dtype of floating-point weights during the transfer: `parameter` (the learner's) or `bfloat16`."""
    retry: RetryConfig = RetryConfig()
    """Retries of a worker when weights do not arrive."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.host:
            raise ValueError("weights.host is empty; set the address to bind, such as 127.0.0.1")

    @property
    def sent_dtype(self) -> str | None:
        """Dtype that floating-point arrays are cast to; None for no cast."""
        return None if self.dtype is TransferDtype.PARAMETER else self.dtype.value
