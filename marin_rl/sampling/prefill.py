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


def prefill_shape(platform: str, slots: int, max_context: int, max_new_tokens: int) -> PrefillShape:
    """Return the sizes of a call of `prefill`.

    The sizes are fixed, because a program of other shapes may round differently, and then the time at which a prompt
    arrives would affect its tokens. On a CPU small calls waste least; accelerators need many tokens per call.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        slots: number of slots of a data shard.
        max_context: maximum number of tokens of a sequence.
        max_new_tokens: maximum number of new tokens of a request.
    """
    tokens, shortest, longest = (256, 8, 32) if platform == "cpu" else (4096, 128, 512)
    prompt_room = max(max_context - max_new_tokens, 1)
    chunk = min(max(1 << (prompt_room - 1).bit_length(), shortest), longest, max_context)
    return PrefillShape(min(tokens // chunk, slots), chunk)


class Piece(NamedTuple):
    """Consecutive prompt tokens of a slot."""

    slot: int
    """The slot."""
    start: int
    """Position of the first token in its sequence."""
    tokens: np.ndarray
    """int32 `[length]`, token ids."""


def prefill_calls(pieces: Sequence[Piece], shape: PrefillShape, shards: int, shard_slots: int) -> Iterator[Tokens]:
    """Yield the arguments of `prefill`: chunks of the pieces, in order.

    A call may have several chunks of a slot, because each layer writes all keys and values before it reads any.

    Args:
        pieces: tokens to add to the cache.
        shape: sizes of a call.
        shards: number of data shards.
        shard_slots: number of slots of each; slots are numbered within their shard.
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
