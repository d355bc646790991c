# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Batched attention over the paged cache, compared with a loop in float64 and with levanter's reference."""

from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float, Int
from levanter.inference.utils import INVALID
from levanter.layers.attention import Attention, default_ragged_paged_attention
from levanter.models.llama import LlamaConfig

from marin_rl.sampling.paged_attention import BatchedAttention, paged_attention, with_batched_attention

SCALE = 0.3
HEAD_SIZE = 8


class Batch(NamedTuple):
    """Sequences in a cache, with queries for some of their last tokens."""

    queries: Float[np.ndarray, "tokens kv_heads group head_size"]
    kv_pages: Float[np.ndarray, "pages page_size two_kv_heads head_size"]
    kv_lengths: Int[np.ndarray, " seqs"]
    page_indices: Int[np.ndarray, "seqs pages_per_seq"]
    query_starts: Int[np.ndarray, " seqs_and_one"]
    num_seqs: int


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    tokens: int,
    seqs: int,
    page_size: int,
    pages_per_seq: int,
    kv_heads: int,
    group: int,
    seed: int,
) -> Batch:
    """Return a batch with these new and cached token counts per sequence; unused entries are NaN or out of range."""
    rng = np.random.default_rng(seed)
    num_pages = seqs * pages_per_seq
    free = list(rng.permutation(num_pages))
    pages = np.full((num_pages, page_size, 2 * kv_heads, HEAD_SIZE), 1e4)
    page_indices = np.full((seqs, pages_per_seq), INVALID, np.int32)
    kv_lengths = np.full(seqs, INVALID, np.int32)
    for number, (new, old) in enumerate(lengths):
        total = new + old
        kv_lengths[number] = total
        for index in range(-(-total // page_size)):
            page = free.pop()
            page_indices[number, index] = page
            filled = min(page_size, total - index * page_size)
            pages[page, :filled] = rng.normal(size=(filled, 2 * kv_heads, HEAD_SIZE))
    starts = np.concatenate([[0], np.cumsum([new for new, _ in lengths])])
    # The engine treats padding after the real tokens as a sequence.
    starts = np.concatenate([starts, np.full(seqs - len(lengths), tokens)]).astype(np.int32)
    queries = np.full((tokens, kv_heads, group, HEAD_SIZE), np.nan)
    queries[: starts[len(lengths)]] = rng.normal(size=(starts[len(lengths)], kv_heads, group, HEAD_SIZE))
    return Batch(queries, pages, kv_lengths, page_indices, starts, len(lengths))


def by_loop(batch: Batch, soft_cap: float | None) -> Float[np.ndarray, "tokens kv_heads group head_size"]:
    """Attend with one query and one head at a time."""
    result = np.zeros_like(batch.queries)
    page_size = batch.kv_pages.shape[1]
    for seq in range(batch.num_seqs):
        first, last = batch.query_starts[seq], batch.query_starts[seq + 1]
        length = batch.kv_lengths[seq]
        own_pages = batch.page_indices[seq, : -(-length // page_size)]
        cached = np.concatenate([batch.kv_pages[page] for page in own_pages])[:length]
        for token in range(first, last):
            position = length - (last - token)
            for head in range(batch.queries.shape[1]):
                keys, values = cached[: position + 1, 2 * head], cached[: position + 1, 2 * head + 1]
                for member in range(batch.queries.shape[2]):
                    scores = SCALE * keys @ batch.queries[token, head, member]
                    if soft_cap is not None:
                        scores = soft_cap * np.tanh(scores / soft_cap)
                    weights = np.exp(scores - scores.max())
                    result[token, head, member] = weights @ values / weights.sum()
    return result


def attend(batch: Batch, soft_cap: float | None) -> Float[np.ndarray, "tokens kv_heads group head_size"]:
    """Return the compiled function under test."""
    arrays = [jnp.asarray(part, jnp.float32) for part in batch[:2]] + [jnp.asarray(part) for part in batch[2:5]]
    function = jax.jit(paged_attention, static_argnames=("scale", "soft_cap"))
    return np.asarray(function(*arrays, jnp.int32(batch.num_seqs), scale=SCALE, soft_cap=soft_cap))


SHAPES = {
    # tokens, seqs, page_size, pages_per_seq, kv_heads, group
    "decode": (5, 5, 4, 10, 2, 1),
    "decode, grouped": (40, 40, 16, 9, 1, 3),
    "prefill": (96, 6, 4, 10, 2, 2),
    "prefill, many short": (64, 50, 8, 3, 2, 1),
    "prefill, long pages": (150, 3, 256, 1, 1, 2),
    "prefill, uneven key blocks": (200, 4, 16, 13, 1, 1),
}


@pytest.mark.medium
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@settings(max_examples=12)
@given(data=st.data())
def test_agrees_with_a_loop(shape: str, soft_cap: float | None, data: st.DataObject) -> None:
    tokens, seqs, page_size, pages_per_seq, kv_heads, group = SHAPES[shape]
    context = page_size * pages_per_seq
    room, lengths = tokens, []
    for _ in range(data.draw(st.integers(0, seqs))):
        if room == 0:
            break
        new = data.draw(st.integers(1, min(1 if tokens <= seqs else room, context)))
        lengths.append((new, data.draw(st.integers(0, context - new))))
        room -= new
    batch = make_batch(
        lengths,
        tokens=tokens,
        seqs=seqs,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        kv_heads=kv_heads,
        group=group,
        seed=data.draw(st.integers(0, 1000)),
    )
    found = attend(batch, soft_cap)
    used = batch.query_starts[batch.num_seqs]
    np.testing.assert_allclose(found[:used], by_loop(batch, soft_cap)[:used], atol=2e-6)
    assert not found[used:].any()


def test_agrees_with_levanters_reference() -> None:
    batch = make_batch(
        [(7, 20), (1, 0), (30, 3)], tokens=48, seqs=4, page_size=8, pages_per_seq=5, kv_heads=2, group=2, seed=0
    )
    queries = np.nan_to_num(batch.queries)
    reference = default_ragged_paged_attention(
        hax.named(jnp.asarray(queries, jnp.float32), ("position", "kv_head", "q_heads_per_group", "head_size")),
        hax.named(jnp.asarray(batch.kv_pages, jnp.float32), ("page", "slot", "kv_head", "head_size")),
        hax.named(jnp.asarray(batch.kv_lengths), "seq"),
        hax.named(jnp.asarray(batch.page_indices), ("seq", "page")),
        jnp.asarray(batch.query_starts),
        jnp.int32(batch.num_seqs),
        sm_scale=SCALE,
    )
    np.testing.assert_allclose(attend(batch, None)[:38], reference.array[:38], atol=1e-6)


def test_rows_do_not_depend_on_the_rest_of_the_batch() -> None:
    # Bit-identical resume depends on this: which requests share a batch depends on timing.
    sizes = {"tokens": 96, "seqs": 6, "page_size": 4, "pages_per_seq": 10, "kv_heads": 2, "group": 2}
    together = make_batch([(9, 4), (17, 20), (3, 0)], **sizes, seed=3)
    alone = Batch(
        np.concatenate([together.queries[9:26], np.full_like(together.queries[:79], np.nan)]),
        together.kv_pages,
        np.roll(together.kv_lengths, -1),
        np.roll(together.page_indices, -1, axis=0),
        np.array([0, 17, 96, 96, 96, 96, 96], np.int32),
        1,
    )
    np.testing.assert_array_equal(attend(together, None)[9:26], attend(alone, None)[:17])


@pytest.mark.medium
def test_swapping_the_attention_shares_every_array() -> None:
    model = LlamaConfig(
        seq_len=16, hidden_dim=16, intermediate_dim=16, num_layers=2, num_heads=2, num_kv_heads=1
    ).build(Axis("vocab", 32), key=jax.random.key(0))
    swapped = with_batched_attention(model)
    kinds = {
        type(node)
        for node in jax.tree.leaves(swapped, is_leaf=lambda node: isinstance(node, Attention))
        if isinstance(node, Attention)
    }
    assert kinds == {BatchedAttention}
    ours, theirs = (jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (swapped, model))
    assert len(ours) == len(theirs)
    assert all(one is other for one, other in zip(ours, theirs, strict=True))
