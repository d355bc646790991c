# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Devices and sizes of the sampler's programs, from the config and the learner's mesh."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax.partitioning import ResourceAxis
from levanter.models.lm_model import LmConfig

from marin_rl.sampling.attention import AttentionForm, CacheAxes, attention_form
from marin_rl.sampling.cached_model import cache_axes
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.host_mesh import count_hosts, host_mesh
from marin_rl.sampling.prefill import PrefillShapes, prefill_shapes
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig


class SamplerSizes(NamedTuple):
    """Devices and sizes of the programs of a sampler."""

    mesh: jax.sharding.Mesh | None
    """Devices of this process; None for one device."""
    hosts: int
    """Number of processes, each with a sampler of its own."""
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

    @property
    def slots(self) -> int:
        """Slots of all data shards of this process."""
        return self.shards * self.shard_slots

    def cache_axes(self, model: LmConfig) -> tuple[CacheAxes, ...]:
        """Return the axes of the cache of each layer of a model."""
        return cache_axes(model, self.form, self.slots, self.context, self.head_shards)


def sampler_sizes(config: SamplingConfig, max_context: int, trainer: AbstractTrainerConfig | None) -> SamplerSizes:
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
    )


def _head_shards(trainer: AbstractTrainerConfig, mesh: jax.sharding.Mesh) -> int:
    axes = trainer.compute_axis_mapping.get("kv_head", ())
    return math.prod(mesh.shape[name] for name in ((axes,) if isinstance(axes, str) else axes))


def check_cache_size(model: LmConfig, sizes: SamplerSizes, config: SamplingConfig) -> None:
    """Compare the size of the KV cache on one device with its limit.

    Raises:
        ValueError: if it exceeds `config.max_cache_gib`.
    """
    elements = sum(math.prod(axis.size for axis in array) for layer in sizes.cache_axes(model) for array in layer)
    gib = elements * sizes.dtype.itemsize / (sizes.shards * sizes.head_shards) / 2**30
    if config.max_cache_gib is not None and gib > config.max_cache_gib:
        raise ValueError(
            f"the KV cache of {config.max_seqs} sequences (sampling.max_seqs) of {sizes.context} tokens takes "
            f"{gib:.2f} GiB on each device, more than sampling.max_cache_gib {config.max_cache_gib:g}; lower "
            "sampling.max_seqs or rollouts.max_length, or set sampling.kv_cache_dtype: bfloat16"
        )
