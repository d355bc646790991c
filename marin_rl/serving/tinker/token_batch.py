# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Data of clients as microbatches of a few fixed shapes, with any targets at any position."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Int64

from marin_rl.batching.packing import Slot, count_microbatches
from marin_rl.batching.rl_example import TokenRows
from marin_rl.serving.tinker.losses import LOSSES, TARGETS, Loss
from marin_rl.serving.tinker.records import Datum
from marin_rl.serving.tinker.rows import Placed


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
    places: list[tuple[int, int, Int64[np.ndarray, " length"]]]
    """Of each datum: its index in the request, its row, and its positions."""


_TOKENS = ("input_ids", "segment_ids", "position_ids", "prompt_segment_ids")
_VALUES = {"targets": np.int32, "scored": np.bool_, "factors": np.float32, "old_logprobs": np.float32}


def pack_data(data: Sequence[Datum], loss_fn: str, placed: Placed, pad_token_id: int) -> Iterator[Piece]:
    """Put data into microbatches of one shape.

    The number of targets of a position is rounded up to a power of two. `placed` has some of the data, with equal
    numbers of targets, and their places.

    Yields:
        The microbatches, on the host.
    """
    layout, most = placed.layout, data[placed.indices[0]].inputs[TARGETS][0].size
    shape = layout.rows_per_microbatch, layout.tokens_per_row, 1 << (most - 1).bit_length()
    of_piece: list[list[tuple[Slot, int]]] = [[] for _ in range(count_microbatches([placed.slots]))]
    for slot, index in sorted(zip(placed.slots, placed.indices, strict=True)):
        of_piece[slot.microbatch_index].append((slot, index))
    for own in of_piece:
        arrays = {name: np.zeros(shape[:2], np.int32) for name in _TOKENS}
        arrays |= {name: np.zeros(shape, dtype) for name, dtype in _VALUES.items()}
        arrays["input_ids"][:] = pad_token_id
        places = []
        # The prompt of a row with a group is segment 1.
        segments = np.full(shape[0], layout.group is not None, np.int32)
        for slot, index in own:
            segments[slot.row] += 1
            along = np.arange(len(data[index].tokens))
            at = along + np.where(along < slot.prompt_length, 0, slot.start - slot.prompt_length)
            row = {name: array[slot.row] for name, array in arrays.items()}
            _write(row, data[index], at, LOSSES[loss_fn])
            row["segment_ids"][at] = np.where(along < slot.prompt_length, 1, segments[slot.row])
            row["prompt_segment_ids"][at] = 1
            places.append((index, slot.row, at))
        if layout.group is None:
            del arrays["prompt_segment_ids"]
        axes = tuple(map(Axis, ("batch", "position", "target"), shape))
        # On the host: `hax.named` would put every array on the default device.
        named = {name: NamedArray(cast(jax.Array, array), axes[: array.ndim]) for name, array in arrays.items()}
        yield Piece(TokenBatch(**named, group=layout.group), places)


def _write(row: Mapping[str, np.ndarray], datum: Datum, at: Int64[np.ndarray, " length"], loss: Loss) -> None:
    """Write a datum to some positions of a row."""
    row["input_ids"][at], row["position_ids"][at] = datum.tokens, np.arange(len(at))
    values = {name: array.reshape(len(at), -1) for name, array in datum.inputs.items()}
    count = values[TARGETS].shape[1]
    row["targets"][at, :count], row["scored"][at, :count] = values[TARGETS], True
    # A datum without weights is only scored.
    if loss.factor in values:
        row["factors"][at, :count] = values[loss.factor]
    if loss.has_old:
        row["old_logprobs"][at, :count] = values["logprobs"]
