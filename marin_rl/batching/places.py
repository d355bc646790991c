# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Places of sequences in the microbatches of a batch, and arrays of all their tokens."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from marin_rl.batching.packing import Slot
from marin_rl.objectives.aggregation import NO_ROLLOUT


@dataclasses.dataclass(frozen=True)
class Places:
    """Shared prompts and sequences without them, in the order of their positions in the microbatches.

    All arrays have one entry for each.
    """

    rollout: Int64[np.ndarray, " sequences"]
    owner: Int64[np.ndarray, " sequences"]
    """The rollout, or `NO_ROLLOUT` for a shared prompt."""
    row: Int64[np.ndarray, " sequences"]
    """Row of the sequence in the arrays of its rollout."""
    offset: Int64[np.ndarray, " sequences"]
    """First token in that row."""
    length: Int64[np.ndarray, " sequences"]
    start: Int64[np.ndarray, " sequences"]
    """Flat index of the first token in the microbatches."""
    number: Int64[np.ndarray, " sequences"]
    """Number of the rollout among those of its microbatch."""
    segment: Int64[np.ndarray, " sequences"]
    """1 for the first of a row, then 2, …"""
    prompt_segment: Int64[np.ndarray, " sequences"]
    """Segment of the shared prompt, or of the sequence itself."""
    size: int
    """Number of positions in the microbatches."""

    @functools.cached_property
    def tokens(self) -> Bool[np.ndarray, " positions"]:
        """Whether a position holds a token."""
        return self.spread(np.ones_like(self.length), 0, np.bool_)

    @functools.cached_property
    def _run_lengths(self) -> Int64[np.ndarray, " runs"]:
        edges = np.stack([self.start, self.start + self.length], axis=1).reshape(-1)
        # Padding, sequence, padding, sequence, ..., padding.
        return np.diff(edges, prepend=0, append=self.size)

    def in_rows(
        self, rows: Int64[np.ndarray, " own"], shape: tuple[int, int, int]
    ) -> tuple["Places", Int64[np.ndarray, " kept"]]:
        """Keep the sequences in some rows of each microbatch, as if there were no others.

        Args:
            rows: row numbers, ascending.
            shape: shape of the microbatches.

        Returns:
            Their places, and their indices.
        """
        microbatch, row, position = np.unravel_index(self.start, shape)
        kept = np.flatnonzero(np.isin(row, rows))
        own = (shape[0], len(rows), shape[2])
        start = np.ravel_multi_index((microbatch[kept], np.searchsorted(rows, row[kept]), position[kept]), own)
        fields = {name: getattr(self, name)[kept] for name in _ARRAYS}
        return Places(**fields, start=start, size=math.prod(own)), kept

    def gather(
        self, arrays: Sequence[Shaped[np.ndarray, "_rows _positions"]], dtype: Any, padding: int = 0
    ) -> Shaped[np.ndarray, " positions"]:
        """Put one array of every rollout at the places of its tokens."""
        parts = zip(self.rollout.tolist(), self.row.tolist(), self.offset.tolist(), self.length.tolist(), strict=True)
        result = np.full(self.size, padding, dtype)
        result[self.tokens] = join(
            [arrays[rollout][row, offset : offset + length] for rollout, row, offset, length in parts], result.dtype
        )
        return result

    def spread(
        self, values: Int64[np.ndarray, " sequences"], padding: int, dtype: Any
    ) -> Shaped[np.ndarray, " positions"]:
        """Repeat the value of each sequence for all its tokens."""
        runs = np.full(self._run_lengths.size, padding, dtype)
        runs[1::2] = values
        return np.repeat(runs, self._run_lengths)

    def action_slices(self, loss_mask: Bool[np.ndarray, " positions"]) -> list[slice]:
        """Return the part of each sequence in arrays over the loss tokens of all rollouts, row by row."""
        count = np.add.reduceat(loss_mask, self.start, dtype=np.int64)
        by_rollout = np.lexsort((self.row, self.rollout))
        end = np.empty_like(count)
        end[by_rollout] = np.cumsum(count[by_rollout])
        return [slice(*bounds) for bounds in zip((end - count).tolist(), end.tolist(), strict=True)]


_ARRAYS = frozenset(field.name for field in dataclasses.fields(Places)) - {"start", "size"}


def find_places(slots: Sequence[Sequence[Slot]], shape: tuple[int, int, int]) -> Places:
    """Return the places of all sequences in microbatches of a shape."""
    table: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rollout, own in enumerate(slots):
        for row, (*packed_row, start, length, prompt_length) in enumerate(own):
            prompt = 0 if prompt_length else start
            table[*packed_row, start] = (rollout, rollout, row, prompt_length, length, prompt)
            if prompt_length:
                # The tokens of a shared prompt are taken from any of its rollouts, but belong to none.
                table[*packed_row, prompt] = (rollout, NO_ROLLOUT, row, 0, prompt_length, prompt)
    where = np.array(list(table), np.int64).reshape(len(table), 3)
    columns = np.array(list(table.values()), np.int64).reshape(len(table), 6)
    start = np.ravel_multi_index(tuple(where.T), shape)
    order = np.argsort(start)
    start, where = start[order], where[order]
    rollout, owner, row, offset, length, prompt_start = columns[order].T
    microbatch = where[:, 0]
    distinct, number = np.unique(np.stack([microbatch, rollout]), axis=1, return_inverse=True)
    number = number.reshape(-1) - np.searchsorted(distinct[0], microbatch)
    row_start = start - where[:, 2]
    segment = 1 + np.arange(len(table)) - np.searchsorted(row_start, row_start)
    return Places(
        rollout=rollout,
        owner=owner,
        row=row,
        offset=offset,
        length=length,
        start=start,
        number=np.where(owner == NO_ROLLOUT, NO_ROLLOUT, number),
        segment=segment,
        prompt_segment=segment[np.searchsorted(start, row_start + prompt_start)],
        size=math.prod(shape),
    )


def join(arrays: Sequence[Shaped[np.ndarray, " _values"]], dtype: Any) -> Shaped[np.ndarray, " joined"]:
    """Concatenate arrays.

    >>> join([], np.int32)
    array([], dtype=int32)
    """
    return np.concatenate([np.zeros(0, dtype), *arrays])
