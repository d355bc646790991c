# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Arguments of the programs that put prompts into the KV cache: calls of fixed shapes."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np

from marin_rl.sampling.attention import PADDING, Tokens


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
    """The two sizes of calls of `prefill`, each a program of its own."""

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


class Piece(NamedTuple):
    """Consecutive prompt tokens of a slot."""

    slot: int
    """The slot."""
    start: int
    """Position of the first token in its sequence."""
    tokens: np.ndarray
    """int32 `[length]`, token ids."""


def prefill_calls(pieces: Sequence[Piece], shapes: PrefillShapes, shards: int, shard_slots: int) -> Iterator[Tokens]:
    """Yield the arguments of `prefill`: chunks of the pieces, in order; see `PrefillShapes.long_tokens`.

    Args:
        pieces: tokens to add to the cache.
        shapes: sizes of calls.
        shards: number of data shards.
        shard_slots: number of slots of each; slots are numbered within their shard.
    """
    cuts = [shapes.long_tokens(len(tokens)) for _, _, tokens in pieces]
    firsts = [piece._replace(tokens=piece.tokens[:cut]) for piece, cut in zip(pieces, cuts, strict=True)]
    rests = [Piece(slot, start + cut, tokens[cut:]) for (slot, start, tokens), cut in zip(pieces, cuts, strict=True)]
    yield from _calls(firsts, shapes.long, shards, shard_slots)
    yield from _calls(rests, shapes.short, shards, shard_slots)


def _calls(pieces: Sequence[Piece], shape: PrefillShape, shards: int, shard_slots: int) -> Iterator[Tokens]:
    """Yield the arguments of calls of one shape.

    A call may have several chunks of a slot, because each layer writes all keys and values before it reads any.
    """
    rows, chunk = shape
    waiting: list[deque[Piece]] = [deque() for _ in range(shards)]
    for slot, start, tokens in pieces:
        waiting[slot // shard_slots] += (
            Piece(slot, start + offset, tokens[offset : offset + chunk]) for offset in range(0, len(tokens), chunk)
        )
    while any(waiting):
        ids = np.zeros((shards, rows, chunk), np.int32)
        positions = np.full(ids.shape, PADDING, np.int32)
        slots = np.full(ids.shape[:2], shard_slots, np.int32)
        for shard, parts in enumerate(waiting):
            for row in range(min(rows, len(parts))):
                slot, start, tokens = parts.popleft()
                ids[shard, row, : len(tokens)] = tokens
                positions[shard, row, : len(tokens)] = start + np.arange(len(tokens))
                slots[shard, row] = slot % shard_slots
        arrays = ids.reshape(-1, chunk), slots.reshape(-1), positions.reshape(-1, chunk)
        yield Tokens(*cast(tuple[jax.Array, jax.Array, jax.Array], arrays))


def copy_arguments(
    copies: Sequence[tuple[int, int]], shards: int, shard_slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of `copy_slots`, with slots numbered within their shard.

    Args:
        copies: source and target of each copy, in the same shard.
        shards: number of data shards.
        shard_slots: number of slots of each.
    """
    pairs = np.zeros((2, shards, shard_slots), np.int32)
    counts = np.zeros(shards, np.int32)
    for source, target in copies:
        shard = source // shard_slots
        pairs[:, shard, counts[shard]] = source % shard_slots, target % shard_slots
        counts[shard] += 1
    return pairs[0].reshape(-1), pairs[1].reshape(-1), counts
