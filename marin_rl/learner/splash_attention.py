# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Jax's splash attention, the kernel of TPUs, for queries of the last positions of a row, or split over devices."""

from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Array, Float, Int

from marin_rl.learner.attention_kernel import splash_block


def splash_attention(
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segment_ids: Int[Array, "batch position"],
    *,
    scale: float,
    soft_cap: float | None,
    block: int,
    interpret: bool = False,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Causal attention within segments. Blocks of keys after all queries of a block are skipped.

    Args:
        query: queries of the last positions; `group` of them share keys and values.
        keys: keys, after rotary embedding.
        values: values.
        segment_ids: segment of each position.
        scale: multiplies the scores before the cap.
        soft_cap: scores are `c · tanh(score / c)` with this cap `c`; None for no cap.
        block: largest number of positions in a block.
        interpret: whether to interpret the kernel.
    """
    _, queries, kv_heads, group, _ = query.shape
    shape = (queries, keys.shape[1])
    kernel = splash_kernel(shape, kv_heads * group, block=block, soft_cap=soft_cap, interpret=interpret)
    return run_splash(kernel, query, keys, values, segment_ids[:, -queries:], segment_ids, scale=scale)


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
    """Return the kernel for a number of queries, which are those of the last positions, and of keys.

    Args:
        shape: numbers of queries and of keys, multiples of 128.
        heads: number of heads of the queries.
        block: largest number of positions in a block.
        soft_cap: cap of the scores, or None.
        window: last positions that a query attends to, its own included; None for all.
        shards: number of devices over which the queries are split.
        interpret: whether to interpret the kernel.
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


def run_splash(
    kernel: splash_attention_kernel.SplashAttentionKernel,
    query: Float[Array, "batch query kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    query_segments: Int[Array, "batch query"],
    segments: Int[Array, "batch position"],
    *,
    scale: float,
) -> Float[Array, "batch query kv_head group head_size"]:
    """Run the kernel for the queries and keys of one device."""
    _, queries, _, _, size = query.shape

    def attend(query: Array, keys: Array, values: Array, of_queries: Array, of_keys: Array) -> Array:
        by_head = jnp.moveaxis(query.reshape(queries, -1, size), 0, 1)
        ids = splash_attention_kernel.SegmentIds(of_queries, of_keys)
        by_kv_head = (jnp.moveaxis(array, 0, 1) for array in (keys, values))
        return cast(Array, kernel(by_head, *by_kv_head, segment_ids=ids))

    attended = jax.vmap(attend)(query * scale, keys, values, query_segments, segments)
    return jnp.moveaxis(attended, 1, 2).reshape(query.shape)
