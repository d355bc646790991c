# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Causal attention within segments, as functions of arrays: one for each kind of device.

The queries are those of the last positions of a row, or of all. `Attend` is the common form; the functions differ in
what they support, and in the scores that are in memory at a time, forward and backward:

| function | computed by | scores in memory | caps | windows |
|---|---|---|---|---|
| `splash_attention` | jax's splash attention (TPU) | a tile | yes | yes, as distances in a row |
| `pallas_attention` | jax's Pallas flash attention (GPU) | a tile | no | no |
| `block_attention` | XLA | those of a block of queries | yes | yes, as distances in a row |
| `dense_attention` | XLA | all | yes | yes, as distances in a sequence |
"""

import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Array, Bool, Float, Int

from marin_rl.batching.attention_kernel import LANES, LARGEST_TILE, splash_block

Attend = Callable[..., Array]
"""Attention of the last positions of each row: a function of queries `[row, query, kv_head, group, head_size]`, of
which `group` share keys and values, keys (after rotary embedding) and values `[row, position, kv_head, head_size]`,
and segment ids `[row, position]`, which returns an array like the queries."""

TILE_BYTES = 2**14
"""Largest size of a tile of queries, keys or values, but for those of `has_wgmma`. Compiled for an H100 and for an L4,
which has 99 KiB of shared memory, the kernel does not spill registers; with larger tiles it spills on at least one of
them. Not tuned on a GPU."""
SMALLEST_TILE = 16
"""Fewest positions in a tile, which tensor cores require."""
QUERY_BLOCK = 256
"""Largest number of queries in a block of `block_attention`."""


def splash_kernel(
    shape: tuple[int, int],
    heads: int,
    *,
    block: int,
    soft_cap: float | None,
    window: int | None = None,
    shards: int = 1,
    interpret: bool = False,
) -> splash_attention_kernel.SplashAttentionKernel:
    """Return jax's kernel for TPUs. Blocks of keys after all queries of a block are skipped.

    Args:
        shape: numbers of queries, which are those of the last positions, and of keys, multiples of 128.
        heads: number of heads of the queries.
        block: largest number of positions in a block.
        soft_cap: scores are `c · tanh(score / c)` with this cap `c`; None for no cap.
        window: last positions that a query attends to, its own included; None for all.
        shards: number of devices over which the queries are split.
        interpret: whether to interpret the kernel, which works without a TPU, slowly.
    """
    queries, keys = shape
    of_queries, of_keys = splash_block(queries // shards, block), splash_block(keys, block)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_kv_compute=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_kv_dkv_compute=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
    )
    mask = splash_attention_mask.CausalMask(shape, offset=keys - queries)
    if window is not None:
        mask = splash_attention_mask.LocalMask(shape, (window - 1, 0), offset=keys - queries)
    return splash_attention_kernel.make_splash_mha(
        mask=splash_attention_mask.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=shards,
        block_sizes=sizes,
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


def splash_attention(
    kernel: splash_attention_kernel.SplashAttentionKernel,
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    query_segments: Int[Array, "batch query"],
    segments: Int[Array, "batch position"],
    *,
    scale: float,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Attend with jax's splash attention. `scale` multiplies the scores before the soft cap of the kernel."""
    _, queries, _, _, size = query.shape

    def attend(query: Array, keys: Array, values: Array, of_queries: Array, of_keys: Array) -> Array:
        by_head = jnp.moveaxis(query.reshape(queries, -1, size), 0, 1)
        ids = splash_attention_kernel.SegmentIds(of_queries, of_keys)
        by_kv_head = (jnp.moveaxis(array, 0, 1) for array in (keys, values))
        return cast(Array, kernel(by_head, *by_kv_head, segment_ids=ids))

    attended = jax.vmap(attend)(query * scale, keys, values, query_segments, segments)
    return jnp.moveaxis(attended, 1, 2).reshape(query.shape)


