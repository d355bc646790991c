# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Data of clients as microbatches of a few fixed shapes, with any targets at any position."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from haliax import Axis, NamedArray

from marin_rl.batching.packing import RowLayout, choose_layout, count_microbatches
from marin_rl.batching.rl_example import TokenRows
from marin_rl.tinker_api.losses import LOSSES, TARGETS
from marin_rl.tinker_api.records import Datum


class TokenBatch(TokenRows):
    """One microbatch. Values at a position belong to the model's prediction after reading its token."""

    targets: NamedArray
    """int32 `{batch, position, target}`, the tokens to score."""
    scored: NamedArray
    """bool `{batch, position, target}`, False for padding."""
    factors: NamedArray
    """float32 `{batch, position, target}`, weights or advantages; 0 for padding."""
    old_logprobs: NamedArray
    """float32 `{batch, position, target}`; 0 for padding, and for losses without them."""


class Piece(NamedTuple):
    """Some data of a request that are in one microbatch."""

    batch: TokenBatch
    """The microbatch, on the host."""
    places: list[tuple[int, int, int]]
    """Of each datum: its index in the request, its row, and its first position."""


def row_length(longest: int, shortest: int, most: int) -> int:
    """Return the smallest of `shortest`, twice, four times, … it that is at least `longest`, but at most `most`.

    >>> [row_length(n, 128, 1000) for n in (5, 129, 600)]
    [128, 256, 1000]
    """
    length = shortest
    while length < longest:
        length *= 2
    return min(length, most)


def pack_data(
    data: Sequence[Datum], loss_fn: str, indices: Sequence[int], layout: RowLayout, pad_token_id: int
) -> Iterator[Piece]:
    """Pack data into microbatches of one shape, in their order as far as rows allow.

    The number of targets of a position is rounded up to a power of two.

    Args:
        data: data with equal numbers of targets.
        loss_fn: the loss.
        indices: index of each datum in the request.
        layout: shape of a microbatch.
        pad_token_id: token id of padding.

    Yields:
        The microbatches, on the host.
    """
    layout, slots = choose_layout([[len(datum.tokens)] for datum in data], layout)
    width = max(datum.inputs[TARGETS].reshape(len(datum.tokens), -1).shape[1] for datum in data)
    width = 1 << (width - 1).bit_length()
    of_piece: list[list[int]] = [[] for _ in range(count_microbatches(slots))]
    for index, (slot,) in enumerate(slots):
        of_piece[slot.microbatch_index].append(index)
    Batch, Pos = Axis("batch", layout.rows_per_microbatch), Axis("position", layout.row_length)
    Target, loss = Axis("target", width), LOSSES[loss_fn]
    for own in of_piece:
        ids = np.full((Batch.size, Pos.size), pad_token_id, np.int32)
        segments, positions = np.zeros_like(ids), np.zeros_like(ids)
        targets = np.zeros((*ids.shape, width), np.int32)
        scored = np.zeros(targets.shape, np.bool_)
        factors, old = np.zeros(targets.shape, np.float32), np.zeros(targets.shape, np.float32)
        places: list[tuple[int, int, int]] = []
        last = np.zeros(Batch.size, np.int32)
        for index in sorted(own, key=lambda index: slots[index][0].start):
            datum, (slot,) = data[index], slots[index]
            length = len(datum.tokens)
            where = slot.row, slice(slot.start, slot.start + length)
            last[slot.row] += 1
            ids[where], segments[where], positions[where] = datum.tokens, last[slot.row], np.arange(length)
            # A datum without weights is only scored.
            values = {name: array.reshape(length, -1) for name, array in datum.inputs.items()}
            count = values[TARGETS].shape[1]
            targets[where][:, :count], scored[where][:, :count] = values[TARGETS], True
            if loss.factor in values:
                factors[where][:, :count] = values[loss.factor]
            if loss.has_old:
                old[where][:, :count] = values["logprobs"]
            places.append((indices[index], slot.row, slot.start))

        def named(array: np.ndarray, *axes: Axis) -> NamedArray:
            return NamedArray(cast(jax.Array, array), axes)

        tokens = [named(array, Batch, Pos) for array in (ids, segments, positions)]
        batch = TokenBatch(
            *tokens,
            targets=named(targets, Batch, Pos, Target),
            scored=named(scored, Batch, Pos, Target),
            factors=named(factors, Batch, Pos, Target),
            old_logprobs=named(old, Batch, Pos, Target),
        )
        yield Piece(batch, places)
