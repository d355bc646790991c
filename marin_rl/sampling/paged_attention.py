# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention over levanter's paged KV cache, in batches, for machines without its TPU kernel.

Off TPU levanter falls back on a reference that takes one query after another. Here the queries of a sequence are
taken in blocks, and many blocks together.
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
"""Queries of one sequence that are taken together where many are read at once."""
BLOCKS_ON_CPU = 16
"""Blocks of queries that a CPU takes together: what they read stays in its caches."""
BLOCKS_ELSEWHERE = 256
"""Blocks of queries that another device takes together: enough to keep it busy."""
KEY_BLOCK = 128
"""Least number of cached tokens that are looked at together."""

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
    """Causal attention of new tokens over all tokens of their sequences, themselves included.

    `out_i = Σ_j softmax_j(scale·q_i·k_j)·v_j` over the positions `j <= i` of the same sequence, in float32, with
    `soft_cap·tanh(·/soft_cap)` around the scores where there is a cap. The softmax is taken a block of keys at a time
    (Milakov and Gimelshein, arXiv:1805.02867).

    Args:
        queries: of the new tokens; those of a sequence follow one another, and are its last ones.
        kv_pages: the cache, with the new tokens in it; the heads of keys and values alternate.
        kv_lengths: tokens of each sequence in the cache.
        page_indices: the pages of each sequence, in order.
        query_starts: where the queries of each sequence begin; the next one's begin is their end.
        num_seqs: how many of the sequences are real.
        scale: of the scores.
        soft_cap: bound of the scores.

    Returns:
        A vector for each query, in the dtype of `queries`; 0 for those of no real sequence.
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
    layout = _QueryLayout(query_starts, query_lengths, kv_lengths, last_blocks, block)

    def attend_together(number: Int[Array, ""], result: Array) -> Array:
        asking = layout.locate(number * blocks_together + jnp.arange(blocks_together), tokens)
        query = queries.at[asking.place].get(mode="fill", fill_value=0).astype(jnp.float32) * scale
        attended = _attend(query, asking, kv_pages, page_indices, pages_together, soft_cap)
        return result.at[asking.place].set(attended.astype(result.dtype), mode="drop")

    rounds = -(-last_blocks[-1] // blocks_together)
    return jax.lax.fori_loop(0, rounds, attend_together, jnp.zeros_like(queries))


class _Asking(NamedTuple):
    """The queries of some blocks."""

    seq: Int[Array, " blocks"]
    """The sequence of each block."""
    place: Int[Array, "blocks block"]
    """Where each query stands among those of the batch; beyond the end for none."""
    position: Int[Array, "blocks block"]
    """Where it stands in its sequence; -1 for none."""


class _QueryLayout(NamedTuple):
    """How the queries of a batch are cut into blocks, each of one sequence; numbered through all sequences."""

    starts: Int[Array, " seqs_and_one"]
    """Where the queries of each sequence begin."""
    lengths: Int[Array, " seqs"]
    """Queries of each sequence; 0 where it is not real."""
    kv_lengths: Int[Array, " seqs"]
    """Tokens of each sequence in the cache."""
    last_blocks: Int[Array, " seqs"]
    """Number of the block behind the last one of each sequence."""
    block: int
    """Queries of a block."""

    def locate(self, numbers: Int[Array, " blocks"], nowhere: int) -> _Asking:
        """The queries of blocks, by the blocks' numbers; `nowhere` is the place of those that do not exist."""
        seq = jnp.minimum(jnp.searchsorted(self.last_blocks, numbers, side="right"), self.lengths.size - 1)
        within = numbers - (self.last_blocks[seq] - -(-self.lengths[seq] // self.block))
        offsets = within[:, None] * self.block + jnp.arange(self.block)
        exists = (numbers < self.last_blocks[-1])[:, None] & (offsets < self.lengths[seq][:, None])
        place = jnp.where(exists, self.starts[seq][:, None] + offsets, nowhere)
        position = (self.kv_lengths[seq] - self.lengths[seq])[:, None] + offsets
        return _Asking(seq, place, jnp.where(exists, position, -1))


class _SoftmaxInParts(NamedTuple):
    """`Σ_j softmax_j(score_j)·v_j` over the keys so far."""

    weighted: Float[Array, "blocks kv_heads group block head_size"]
    """`Σ_j exp(score_j - largest)·v_j`."""
    total: Float[Array, "blocks kv_heads group block"]
    """`Σ_j exp(score_j - largest)`."""
    largest: Float[Array, "blocks kv_heads group block"]
    """The largest score; minus infinity where nothing was seen."""

    def add(
        self,
        scores: Float[Array, "blocks kv_heads group block keys"],
        seen: Bool[Array, "blocks 1 1 block keys"],
        values: Float[Array, "blocks keys kv_heads head_size"],
    ) -> "_SoftmaxInParts":
        """With more keys, of which each query takes those that it has `seen`."""
        largest = jnp.maximum(self.largest, jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1))
        # Queries that have seen nothing yet have no largest score.
        shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
        weights = jnp.where(seen, jnp.exp(scores - shift[..., None]), 0.0)
        keep = jnp.exp(self.largest - shift)
        added = jnp.einsum("bhgqk,bkhd->bhgqd", weights, values, preferred_element_type=jnp.float32)
        return _SoftmaxInParts(
            self.weighted * keep[..., None] + added, self.total * keep + weights.sum(axis=-1), largest
        )

    def result(self) -> Float[Array, "blocks kv_heads group block head_size"]:
        """The sum; 0 for queries that have seen nothing."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _attend(
    query: Float[Array, "blocks block kv_heads group head_size"],
    asking: _Asking,
    kv_pages: Float[Array, "pages page_size two_kv_heads head_size"],
    page_indices: Int[Array, "seqs pages_per_seq"],
    pages_together: int,
    soft_cap: float | None,
) -> Float[Array, "blocks block kv_heads group head_size"]:
    """What scaled queries attend to, `pages_together` pages of their sequence after one another."""
    blocks, block, kv_heads, group, head_size = query.shape
    pages_per_seq, page_size = page_indices.shape[1], kv_pages.shape[1]
    keys_together = pages_together * page_size

    def look(step: Int[Array, ""], so_far: _SoftmaxInParts) -> _SoftmaxInParts:
        first_page = jnp.minimum(step * pages_together, pages_per_seq - pages_together)
        pages = jax.lax.dynamic_slice_in_dim(page_indices[asking.seq], first_page, pages_together, axis=1)
        cached = kv_pages.at[pages].get(mode="clip").reshape(-1, keys_together, kv_heads, 2, head_size)
        keys, values = cached[..., 0, :].astype(jnp.float32), cached[..., 1, :].astype(jnp.float32)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        key_position = first_page * page_size + jnp.arange(keys_together)
        # The last block of keys may begin before the one before it ended.
        fresh = key_position >= step * keys_together
        seen = (fresh & (key_position <= asking.position[..., None]))[:, None, None]
        return so_far.add(scores, seen, values)

    shape = (blocks, kv_heads, group, block)
    nothing = _SoftmaxInParts(jnp.zeros((*shape, head_size)), jnp.zeros(shape), jnp.full(shape, -jnp.inf))
    steps = -(-(jnp.max(asking.position) + 1) // keys_together)
    return jnp.moveaxis(jax.lax.fori_loop(0, steps, look, nothing).result(), 3, 1)


class BatchedAttention(Attention):
    """Levanter's attention, with this file's form of reading and writing the cache."""

    def paged_decode(
        self, x: NamedArray, kv_cache: KvPageCache, batch_info: "PageBatchInfo", *, pos_ids: NamedArray, key=None
    ) -> tuple[NamedArray, KvPageCache]:
        """As `Attention.paged_decode`."""
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
    """The same model, sharing its arrays, whose attention reads the cache in batches.

    Attention of other classes than levanter's plain `Attention` is left as it is.
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
    """All new tokens at once; what stands behind them in the batch is dropped."""
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
