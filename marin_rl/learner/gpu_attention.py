# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention of training and scoring on GPUs: jax's Pallas flash attention, within segments.

Levanter's own attention for GPUs, Transformer Engine, materializes a `[position, position]` mask and does not read
segment ids. The kernel here compares the segment ids of one tile of queries and keys at a time. Attention logits with a
cap, which it does not support, are computed by XLA for one block of queries at a time.
"""

import enum
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from jaxtyping import Array, Float, Int
from levanter.layers.attention import Attention, AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.kernel_sharding import POSITION, on_each_shard, sharding_of

TILE_BYTES = 2**14
"""Largest size of a tile of queries, keys or values. Compiled for an H100 and for an L4, which has 99 KiB of shared
memory, the kernel does not spill registers; with larger tiles it spills on at least one of them. No GPU has run it."""
LARGEST_TILE, SMALLEST_TILE = 64, 16
"""Numbers of positions. Rows are multiples of the largest; tensor cores require the smallest."""
QUERY_BLOCK = 256
"""Largest number of queries in a block of `block_attention`."""


class GpuBackend(enum.Enum):
    """Values of `model.attn_backend` that levanter does not know, which selects `jax_flash` for them."""

    PALLAS = "pallas"
    """`with_gpu_attention`."""


def with_gpu_attention(model: LmHeadModel, *, interpret: bool = False) -> LmHeadModel:
    """Return a model whose attention runs in the kernel; for models of scanned layers with `Attention` modules.

    Args:
        model: the model; its weights are not copied.
        interpret: whether to interpret the kernel, which works without a GPU, slowly.
    """
    return replace_attention(model, lambda attention: _GpuAttention(attention, interpret))


def replace_attention(model: LmHeadModel, replace: Callable[[Attention], eqx.Module]) -> LmHeadModel:
    """Return a model of scanned layers with the results of a function in place of its `Attention` modules."""
    return eqx.tree_at(lambda node: cast(Any, node).transformer.layers.stacked.self_attn, model, replace_fn=replace)


def attend_in_segments(
    attention: Attention,
    x: NamedArray,
    segment_ids: NamedArray,
    pos_ids: NamedArray | None,
    attend: Callable[[NamedArray, Array, Array, Array, float], Array],
) -> NamedArray:
    """Compute the result of levanter's attention module with another function of queries, keys and values.

    Args:
        attention: the module.
        x: its input.
        segment_ids: segment of each token.
        pos_ids: position of each token in its sequence.
        attend: function of queries `{batch, position, kv_head, q_heads_per_group, head_size}`, keys, values
            `[batch, position, kv_head, head_size]`, segment ids `[batch, position]` and the factor of the scores, which
            returns an array like the queries.
    """
    config = attention.config
    arrays = attention._compute_qkv(x, key=None, pos_ids=pos_ids)
    dtype = jnp.float32 if config.upcast_attn else x.dtype
    query, keys, values = (
        array.rearrange((..., POSITION, "kv_head", ..., "head_size")).astype(dtype) for array in arrays
    )
    segments = segment_ids.rearrange((query.resolve_axis("batch"), query.resolve_axis(POSITION)))
    scale = config.HeadSize.size**-0.5 if config.scaling_factor is None else config.scaling_factor
    attended = attend(query, keys.array, values.array, segments.array, scale)
    heads = NamedArray(attended, query.axes).flatten_axes(("kv_head", "q_heads_per_group"), "heads")
    return attention.o_proj(heads.astype(x.dtype), key=None)


class _GpuAttention(eqx.Module):
    """Levanter's attention module with another kernel."""

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
        config, Batch = self.attention.config, query.resolve_axis("batch")
        cap = config.logits_soft_cap
        if cap is window is None:
            run = functools.partial(segment_attention, scale=scale, interpret=self.interpret)
        else:

            def run(query: Array, keys: Array, values: Array, segments: Array) -> Array:
                return block_attention(
                    query, keys, values, segments, segments, scale=scale, soft_cap=cap, window=window
                )

        by_row, by_row_and_head = sharding_of(Batch), sharding_of(Batch, None, config.KVHeads)
        sharded = on_each_shard(run, (by_row_and_head,) * 3 + (by_row,), by_row_and_head)
        return sharded(query.array, keys, values, segments)


