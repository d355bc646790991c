# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention over cached keys and values, by platform.

Each form has its own layout of the cache. `attention_form` chooses the form from the device that the programs run on,
which need not be present: programs can be compiled for other platforms.

| platform | decode | prefill | cache of one layer |
|---|---|---|---|
| CPU | dense | dense | keys and values `[slots, kv_heads, context, head_size]` |
| GPU | jax's Pallas decode attention (flash decoding) | blocks of the context | the same, in blocks of 128 positions |
| TPU | jax's ragged paged attention | the same | `[slots, pages, page_size, 2 * kv_heads, head_size]` |
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from haliax import Axis
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu.decode_attention import gqa
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from levanter.layers.attention import AttentionConfig

from marin_rl.utils.devices.sharding import on_each_shard, sharding_of

PADDING = 2**30
"""Position of padding tokens, which are not written to the cache."""

LayerCache = tuple[Array, ...]
"""The cache of one layer: one or more arrays, whose first axis is the slot."""
CacheAxes = tuple[tuple[Axis, ...], ...]
"""The axes of each array of a layer's cache."""


class Tokens(NamedTuple):
    """New tokens of some slots: `queries` consecutive positions of each row's slot."""

    ids: Int[Array, "rows queries"]
    slots: Int[Array, " rows"]
    """Slot of each row; out of range for padding."""
    positions: Int[Array, "rows queries"]
    """Position of each token in its sequence; `PADDING` for padding, which follows a row's tokens."""


@dataclasses.dataclass(frozen=True)
class DenseAttention:
    """Batched attention with all scores in memory, in float32."""

    def cache_axes(self, config: AttentionConfig, slots: int, context: int, head_shards: int = 1) -> CacheAxes:
        """Return the axes of each array of a layer's cache; the first is `slot`.

        These are keys (after rotary embedding) and values.

        Args:
            config: number and size of the heads.
            slots: number of sequences.
            context: maximum number of tokens of a sequence.
            head_shards: number of devices over which the heads are sharded; a divisor of their number.
        """
        return ((Axis("slot", slots), config.KVHeads, Axis("context", context), config.HeadSize),) * 2

    def attend(
        self,
        query: Float[Array, "rows queries kv_heads group head_size"],
        key: Float[Array, "rows queries kv_heads head_size"],
        value: Float[Array, "rows queries kv_heads head_size"],
        cache: LayerCache,
        tokens: Tokens,
        config: AttentionConfig,
        *,
        all_slots: bool,
        window: int | None = None,
    ) -> tuple[Float[Array, "rows queries kv_heads group head_size"], LayerCache]:
        """Write new keys and values to a layer's cache, and attend to the positions up to each query's.

        `out_i = Σ_j softmax_j(scale·q_i·k_j)·v_j` over `j <= positions_i`, and `j > positions_i - w` with a window
        `w`. With a soft cap `c`, scores are `c·tanh(score/c)`. The output at padding is arbitrary.

        Args:
            query: queries of the new tokens.
            key: keys of the new tokens.
            value: values of the new tokens.
            cache: the layer's cache.
            tokens: slot and position of each token.
            config: scale, soft cap and heads.
            all_slots: whether row `i` is slot `i` for all slots.
            window: last positions that a query attends to, its own included; None for all.

        Returns:
            The output, and the cache with the new tokens.
        """
        cache = _write(cache, (key, value), tokens)
        keys, values = cache if all_slots else (array.at[tokens.slots].get(mode="clip") for array in cache)
        return _attend_to(query, keys, values, 0, tokens.positions, config, window).output(), cache


class _Softmax(NamedTuple):
    """A softmax-weighted sum over some keys: Milakov and Gimelshein (2018)."""

    largest: Float[Array, "rows kv_heads queries group"]
    total: Float[Array, "rows kv_heads queries group"]
    summed: Float[Array, "rows kv_heads queries group head_size"]

    def output(self) -> Float[Array, "rows queries kv_heads group head_size"]:
        """Return the sum with weights that sum to 1."""
        return jnp.moveaxis(self.summed / self.total[..., None], 2, 1)


