# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Batched attention over levanter's paged KV cache, for devices without its TPU kernel.

Off TPU levanter uses a reference implementation that processes one query at a time. This implementation processes the
queries of a sequence in blocks, and many blocks at a time.
"""

import math
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Float, Int
from levanter.layers.attention import Attention
from levanter.layers.kv_cache import KvPageCache

if TYPE_CHECKING:
    from levanter.inference.page_table import PageBatchInfo

QUERY_BLOCK = 16
"""Queries of one sequence per block during prefill."""
BLOCKS_ON_CPU = 16
"""Blocks of queries per step on CPU, so that their keys and values stay in the CPU's caches."""
BLOCKS_ELSEWHERE = 256
"""Blocks of queries per step on other devices, enough for good utilization."""
KEY_BLOCK = 128
"""Minimum number of cached tokens per step of the softmax."""

ModelT = TypeVar("ModelT", bound=eqx.Module)


def paged_attention(
    queries: Float[Array, "tokens kv_heads group head_size"],
    kv_pages: Float[Array, "pages page_size two_kv_heads head_size"],
    kv_lengths: Int[Array, " seqs"],
    page_indices: Int[Array, "seqs pages_per_seq"],
    query_starts: Int[Array, " seqs_and_one"],
    num_seqs: Int[Array, ""],
    *,
    scale: float,
    soft_cap: float | None = None,
) -> Float[Array, "tokens kv_heads group head_size"]:
    """Compute causal attention of new tokens over all tokens of their sequences, themselves included.

    `out_i = Σ_j softmax_j(scale·q_i·k_j)·v_j` over the positions `j <= i` of the same sequence, in float32. With a
    `soft_cap`, scores are `soft_cap·tanh(score/soft_cap)`. The softmax is computed online, over blocks of keys
    (Milakov and Gimelshein, arXiv:1805.02867).

    Args:
        queries: queries of the new tokens; those of a sequence are contiguous, and are its last tokens.
        kv_pages: the cache, with the new tokens in it; the heads of keys and values alternate.
        kv_lengths: tokens of each sequence in the cache.
        page_indices: the pages of each sequence, in order.
        query_starts: index of each sequence's first query; the next entry is the end of the sequence.
        num_seqs: number of sequences in the batch; the rest is padding.
        scale: multiplies the scores.
        soft_cap: bound of the scores; None for no bound.

    Returns:
        A vector for each query, in the dtype of `queries`; 0 for padding.
    """
    tokens = queries.shape[0]
    seqs, pages_per_seq = page_indices.shape
    block = 1 if tokens <= seqs else QUERY_BLOCK
    blocks_together = min(
        BLOCKS_ON_CPU if jax.default_backend() == "cpu" else BLOCKS_ELSEWHERE,
        tokens if block == 1 else tokens // block + seqs,
    )
    pages_together = min(-(-KEY_BLOCK // kv_pages.shape[1]), pages_per_seq)

    real = jnp.arange(seqs) < num_seqs
    query_lengths = jnp.where(real, query_starts[1:] - query_starts[:-1], 0)
    last_blocks = jnp.cumsum(-(-query_lengths // block))
    layout = _QueryBlocks(query_starts, query_lengths, kv_lengths, last_blocks, block)

    def attend_together(step: Int[Array, ""], result: Array) -> Array:
        indices = layout.locate(step * blocks_together + jnp.arange(blocks_together), tokens)
        query = queries.at[indices.batch_index].get(mode="fill", fill_value=0).astype(jnp.float32) * scale
        attended = _attend(query, indices, kv_pages, page_indices, pages_together, soft_cap)
        return result.at[indices.batch_index].set(attended.astype(result.dtype), mode="drop")

    rounds = -(-last_blocks[-1] // blocks_together)
    return jax.lax.fori_loop(0, rounds, attend_together, jnp.zeros_like(queries))


class _QueryIndices(NamedTuple):
    """Indices of the queries in some blocks."""

    seq: Int[Array, " blocks"]
    """The sequence of each block."""
    batch_index: Int[Array, "blocks block"]
    """Index of each query in the batch; out of range for padding."""
    position: Int[Array, "blocks block"]
    """Position of each query in its sequence; -1 for padding."""


class _QueryBlocks(NamedTuple):
    """Partition of a batch's queries into blocks of one sequence each, numbered across sequences."""

    starts: Int[Array, " seqs_and_one"]
    """Index of each sequence's first query."""
    lengths: Int[Array, " seqs"]
    """Number of queries of each sequence; 0 for padding."""
    kv_lengths: Int[Array, " seqs"]
    """Tokens of each sequence in the cache."""
    last_blocks: Int[Array, " seqs"]
    """One plus the number of each sequence's last block."""
    block: int
    """Queries per block."""

    def locate(self, numbers: Int[Array, " blocks"], out_of_range: int) -> _QueryIndices:
        """Return the indices of the queries in the numbered blocks; padding gets the batch index `out_of_range`."""
        seq = jnp.minimum(jnp.searchsorted(self.last_blocks, numbers, side="right"), self.lengths.size - 1)
        within = numbers - (self.last_blocks[seq] - -(-self.lengths[seq] // self.block))
        offsets = within[:, None] * self.block + jnp.arange(self.block)
        exists = (numbers < self.last_blocks[-1])[:, None] & (offsets < self.lengths[seq][:, None])
        batch_index = jnp.where(exists, self.starts[seq][:, None] + offsets, out_of_range)
        position = (self.kv_lengths[seq] - self.lengths[seq])[:, None] + offsets
        return _QueryIndices(seq, batch_index, jnp.where(exists, position, -1))


class _OnlineSoftmax(NamedTuple):
    """Partial results of `Σ_j softmax_j(score_j)·v_j`."""

    weighted: Float[Array, "blocks kv_heads group block head_size"]
    """`Σ_j exp(score_j - largest)·v_j`."""
    total: Float[Array, "blocks kv_heads group block"]
    """`Σ_j exp(score_j - largest)`."""
    largest: Float[Array, "blocks kv_heads group block"]
    """The largest score; minus infinity if no key was visible yet."""

    def add(
        self,
        scores: Float[Array, "blocks kv_heads group block keys"],
        visible: Bool[Array, "blocks 1 1 block keys"],
        values: Float[Array, "blocks keys kv_heads head_size"],
    ) -> "_OnlineSoftmax":
        """Add a block of keys; each query attends to the keys that are `visible` to it."""
        largest = jnp.maximum(self.largest, jnp.max(jnp.where(visible, scores, -jnp.inf), axis=-1))
        # Queries without a visible key have no largest score.
        shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
        weights = jnp.where(visible, jnp.exp(scores - shift[..., None]), 0.0)
        keep = jnp.exp(self.largest - shift)
        added = jnp.einsum("bhgqk,bkhd->bhgqd", weights, values, preferred_element_type=jnp.float32)
        return _OnlineSoftmax(
            self.weighted * keep[..., None] + added, self.total * keep + weights.sum(axis=-1), largest
        )

    def result(self) -> Float[Array, "blocks kv_heads group block head_size"]:
        """Return the weighted average; 0 for queries without a visible key."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _attend(
    query: Float[Array, "blocks block kv_heads group head_size"],
    indices: _QueryIndices,
    kv_pages: Float[Array, "pages page_size two_kv_heads head_size"],
    page_indices: Int[Array, "seqs pages_per_seq"],
    pages_together: int,
    soft_cap: float | None,
) -> Float[Array, "blocks block kv_heads group head_size"]:
    """Attend with scaled queries to the cache of their sequences, `pages_together` pages at a time."""
    blocks, block, kv_heads, group, head_size = query.shape
    pages_per_seq, page_size = page_indices.shape[1], kv_pages.shape[1]
    keys_together = pages_together * page_size

    def attend_to_pages(step: Int[Array, ""], softmax: _OnlineSoftmax) -> _OnlineSoftmax:
        first_page = jnp.minimum(step * pages_together, pages_per_seq - pages_together)
        pages = jax.lax.dynamic_slice_in_dim(page_indices[indices.seq], first_page, pages_together, axis=1)
        cached = kv_pages.at[pages].get(mode="clip").reshape(-1, keys_together, kv_heads, 2, head_size)
        keys, values = cached[..., 0, :].astype(jnp.float32), cached[..., 1, :].astype(jnp.float32)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        key_position = first_page * page_size + jnp.arange(keys_together)
        # The last block of keys may overlap the previous one; count each key once.
        fresh = key_position >= step * keys_together
        visible = (fresh & (key_position <= indices.position[..., None]))[:, None, None]
        return softmax.add(scores, visible, values)

    shape = (blocks, kv_heads, group, block)
    empty = _OnlineSoftmax(jnp.zeros((*shape, head_size)), jnp.zeros(shape), jnp.full(shape, -jnp.inf))
    steps = -(-(jnp.max(indices.position) + 1) // keys_together)
    return jnp.moveaxis(jax.lax.fori_loop(0, steps, attend_to_pages, empty).result(), 3, 1)


class BatchedAttention(Attention):
    """Levanter's attention with batched reads and writes of the KV cache."""

    def paged_decode(
        self, x: NamedArray, kv_cache: KvPageCache, batch_info: "PageBatchInfo", *, pos_ids: NamedArray, key=None
    ) -> tuple[NamedArray, KvPageCache]:
        """Write new keys and values to the cache and attend to it; see `Attention.paged_decode`."""
        query, new_key, new_value = self._compute_qkv(x, key=None, pos_ids=pos_ids)
        cache = _write(kv_cache, batch_info, new_key, new_value)
        scale = self.config.scaling_factor
        query = query.rearrange(("position", "kv_head", "q_heads_per_group", "head_size"))
        attended = paged_attention(
            query.array,
            cache.kv_pages.array,
            batch_info.seq_lens.array,
            batch_info.page_indices.array,
            batch_info.cu_q_lens.array,
            batch_info.num_seqs,
            scale=1 / math.sqrt(self.config.HeadSize.size) if scale is None else scale,
            soft_cap=self.config.logits_soft_cap,
        )
        heads = NamedArray(attended, query.axes).flatten_axes(("kv_head", "q_heads_per_group"), "heads")
        return self.o_proj(heads.astype(x.dtype), key=key), cache


def with_batched_attention(model: ModelT) -> ModelT:
    """Return the model with batched attention; arrays are shared.

    Only levanter's plain `Attention` is replaced, not other attention classes.
    """
    return jax.tree.map(
        lambda node: _batched(node) if type(node) is Attention else node,
        model,
        is_leaf=lambda node: type(node) is Attention,
    )


def _batched(attention: Attention) -> BatchedAttention:
    batched = object.__new__(BatchedAttention)
    for name, value in vars(attention).items():
        object.__setattr__(batched, name, value)
    return batched


def _write(cache: KvPageCache, batch_info: "PageBatchInfo", new_key: NamedArray, new_value: NamedArray) -> KvPageCache:
    """Write all new tokens at once; padding at the end of the batch is dropped."""
    pages = cache.kv_pages.array
    num_pages, page_size, heads, head_size = pages.shape
    order = ("position", "kv_head", "head_size")
    new = jnp.stack([new_key.rearrange(order).array, new_value.rearrange(order).array], axis=2)
    destinations = batch_info.new_token_dests.array
    is_new = jnp.arange(destinations.size) < batch_info.num_new_tokens
    destinations = jnp.where(is_new, destinations, num_pages * page_size)
    updated = pages.at[destinations // page_size, destinations % page_size].set(
        new.reshape(-1, heads, head_size).astype(pages.dtype), mode="drop"
    )
    return KvPageCache(NamedArray(updated, cache.kv_pages.axes))