def pallas_attention(
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segments: Int[Array, "batch position"],
    *,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Attend with jax's Pallas kernel for GPUs (FlashAttention 2).

    `out_i = Σ_j softmax_j(scale · q_i · k_j) · v_j` over `j <= i` with `segment_j = segment_i`. Differentiable once, in
    reverse mode. The kernel compares the segment ids of one tile of queries and keys at a time. The queries are those
    of the last positions. `interpret` interprets the kernel, which works without a GPU, slowly.

    Raises:
        ValueError: if the number of positions is not a multiple of 64.
    """
    batch, positions, kv_heads, size = keys.shape
    if positions % LARGEST_TILE:
        raise ValueError(f"a row has {positions} positions, but attention on GPU takes multiples of {LARGEST_TILE}")
    # The kernel takes as many queries as keys, of which the first are zeros, and as many heads of both. XLA adds up the
    # gradients of the copies.
    others = positions - query.shape[1]
    if others:
        query = jnp.pad(query, ((0, 0), (others, 0), (0, 0), (0, 0), (0, 0)))
    flat = (batch, positions, kv_heads * query.shape[3], size)
    repeated = (jnp.broadcast_to(array[:, :, :, None], query.shape).reshape(flat) for array in (keys, values))
    sizes, warps = tiles(positions, size, query.dtype, wgmma=has_wgmma())
    attended = mha(
        query.reshape(flat),
        *repeated,
        segments,
        sm_scale=scale,
        causal=True,
        block_sizes=sizes,
        num_warps=warps,
        interpret=interpret,
    )
    return attended.reshape(query.shape)[:, others:]


def has_wgmma() -> bool:
    """Whether the device multiplies tiles of at least 64 rows asynchronously, as GPUs of the generation of an H100."""
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def tiles(positions: int, head_size: int, dtype: jnp.dtype, *, wgmma: bool) -> tuple[BlockSizes, int | None]:
    """Return the positions in the tiles of `pallas_attention`, and its warps; None for the kernel's own number.

    With `wgmma`, in 16 bits and for heads of at most 128, tiles have the 64 rows that those products take, or twice as
    many: compiled for an H100, both passes use them and spill no register. Smaller tiles of the backward pass would use
    the products of older GPUs. With heads of 256 such tiles spill.

    >>> tiles(4096, 128, jnp.dtype("bfloat16"), wgmma=True)
    (BlockSizes(block_q=128, block_k=64, block_q_dkv=128, block_kv_dkv=64, block_q_dq=64, block_kv_dq=128), 8)
    >>> tiles(4096, 128, jnp.dtype("bfloat16"), wgmma=False)
    (BlockSizes(block_q=64, block_k=64, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32), None)
    """
    if wgmma and dtype.itemsize == 2 and head_size <= LANES:
        most = math.gcd(positions, 2 * LARGEST_TILE)
        return BlockSizes(most, LARGEST_TILE, most, LARGEST_TILE, LARGEST_TILE, most), 8
    tile = tile_size(head_size, dtype)
    # The backward pass has twice as many tiles at a time.
    half = max(tile // 2, SMALLEST_TILE)
    return BlockSizes(tile, tile, half, half, half, half), None


def tile_size(head_size: int, dtype: jnp.dtype) -> int:
    """Return the number of positions in a tile of the forward pass of `pallas_attention`, without `wgmma`.

    >>> [tile_size(size, jnp.dtype("bfloat16")) for size in (64, 128, 256)]
    [64, 64, 32]
    """
    bytes_per_position = dtype.itemsize << (head_size - 1).bit_length()
    return min(max(TILE_BYTES // bytes_per_position, SMALLEST_TILE), LARGEST_TILE)


def block_attention(
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segments: Int[Array, "batch position"],
    *,
    first: Int[Array, ""] | int | None = None,
    scale: float,
    soft_cap: float | None,
    window: int | None = None,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Attend with XLA, one block of queries at a time, with scores in float32.

    The first query has position `first`; None if the queries are those of the last positions. `scale` multiplies the
    scores, which then become `c · tanh(score / c)` with the cap `soft_cap`, c; None for no cap. `window` is the number
    of last positions that a query attends to, its own included; None for all. No others are read by its block.
    """
    if first is None:
        first = keys.shape[1] - query.shape[1]
    block = math.gcd(query.shape[1], QUERY_BLOCK)
    positions = keys.shape[1] if window is None else min(window + block - 1, keys.shape[1])

    @jax.checkpoint
    def attend(start: Int[Array, ""]) -> Float[Array, "batch block kv_head group head_size"]:
        queries = jax.lax.dynamic_slice_in_dim(query, start, block, 1)
        own = jax.lax.dynamic_slice_in_dim(segments, first + start, block, 1)
        near, at = (keys, values, segments), jnp.arange(positions)
        if window is not None:
            begin = jnp.clip(first + start - window + 1, 0, keys.shape[1] - positions)
            near = tuple(jax.lax.dynamic_slice_in_dim(array, begin, positions, 1) for array in near)
            at = begin + at
        near_keys, near_values, others = near
        own_at = first + start + jnp.arange(block)[:, None]
        causal = own_at >= at if window is None else (own_at >= at) & (own_at - at < window)
        visible = causal & (own[:, :, None] == others[:, None, :])
        return _attend_to(queries, near_keys, near_values, visible, scale=scale, soft_cap=soft_cap)

    blocks = jax.lax.map(attend, jnp.arange(0, query.shape[1], block))
    return jnp.moveaxis(blocks, 0, 1).reshape(query.shape)


def dense_attention(
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segments: Int[Array, "batch position"],
    position_ids: Int[Array, "batch position"] | None = None,
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None = None,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Attend with XLA, with all scores in memory, in float32.

    The queries are those of the last positions. `scale` multiplies the scores, which then become `c · tanh(score / c)`
    with the cap `soft_cap`, c; None for no cap. `window` is the number of last positions of a sequence, as in
    `position_ids`, that a query attends to, its own included; None for all.
    """
    first = keys.shape[1] - query.shape[1]
    causal = first + jnp.arange(query.shape[1])[:, None] >= jnp.arange(keys.shape[1])
    visible = causal & (segments[:, first:, None] == segments[:, None, :])
    if position_ids is not None and window is not None:
        visible &= position_ids[:, first:, None] - position_ids[:, None, :] < window
    return _attend_to(query * scale, keys, values, visible, scale=1.0, soft_cap=soft_cap)


def _attend_to(
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch key kv_head head_size"],
    values: Float[Array, "batch key kv_head head_size"],
    visible: Bool[Array, "batch query key"],
    *,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Attend to the visible keys."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, keys, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(values.dtype), values)
