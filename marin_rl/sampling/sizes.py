# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Devices and sizes of the sampler's programs, from the config and the learner's mesh.

With several training processes, each samples on its own devices with all weights, so that decoding needs no
communication with other hosts. The weights are copied from the learner's mesh once per round of sampling, by all
processes together.
"""

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from haliax.partitioning import ResourceAxis, ResourceMapping, pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.models.lm_model import LmConfig

from marin_rl.models.mixture import mixture_shape
from marin_rl.sampling.attention import AttentionForm, CacheAxes, attention_form
from marin_rl.sampling.cached_model import cache_axes
from marin_rl.sampling.config import SamplingConfig
from marin_rl.utils.devices.trainer_config import TrainerConfig

T = TypeVar("T")

AXES = (ResourceAxis.REPLICA, ResourceAxis.DATA, ResourceAxis.MODEL)
HOST = "host"
DECODE_STEPS = {"cpu": 16, "gpu": 64, "tpu": 64}
"""Most tokens of each sequence in one call of `decode`, by platform. Between two calls an accelerator waits one or two
milliseconds for the host, in which it could sample a token."""


class PrefillShape(NamedTuple):
    """Sizes of one call of `prefill` for each data shard."""

    rows: int
    """Number of chunks."""
    chunk: int
    """Number of tokens of a chunk."""

    @property
    def positions(self) -> int:
        """Tokens for which there is room."""
        return self.rows * self.chunk


class PrefillShapes(NamedTuple):
    """The two sizes of calls of `prefill`, each a separate program."""

    long: PrefillShape
    """For long prompts, with many tokens for each read of the weights and of the cache."""
    short: PrefillShape
    """For shorter prompts, further turns, and the ends of long prompts."""

    def long_tokens(self, count: int) -> int:
        """Return how many of `count` consecutive tokens are processed by long calls; they are the first ones.

        Those are the whole chunks of tokens that fill at least half of a long call. The answer depends on nothing else:
        programs of other shapes may round differently, so a choice by the other waiting tokens would make a generation
        depend on other requests.
        """
        return count - count % self.long.chunk if 2 * count >= self.long.positions else 0


def prefill_shapes(platform: str, slots: int, max_context: int, max_new_tokens: int) -> PrefillShapes:
    """Return the sizes of calls of `prefill`.

    A short call has about as many tokens as an accelerator needs for its matrix products to take longer than reading
    the weights. On a CPU smaller calls waste least.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        slots: number of slots of a data shard.
        max_context: maximum number of tokens of a sequence.
        max_new_tokens: maximum number of new tokens of a request.
    """
    long_tokens, shortest, longest = (256, 8, 32) if platform == "cpu" else (4096, 128, 512)
    short_tokens, short_chunk = (64, 16) if platform == "cpu" else (512, 64)
    prompt_room = max(max_context - max_new_tokens, 1)
    chunk = min(max(1 << (prompt_room - 1).bit_length(), shortest), longest, max_context)
    short_chunk = min(short_chunk, chunk)
    return PrefillShapes(
        PrefillShape(min(long_tokens // chunk, slots), chunk), PrefillShape(short_tokens // short_chunk, short_chunk)
    )


class SamplerSizes(NamedTuple):
    """Devices and sizes of the programs of a sampler."""

    mesh: Mesh | None
    """Devices of this process; None for one device."""
    hosts: int
    """Number of processes, each with its own sampler."""
    shards: int
    """Number of data shards of this process."""
    shard_slots: int
    """Slots of each data shard."""
    head_shards: int
    """Number of devices over which heads of keys and values are sharded."""
    context: int
    """Maximum number of prompt and new tokens of a sequence."""
    form: AttentionForm
    """Attention over the cache."""
    dtype: jnp.dtype
    """Type of the cache."""
    prefill: PrefillShapes
    """Shapes of calls of `prefill` on each data shard."""
    decode_steps: int
    """Most tokens of each sequence in one call of `decode`."""
    experts: bool = False
    """Whether the chosen experts of every token are recorded."""

    @property
    def slots(self) -> int:
        """Slots of all data shards of this process."""
        return self.shards * self.shard_slots

    def cache_axes(self, model: LmConfig) -> tuple[CacheAxes, ...]:
        """Return the axes of the cache of a model."""
        return cache_axes(model, self.form, self.slots, self.context, self.head_shards, experts=self.experts)


def sampler_sizes(
    config: SamplingConfig, max_context: int, trainer: TrainerConfig | None, *, experts: bool = False
) -> SamplerSizes:
    """Return the sizes of a sampler; the arguments are those of `GroupSampler`."""
    mesh = None if trainer is None else host_mesh(trainer.device_mesh)
    hosts = 1 if trainer is None else count_hosts(trainer.device_mesh)
    shards = 1 if mesh is None else mesh.size // mesh.shape[ResourceAxis.MODEL]
    shard_slots = -(-config.max_seqs // (shards * hosts))
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return SamplerSizes(
        mesh,
        hosts,
        shards,
        shard_slots,
        1 if trainer is None or mesh is None else _head_shards(trainer, mesh),
        max_context,
        attention_form(device.platform, device.device_kind),
        jnp.dtype(config.cache_dtype(device.platform)),
        prefill_shapes(device.platform, shard_slots, max_context, config.max_new_tokens),
        DECODE_STEPS[device.platform],
        experts,
    )


def _head_shards(trainer: TrainerConfig, mesh: Mesh) -> int:
    axes = trainer.compute_axis_mapping.get("kv_head", ())
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))


def check_cache_size(model: LmConfig, sizes: SamplerSizes, config: SamplingConfig) -> None:
    """Compare the size of the KV cache on one device with its limit.

    Raises:
        ValueError: if it exceeds `config.max_cache_gib`.
    """
    layers = sizes._replace(experts=False).cache_axes(model)
    elements = sum(math.prod(axis.size for axis in array) for layer in layers for array in layer)
    gib = elements * sizes.dtype.itemsize / (sizes.shards * sizes.head_shards) / 2**30
    if sizes.experts and (mixture := mixture_shape(model)) is not None:
        choices = sizes.slots * sizes.context * mixture.layers * mixture.per_token
        gib += choices * mixture.dtype.itemsize / sizes.shards / 2**30
    if config.max_cache_gib is not None and gib > config.max_cache_gib:
        raise ValueError(
            f"the KV cache of {config.max_seqs} sequences (sampling.max_seqs) of {sizes.context} tokens takes "
            f"{gib:.2f} GiB on each device, more than sampling.max_cache_gib {config.max_cache_gib:g}; lower "
            "sampling.max_seqs or rollouts.max_length, or set sampling.kv_cache_dtype: bfloat16"
        )


def count_hosts(mesh: Mesh) -> int:
    """Return the number of processes that own the devices of a mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def host_mesh(mesh: Mesh) -> Mesh:
    """Return the mesh on which this process samples: `mesh` itself, or its own devices if there are several processes.

    The model axis keeps its size, unless it spans several hosts; then it is as large as this process's devices allow.
    The learner's mesh has the axes `AXES`.

    Raises:
        ValueError: if the processes have different numbers of devices in the mesh.
    """
    if count_hosts(mesh) == 1:
        return mesh
    return Mesh(_by_host(mesh)[_host_index(mesh)], AXES)