def _attend_to(
    query: Float[Array, "rows queries kv_heads group head_size"],
    keys: Float[Array, "rows kv_heads keys head_size"],
    values: Float[Array, "rows kv_heads keys head_size"],
    start: Int[Array, ""] | int,
    positions: Int[Array, "rows queries"],
    config: AttentionConfig,
    window: int | None,
    before: _Softmax | None = None,
) -> _Softmax:
    """Attend to the visible keys of those from position `start` on, and to those that were attended to before."""
    scaled = (query.astype(jnp.float32) * _scale(config)).astype(keys.dtype)
    scores = einsum_in_float32("rqhgd,rhcd->rhqgc", scaled, keys)
    if (cap := config.logits_soft_cap) is not None:
        scores = cap * jnp.tanh(scores / cap)
    at, own = start + jnp.arange(keys.shape[2]), positions[..., None]
    visible = at <= own if window is None else (at <= own) & (at > own - window)
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
    largest = scores.max(axis=-1)
    if before is not None:
        largest = jnp.maximum(before.largest, largest)
    weights = jnp.exp(scores - largest[..., None])
    total = weights.sum(axis=-1)
    summed = einsum_in_float32("rhqgc,rhcd->rhqgd", weights.astype(values.dtype), values)
    if before is None:
        return _Softmax(largest, total, summed)
    decay = jnp.exp(before.largest - largest)
    return _Softmax(largest, decay * before.total + total, decay[..., None] * before.summed + summed)


def _write(cache: LayerCache, new: Sequence[Array], tokens: Tokens) -> LayerCache:
    return tuple(
        cached.at[tokens.slots[:, None], :, tokens.positions].set(
            array.astype(cached.dtype), mode="drop", unique_indices=True
        )
        for cached, array in zip(cache, new, strict=True)
    )


def _scale(config: AttentionConfig) -> float:
    return 1 / math.sqrt(config.HeadSize.size) if config.scaling_factor is None else config.scaling_factor


def einsum_in_float32(equation: str, first: Array, second: Array) -> Array:
    """Return `jnp.einsum` with float32 sums; a CPU has no such product of bfloat16 arrays, and converts them first."""
    return jax.lax.platform_dependent(
        first,
        second,
        cpu=lambda *arrays: jnp.einsum(equation, *(array.astype(jnp.float32) for array in arrays)),
        default=lambda *arrays: jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32),
    )


_GPU_BLOCK = 128
_GPU_SPLITS = 16
"""Most parts of a sequence that the kernel for decode attends to at the same time."""
_GPU_TILE_BYTES = 2**16
"""Most bytes of keys that the kernel loads at a time. Tiles of keys and values must fit the shared memory of a chip."""