def segments_of(mask: AttentionMask) -> NamedArray:
    """Return the segment ids of a causal mask, which are those of queries and keys."""
    plain = type(mask) is AttentionMask and mask.is_causal and mask.segment_ids is not None
    if not plain or not (mask.causal_offset is mask.explicit_mask is None):
        raise NotImplementedError(
            "attention on GPU, or of positions that are split over devices, takes causal masks with segments, not "
            f"{type(mask).__name__}; set model.attn_backend: JAX_FLASH and no "
            "trainer.tensor_parallel_axes: [position]"
        )
    assert mask.segment_ids is not None
    return mask.segment_ids[0]


def segment_attention(
    query: Float[Array, "batch position kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segment_ids: Int[Array, "batch position"],
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "batch position kv_head group head_size"]:
    """Causal attention within segments, with jax's Pallas kernel (FlashAttention 2).

    `out_i = Σ_j softmax_j(scale · q_i · k_j) · v_j` over `j <= i` with `segment_j = segment_i`. Differentiable once, in
    reverse mode. Scores exist for one tile at a time, forward and backward.

    Args:
        query: queries; `group` of them share keys and values.
        keys: keys, after rotary embedding.
        values: values.
        segment_ids: segment of each position.
        scale: multiplies the scores.
        interpret: whether to interpret the kernel.

    Raises:
        ValueError: if the number of positions is not a multiple of 64.
    """
    batch, positions, kv_heads, group, size = query.shape
    if positions % LARGEST_TILE:
        raise ValueError(f"a row has {positions} positions, but attention on GPU takes multiples of {LARGEST_TILE}")
    # The kernel takes as many keys as queries. XLA adds up the gradients of the copies.
    flat = (batch, positions, kv_heads * group, size)
    repeated = (jnp.broadcast_to(array[:, :, :, None], query.shape).reshape(flat) for array in (keys, values))
    tile = tile_size(size, query.dtype)
    # The backward pass has twice as many tiles at a time.
    half = max(tile // 2, SMALLEST_TILE)
    attended = mha(
        query.reshape(flat),
        *repeated,
        segment_ids,
        sm_scale=scale,
        causal=True,
        block_sizes=BlockSizes(tile, tile, half, half, half, half),
        interpret=interpret,
    )
    return attended.reshape(query.shape)


def block_attention(
    query: Float[Array, "batch own kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    query_segments: Int[Array, "batch own"],
    segments: Int[Array, "batch position"],
    *,
    first: Int[Array, ""] | int = 0,
    scale: float,
    soft_cap: float | None,
    window: int | None = None,
) -> Float[Array, "batch own kv_head group head_size"]:
    """Attend as `segment_attention` does, with XLA, from some positions of a row to all before them.

    Scores exist for one block of queries at a time, forward and backward, in float32.

    Args:
        query: queries of consecutive positions; `group` of them share keys and values.
        keys: keys, after rotary embedding.
        values: values.
        query_segments: segment of each query.
        segments: segment of each position.
        first: position of the first query.
        scale: multiplies the scores before the cap.
        soft_cap: scores are `c · tanh(score / c)` with this cap `c`; None for no cap.
        window: last positions that a query attends to, its own included; None for all. No others are read by its block.
    """
    block = math.gcd(query.shape[1], QUERY_BLOCK)
    positions = keys.shape[1] if window is None else min(window + block - 1, keys.shape[1])

    @jax.checkpoint
    def attend(start: Int[Array, ""]) -> Float[Array, "batch block kv_head group head_size"]:
        queries, own = (jax.lax.dynamic_slice_in_dim(array, start, block, 1) for array in (query, query_segments))
        begin, near = None, (keys, values, segments)
        if window is not None:
            begin = jnp.clip(first + start - window + 1, 0, keys.shape[1] - positions)
            near = tuple(jax.lax.dynamic_slice_in_dim(array, begin, positions, 1) for array in near)
        near_keys, near_values, others = near
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, near_keys, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        own_at, at = first + start + jnp.arange(block)[:, None], jnp.arange(positions)
        at = at if begin is None else begin + at
        causal = own_at >= at if window is None else (own_at >= at) & (own_at - at < window)
        visible = causal & (own[:, :, None] == others[:, None, :])
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(values.dtype), near_values)

    blocks = jax.lax.map(attend, jnp.arange(0, query.shape[1], block))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape)


def tile_size(head_size: int, dtype: jnp.dtype) -> int:
    """Return the number of positions in a tile of the forward pass.

    >>> [tile_size(size, jnp.dtype("bfloat16")) for size in (64, 128, 256)]
    [64, 64, 32]
    """
    bytes_per_position = dtype.itemsize << (head_size - 1).bit_length()
    return min(max(TILE_BYTES // bytes_per_position, SMALLEST_TILE), LARGEST_TILE)
