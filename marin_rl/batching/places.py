# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Places of sequences in the microbatches of a batch, and arrays of all their tokens."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Shaped

from marin_rl.batching.packing import Slot
from marin_rl.objectives.aggregation import NO_ROLLOUT


@dataclasses.dataclass(frozen=True)
class Places:
    """Places of shared prompts and of sequences, in the order of their positions in the microbatches.

    A sequence with a shared prompt has only the tokens after it. All arrays have one entry per shared prompt or
    sequence.
    """

    owner: Int64[np.ndarray, " sequences"]
    """The rollout, or `NO_ROLLOUT` for a shared prompt."""
    source: Int64[np.ndarray, " sequences"]
    """Index of the first token in the joined arrays of all rollouts."""
    offset: Int64[np.ndarray, " sequences"]
    """Position of the first token in its sequence: the length of a shared prompt before it."""
    length: Int64[np.ndarray, " sequences"]
    start: Int64[np.ndarray, " sequences"]
    """Flat index of the first token in the microbatches."""
    number: Int64[np.ndarray, " sequences"]
    """Number of the rollout among those of its microbatch, or `NO_ROLLOUT` for a shared prompt."""
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
    def sources(self) -> Int64[np.ndarray, " tokens"]:
        """Index of each token in the joined arrays of all rollouts."""
        return np.repeat(self.source - (np.cumsum(self.length) - self.length), self.length) + np.arange(
            self.length.sum()
        )

    @functools.cached_property
    def _run_lengths(self) -> Int64[np.ndarray, " runs"]:
        edges = np.stack([self.start, self.start + self.length], axis=1).reshape(-1)
        # Padding, sequence, padding, sequence, ..., padding.
        return np.diff(edges, prepend=0, append=self.size)

    def in_rows(self, rows: Int64[np.ndarray, " own"], shape: tuple[int, int, int]) -> "Places":
        """Keep the sequences in some rows of each microbatch, as if there were no others.

        Args:
            rows: row numbers, ascending.
            shape: shape of the microbatches.
        """
        microbatch, row, position = np.unravel_index(self.start, shape)
        kept = np.flatnonzero(np.isin(row, rows))
        own = (shape[0], len(rows), shape[2])
        start = np.ravel_multi_index((microbatch[kept], np.searchsorted(rows, row[kept]), position[kept]), own)
        fields = {name: getattr(self, name)[kept] for name in _ARRAYS}
        return Places(**fields, start=start, size=math.prod(own))

    def gather(
        self, joined: Shaped[np.ndarray, " positions_of_rollouts"], dtype: Any, padding: int = 0
    ) -> Shaped[np.ndarray, " positions"]:
        """Put the joined arrays of all rollouts at the places of their tokens."""
        result = np.full(self.size, padding, dtype)
        result[self.tokens] = joined[self.sources]
        return result

    def spread(
        self, values: Int64[np.ndarray, " sequences"], padding: int, dtype: Any
    ) -> Shaped[np.ndarray, " positions"]:
        """Repeat the value of each sequence for all its tokens."""
        runs = np.full(self._run_lengths.size, padding, dtype)
        runs[1::2] = values
        return np.repeat(runs, self._run_lengths)


_ARRAYS = frozenset(field.name for field in dataclasses.fields(Places)) - {"start", "size"}


def find_places(slots: Sequence[Sequence[Slot]], shape: tuple[int, int, int], row_lengths: Sequence[int]) -> Places:
    """Return the places of all sequences in microbatches of a shape.

    Args:
        slots: per rollout, the slot of each sequence.
        shape: shape of the microbatches.
        row_lengths: per rollout, the row length of its arrays, which have one row per sequence.
    """
    rollout = np.repeat(np.arange(len(slots)), [len(of_rollout) for of_rollout in slots])
    values = itertools.chain.from_iterable(itertools.chain.from_iterable(slots))
    microbatch, row, start, length, shared = np.fromiter(values, np.int64).reshape(-1, len(Slot._fields)).T
    row_start = np.ravel_multi_index((microbatch, row, np.zeros_like(row)), shape)
    width = np.array(row_lengths, np.int64)[rollout]
    source = np.cumsum(width) - width
    # The tokens of a shared prompt are taken from any of its rollouts, but belong to none.
    has_prompt = np.flatnonzero(shared)
    prompts = has_prompt[np.unique(row_start[has_prompt], return_index=True)[1]]
    every = np.concatenate([np.arange(len(rollout)), prompts])
    is_prompt = np.arange(len(every)) >= len(rollout)
    start = row_start[every] + np.where(is_prompt, 0, start[every])
    order = np.argsort(start)
    every, is_prompt, start = every[order], is_prompt[order], start[order]
    rollout, microbatch, row_start, shared = rollout[every], microbatch[every], row_start[every], shared[every]
    offset = np.where(is_prompt, 0, shared)
    distinct, number = np.unique(microbatch * len(slots) + rollout, return_inverse=True)
    number -= np.searchsorted(distinct, microbatch * len(slots))
    segment = 1 + np.arange(len(every)) - np.searchsorted(row_start, row_start)
    return Places(
        owner=np.where(is_prompt, NO_ROLLOUT, rollout),
        source=source[every] + offset,
        offset=offset,
        length=np.where(is_prompt, shared, length[every]),
        start=start,
        number=np.where(is_prompt, NO_ROLLOUT, number),
        segment=segment,
        prompt_segment=segment[np.searchsorted(start, np.where(shared > 0, row_start, start))],
        size=math.prod(shape),
    )


def join(arrays: Sequence[Shaped[np.ndarray, "..."]], dtype: Any) -> Shaped[np.ndarray, " joined"]:
    """Concatenate arrays, row by row.

    >>> join([], np.int32)
    array([], dtype=int32)
    """
    return np.concatenate([np.zeros(0, dtype), *[array.ravel() for array in arrays]])