@dataclasses.dataclass(frozen=True)
class BlockAttention:
    """Flash decoding over the cached positions of each slot, and prefill in blocks of the context.

    Decode reads only blocks that hold tokens. With a soft cap, which the kernel lacks, or a head size that is no power
    of two, which Triton does not load, decode uses the form of prefill.
    """

    interpret: bool = False
    """Whether to interpret the kernel, which works without a GPU, slowly."""

    def cache_axes(self, config: AttentionConfig, slots: int, context: int, head_shards: int = 1) -> CacheAxes:
        """Keys (after rotary embedding) and values, in whole blocks; see `DenseAttention.cache_axes`."""
        needed = -(-context // _GPU_BLOCK)
        # A prime number of blocks has no equal parts, so the cache has some more.
        blocks = next(count for count in itertools.count(needed) if _gpu_splits(count) >= min(count, _GPU_SPLITS // 2))
        return DenseAttention().cache_axes(config, slots, blocks * _GPU_BLOCK)

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        cache: LayerCache,
        tokens: Tokens,
        config: AttentionConfig,
        *,
        all_slots: bool,
        window: int | None = None,
    ) -> tuple[Array, LayerCache]:
        """See `DenseAttention.attend`."""
        cache = _write(cache, (key, value), tokens)
        head_size = config.HeadSize.size
        has_kernel = config.logits_soft_cap is None and head_size & (head_size - 1) == 0
        if not all_slots or query.shape[1] > 1 or not has_kernel:
            return _attend_in_blocks(query, cache, tokens, config, window), cache
        lengths = jnp.where(tokens.positions[:, 0] == PADDING, 0, tokens.positions[:, 0] + 1)
        decode = functools.partial(_flash_decode, scale=_scale(config), window=window, interpret=self.interpret)
        by_head = sharding_of(None, config.KVHeads)
        sharded = on_each_shard(decode, (by_head, by_head, by_head, PartitionSpec()), by_head)
        return sharded(query[:, 0].astype(cache[0].dtype), *cache, lengths)[:, None], cache


def _gpu_splits(blocks: int) -> int:
    """Return the number of equal parts of a sequence, which is the largest one that divides its blocks."""
    return max(count for count in range(1, _GPU_SPLITS + 1) if blocks % count == 0)


def _flash_decode(
    query: Float[Array, "slots kv_heads group head_size"],
    keys: Float[Array, "slots kv_heads context head_size"],
    values: Float[Array, "slots kv_heads context head_size"],
    lengths: Int[Array, " slots"],
    *,
    scale: float,
    window: int | None,
    interpret: bool,
) -> Float[Array, "slots kv_heads group head_size"]:
    # The kernel's own order of axes; it swaps them back.
    by_position = (jnp.swapaxes(array, 1, 2) for array in (keys, values))
    flat = query.reshape(query.shape[0], -1, query.shape[-1])
    attended = gqa(
        flat,
        *by_position,
        start_idx=None if window is None else jnp.maximum(lengths - window, 0),
        kv_seq_len=lengths,
        sm_scale=scale,
        block_k=min(_GPU_BLOCK, _GPU_TILE_BYTES // (keys.shape[-1] * keys.dtype.itemsize)),
        k_splits=_gpu_splits(keys.shape[2] // _GPU_BLOCK),
        interpret=interpret,
    )
    return attended.reshape(query.shape)


def _attend_in_blocks(
    query: Float[Array, "rows queries kv_heads group head_size"],
    cache: LayerCache,
    tokens: Tokens,
    config: AttentionConfig,
    window: int | None,
) -> Float[Array, "rows queries kv_heads group head_size"]:
    """Attend to the blocks of the context from the first to the last with a visible position; no others are read."""
    positions = tokens.positions

    def add(index: Int[Array, ""], before: _Softmax) -> _Softmax:
        start = index * _GPU_BLOCK
        keys, values = (_block(array, tokens.slots, start) for array in cache)
        return _attend_to(query, keys, values, start, positions, config, window, before)

    shape = jnp.moveaxis(query, 1, 2).shape
    # A finite start, so that a block without visible positions has weights of 0 and not NaN.
    start = _Softmax(jnp.full(shape[:-1], -1e30), jnp.zeros(shape[:-1]), jnp.zeros(shape))
    last = jnp.max(jnp.where(positions == PADDING, -1, positions))
    # Padding has a position after all others.
    first = 0 if window is None else jnp.clip(positions.min() - window + 1, 0, last) // _GPU_BLOCK
    return jax.lax.fori_loop(first, last // _GPU_BLOCK + 1, add, start).output()


def _block(
    array: Float[Array, "slots kv_heads context head_size"], slots: Int[Array, " rows"], start: Int[Array, ""]
) -> Float[Array, "rows kv_heads block head_size"]:
    """Return a block of each row's slot; that of the last slot for padding."""
    _, heads, _, size = array.shape

    def read(slot: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_slice(array, (slot, 0, start, 0), (1, heads, _GPU_BLOCK, size))[0]

    return jax.vmap(read)(slots)


PAGE_SIZE = 128
_LANES = 128

# Pages of keys and queries per block, by `device_kind`, that fit VMEM with 8 heads of 128 on each chip.
_SMALLEST_TPU_BLOCKS = (4, 16)
_TPU_BLOCKS = {
    "TPU v5 lite": (4, 16),
    "TPU v5": (4, 16),
    "TPU v6 lite": (8, 32),
}


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """jax's ragged paged attention for TPUs, with a fixed page table: slot `s` owns pages `s·P` to `(s+1)·P - 1`.

    The cache is allocated at the head size that the kernel reads, a multiple of 128, so that it is never copied, and
    with heads of zeros if the kernel does not support their number.
    """

    pages_per_block: int
    """Pages of keys and values that the kernel processes at a time."""
    queries_per_block: int
    """Queries that the kernel processes at a time."""

    def cache_axes(self, config: AttentionConfig, slots: int, context: int, head_shards: int = 1) -> CacheAxes:
        """Pages of alternating keys and values; see `DenseAttention.cache_axes`."""
        pages = Axis("page", -(-context // PAGE_SIZE))
        heads = config.KVHeads.resize(2 * head_shards * _tiled_heads(config.KVHeads.size // head_shards))
        size = Axis("head_size", -(-config.HeadSize.size // _LANES) * _LANES)
        return ((Axis("slot", slots), pages, Axis("page_position", PAGE_SIZE), heads, size),)

    def attend(
        self,
        query: Array,
        key: Array,
        value: Array,
        cache: LayerCache,
        tokens: Tokens,
        config: AttentionConfig,
        *,
        all_slots: bool,
        window: int | None = None,
    ) -> tuple[Array, LayerCache]:
        """See `DenseAttention.attend`; `all_slots` makes no difference."""
        run = functools.partial(self._run, scale=_scale(config), soft_cap=config.logits_soft_cap, window=window)
        by_head, pages = sharding_of(None, None, config.KVHeads), sharding_of(None, None, None, config.KVHeads)
        inputs = (by_head, by_head, by_head, pages, PartitionSpec(), PartitionSpec())
        sharded = on_each_shard(run, inputs, (by_head, pages))
        attended, new_cache = sharded(query, key, value, *cache, tokens.slots, tokens.positions)
        return attended, (new_cache,)

    def _run(
        self,
        query: Float[Array, "rows queries kv_heads group head_size"],
        key: Float[Array, "rows queries kv_heads head_size"],
        value: Float[Array, "rows queries kv_heads head_size"],
        cache: Float[Array, "slots pages page_size combined_heads padded_head_size"],
        slots: Int[Array, " rows"],
        positions: Int[Array, "rows queries"],
        *,
        scale: float,
        soft_cap: float | None,
        window: int | None,
    ) -> tuple[Array, Array]:
        num_slots, pages = cache.shape[:2]
        rows, queries = positions.shape

        def pad(array: Array) -> Array:
            """Add heads and elements of zeros."""
            shape = (rows, queries, cache.shape[3] // 2, *array.shape[3:-1], cache.shape[-1])
            padding = [(0, size - given) for size, given in zip(shape, array.shape, strict=True)]
            return jnp.pad(array, padding).astype(cache.dtype)

        new = jnp.stack([pad(key), pad(value)], axis=3).reshape(rows, queries, *cache.shape[3:])
        cache = cache.at[slots[:, None], positions // PAGE_SIZE, positions % PAGE_SIZE].set(
            new, mode="drop", unique_indices=True
        )
        # XLA would copy a cache that fits into on-chip memory there and back in every step.
        in_main_memory = pltpu.with_memory_space_constraint(
            cache.reshape(num_slots * pages, *cache.shape[2:]), pltpu.HBM
        )
        padded = pad(query)
        # Queries at padding see the positions after the sequence, and their output is not used.
        first = positions[:, 0]
        attended = ragged_paged_attention(
            padded.reshape(rows * queries, -1, cache.shape[-1]),
            in_main_memory,
            jnp.where(first == PADDING, 0, first) + queries,
            jnp.clip(slots, 0, num_slots - 1)[:, None] * pages + jnp.arange(pages, dtype=jnp.int32),
            jnp.arange(rows + 1, dtype=jnp.int32) * queries,
            jnp.array([rows], jnp.int32),
            sm_scale=scale,
            sliding_window=window,
            soft_cap=soft_cap,
            num_kv_pages_per_block=min(self.pages_per_block, pages),
            num_queries_per_block=self.queries_per_block,
        )
        return attended.reshape(padded.shape)[:, :, : query.shape[2], :, : query.shape[-1]], cache


def _tiled_heads(count: int) -> int:
    """Return the smallest number of heads from `count` on that the kernel supports, in bfloat16 and in float32."""
    return next(heads for heads in itertools.count(count) if heads in (1, 2, 4, 8) or heads % 8 == 0)


AttentionForm = DenseAttention | BlockAttention | PagedAttention
"""A way to store a layer's keys and values, and to attend to them."""


def attention_form(platform: str, device_kind: str) -> AttentionForm:
    """Return the form for a kind of device, which need not be present.

    `platform` is `cpu`, `gpu` or `tpu`; `device_kind` is jax's name of the chip, such as `TPU v5 lite`.
    """
    if platform == "tpu":
        return PagedAttention(*_TPU_BLOCKS.get(device_kind, _SMALLEST_TPU_BLOCKS))
    return BlockAttention() if platform == "gpu" else DenseAttention()
