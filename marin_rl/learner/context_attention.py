# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention of rows whose positions are split over devices (context parallelism).

Every device has the queries of its positions and gathers the keys and values of all positions. So it holds the
activations of its positions only, and the keys and values of one layer. Later positions attend to more keys: the last
device has the most work, about twice the average.
"""

import functools
from typing import cast

import equinox as eqx
import jax
from haliax import NamedArray
from haliax.partitioning import current_thread_local_mapping, physical_axis_name, physical_axis_size
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from levanter.layers.attention import Attention, AttentionBackend, AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.kernel_sharding import POSITION, on_each_shard, sharding_of
from marin_rl.learner.attention_kernel import SPLASH_BLOCK
from marin_rl.learner.gpu_attention import attend_in_segments, block_attention, replace_attention, segments_of
from marin_rl.learner.splash_attention import run_splash, splash_kernel


def context_shards() -> int:
    """Return the number of devices over which the current axis mapping splits the positions of a row."""
    if current_thread_local_mapping() is None or physical_axis_name(POSITION) is None:
        return 1
    return physical_axis_size(POSITION) or 1


def with_context_attention(model: LmHeadModel, *, interpret: bool = False) -> LmHeadModel:
    """Return a model whose attention takes positions that are split over devices; for models of scanned layers.

    Args:
        model: the model; its weights are not copied.
        interpret: whether to interpret the kernel of TPUs, which works without one, slowly.
    """
    return replace_attention(model, lambda attention: _ContextAttention(attention, interpret))


class _ContextAttention(eqx.Module):
    """Levanter's attention module, with the queries of the device's own positions."""

    attention: Attention
    interpret: bool = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, mask: AttentionMask, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        attend = functools.partial(self._attend, window=mask.sliding_window)
        return attend_in_segments(self.attention, x, segments_of(mask), pos_ids, attend)

    def _attend(
        self, query: NamedArray, keys: Array, values: Array, segments: Array, scale: float, *, window: int | None
    ) -> Array:
        config = self.attention.config
        Batch, Position = query.resolve_axis("batch"), query.resolve_axis(POSITION)
        inputs = (query.array, keys, values, segments, segments)
        own, whole = sharding_of(Batch, Position), sharding_of(Batch, None)
        if config.attn_backend is AttentionBackend.SPLASH:
            block = config.flash_attention_block_size or SPLASH_BLOCK
            positions = query.axis_size(POSITION)
            kernel = splash_kernel(
                (positions, positions),
                query.axis_size("kv_head") * query.axis_size("q_heads_per_group"),
                block=block,
                soft_cap=config.logits_soft_cap,
                window=window,
                shards=context_shards(),
                interpret=self.interpret,
            )
            mesh = jax.sharding.get_abstract_mesh()
            spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, physical_axis_name(POSITION))))
            run = on_each_shard(functools.partial(run_splash, scale=scale), (spec, own, whole, whole, own, whole), own)
            return run(kernel, *inputs)
        run = functools.partial(
            _block_attention,
            axis=cast(str, physical_axis_name(POSITION)),
            scale=scale,
            soft_cap=config.logits_soft_cap,
            window=window,
        )
        return on_each_shard(run, (own, whole, whole, own, whole), own)(*inputs)


def _block_attention(
    query: Float[Array, "batch own kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    query_segments: Int[Array, "batch own"],
    segments: Int[Array, "batch position"],
    *,
    axis: str,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> Float[Array, "batch own kv_head group head_size"]:
    """Attend with XLA, one block of queries at a time, on one device of several."""
    return block_attention(
        query,
        keys,
        values,
        query_segments,
        segments,
        first=jax.lax.axis_index(axis) * query.shape[1],
        scale=scale,
        soft_cap=soft_cap,
        window=window,
    )