def copy_to_each_process(tree: T, mesh: Mesh, mapping: ResourceMapping) -> T:
    """Copy the arrays of a tree to the devices of each process; a collective of all processes of the mesh.

    `mesh` is the learner's; the copies, on `host_mesh(mesh)`, are sharded by `mapping`.
    """
    # Every process has the same part of this mesh, so its part of a copy is a whole array.
    replicas, own = Mesh(_by_host(mesh), (HOST, *AXES)), host_mesh(mesh)

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, NamedArray):
            return NamedArray(copy_array(leaf.array, pspec_for_axis(leaf.axes, mapping)), leaf.axes)
        return copy_array(leaf, PartitionSpec())

    def copy_array(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        copies = jax.device_put(array, NamedSharding(replicas, spec))
        parts = [shard.data for shard in copies.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(own, spec), parts)

    return jax.tree.map(copy, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def _by_host(mesh: Mesh) -> np.ndarray:
    """Return the devices of a mesh, `[host, replica, data, model]`."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        hosts.setdefault(device.process_index, []).append(device)
    counts = {process: len(hosts[process]) for process in sorted(hosts)}
    count = counts[min(counts)]
    if any(other != count for other in counts.values()):
        raise ValueError(
            f"the training processes have different numbers of devices ({counts}); start every process with the same "
            "number of devices"
        )
    model = math.gcd(mesh.shape[ResourceAxis.MODEL], count)
    devices = np.array([hosts[process] for process in counts], object)
    return devices.reshape(len(counts), 1, count // model, model)


def _host_index(mesh: Mesh) -> int:
    return sorted({device.process_index for device in mesh.devices.flat}).index(jax.process_index())
