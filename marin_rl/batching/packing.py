# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sequence packing: the microbatch, row and start position of each sequence of a batch.

All microbatches of a run have one fixed shape, so a run compiles once regardless of the number of sequences per step.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Shape of every microbatch of a run."""

    row_length: int
    """Positions per row."""
    rows_per_microbatch: int
    """Rows per microbatch."""
    packed: bool
    """Whether several sequences may share a row; if False, each sequence has a separate row."""
    whole_rollouts: bool = True
    """Whether all sequences of a rollout must be in one microbatch, as required by ratios of whole rollouts."""
    row_cost: float = 0.0
    """Relative cost of one row, to compare layouts."""
    unpacked: "RowLayout | None" = None
    """Layout of batches that cost less with one sequence per row; None if there are none."""

    def __post_init__(self) -> None:
        for name in ("row_length", "rows_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"RowLayout.{name} is {getattr(self, name)}; it must be at least 1")

    def microbatches(self, rollouts: int) -> int:
        """Return the number of microbatches of rollouts of one sequence each if no two of them share a row.

        >>> RowLayout(row_length=8, rows_per_microbatch=4, packed=True).microbatches(9)
        3
        """
        own = -(-rollouts // self.rows_per_microbatch)
        return own if self.unpacked is None else max(own, self.unpacked.microbatches(rollouts))

    def cost(self, microbatches: int) -> float:
        """Return the cost of a number of microbatches, in units of `row_cost`."""
        return microbatches * self.rows_per_microbatch * self.row_cost


class Slot(NamedTuple):
    """Location of one sequence in the microbatches of a batch."""

    microbatch_index: int
    """Index of the microbatch."""
    row: int
    """Row of the microbatch."""
    start: int
    """Position of the first token."""
    segment: int
    """Segment id: 1 for the first sequence of a row, then 2, …"""
    length: int
    """Number of tokens."""


def pack_sequences(
    lengths: Sequence[Sequence[int]], layout: RowLayout, ids: Sequence[str] | None = None
) -> tuple[tuple[Slot, ...], ...]:
    """Assign each sequence to a slot by first-fit decreasing, which uses few microbatches.

    With `whole_rollouts`, rollouts of several sequences are placed first, longest first; rollouts of one sequence,
    longest first, fill the remaining space. Each is placed in the first space that is large enough, or in a new
    microbatch.

    Args:
        lengths: per rollout, the number of tokens of each sequence, at least 1. A rollout may have no sequences.
        layout: shape of a microbatch, and whether sequences share rows.
        ids: rollout ids for error messages; indices by default.

    Returns:
        Per rollout, the slot of each sequence.

    Raises:
        ValueError: if a sequence is empty or longer than a row, or a rollout does not fit into one microbatch. The
            message names the rollout.

    >>> slots = pack_sequences([[5], [2], [3]], RowLayout(row_length=8, rows_per_microbatch=1, packed=True))
    >>> [(slot.microbatch_index, slot.start, slot.segment) for (slot,) in slots]
    [(0, 0, 1), (1, 0, 1), (0, 5, 2)]

    Source: Johnson 1973, Near-optimal bin packing algorithms: at most 11/9 of the fewest rows, plus one.
    """
    names = [str(index) for index in range(len(lengths))] if ids is None else ids
    for name, sequences in zip(names, lengths, strict=True):
        _check_lengths(name, sequences, layout)
    if not layout.whole_rollouts:
        split = dataclasses.replace(layout, whole_rollouts=True)
        single = iter(pack_sequences([[length] for sequences in lengths for length in sequences], split))
        return tuple(tuple(next(single)[0] for _ in sequences) for sequences in lengths)

    def order(index: int) -> tuple[bool, int, list[int]]:
        # It depends on lengths only, so the order of rollouts does not affect the packing.
        return len(lengths[index]) == 1, -sum(lengths[index]), sorted(-length for length in lengths[index])

    rows = _FreeRows(layout, capacity=len(lengths))
    slots: list[tuple[Slot, ...]] = [()] * len(lengths)
    for index in sorted(range(len(lengths)), key=order):
        if lengths[index]:
            slots[index] = rows.place(names[index], lengths[index])
    return tuple(slots)


def choose_layout(
    lengths: Sequence[Sequence[int]], layout: RowLayout, ids: Sequence[str] | None = None
) -> tuple[RowLayout, tuple[tuple[Slot, ...], ...]]:
    """Pack a batch, or give each sequence a row if that costs less. Depends on the lengths only.

    Args:
        lengths: per rollout, the number of tokens of each sequence.
        layout: layout of packed rows; its `unpacked` is the other candidate.
        ids: rollout ids for error messages; indices by default.

    Returns:
        The chosen layout, and per rollout the slot of each sequence.

    Raises:
        ValueError: as for `pack_sequences`.

    >>> separate = RowLayout(row_length=6, rows_per_microbatch=1, packed=False, row_cost=6)
    >>> layout = RowLayout(row_length=8, rows_per_microbatch=1, packed=True, row_cost=9, unpacked=separate)
    >>> [choose_layout([[n], [n], [n]], layout)[0].packed for n in (2, 4, 6)]
    [True, True, False]
    """
    slots = pack_sequences(lengths, layout, ids)
    separate, rows = layout.unpacked, sum(len(sequences) for sequences in lengths)
    if not rows or separate is None or max(len(sequences) for sequences in lengths) > separate.rows_per_microbatch:
        return layout, slots
    # A lower bound: whole rollouts may need a few microbatches more.
    if layout.cost(count_microbatches(slots)) <= separate.cost(-(-rows // separate.rows_per_microbatch)):
        return layout, slots
    return separate, pack_sequences(lengths, separate, ids)


def count_microbatches(slots: Sequence[Sequence[Slot]]) -> int:
    """Count the microbatches of a layout. At least 1, because a step without sequences still runs the model."""
    return max((slot.microbatch_index + 1 for sequences in slots for slot in sequences), default=1)


def _check_lengths(name: str, lengths: Sequence[int], layout: RowLayout) -> None:
    for length in lengths:
        if length < 1:
            raise ValueError(f"rollout {name} has a sequence of {length} tokens; a sequence must have at least 1")
        if length > layout.row_length:
            raise ValueError(
                f"rollout {name} has a sequence of {length} tokens, which does not fit into rows of "
                f"{layout.row_length} positions; increase row_length"
            )


def _fit(free: Int64[np.ndarray, " rows"], needed: Sequence[int]) -> list[int] | None:
    """Assign rows to several sequences by first-fit decreasing; None if they do not all fit."""
    free = free.copy()
    rows = [0] * len(needed)
    for index in sorted(range(len(needed)), key=lambda index: -needed[index]):
        row = int(np.argmax(free >= needed[index]))
        if free[row] < needed[index]:
            return None
        rows[index] = row
        free[row] -= needed[index]
    return rows


class _FreeRows:
    """Free space in the rows of all microbatches opened so far."""

    def __init__(self, layout: RowLayout, capacity: int):
        self._layout = layout
        self._microbatches = 0
        self._free = np.full((capacity, layout.rows_per_microbatch), layout.row_length)
        self._sequences = np.zeros((capacity, layout.rows_per_microbatch), np.int64)
        self._last_single = (0, 0)
        """Space and row of the last rollout of one sequence."""

    def place(self, name: str, lengths: Sequence[int]) -> tuple[Slot, ...]:
        """Reserve space for all of `lengths` in the first microbatch, and its first rows, with enough space."""
        needed = [length if self._layout.packed else self._layout.row_length for length in lengths]
        if len(lengths) == 1:
            return (self._place_single(lengths[0], needed[0]),)
        free = self._free[: self._microbatches]
        candidates = (free.max(axis=1) >= max(needed)) & (free.sum(axis=1) >= sum(needed))
        for microbatch_index in [*np.flatnonzero(candidates).tolist(), self._microbatches]:
            rows = _fit(self._free[microbatch_index], needed)
            if rows is not None:
                places = zip(rows, lengths, needed, strict=True)
                return tuple(self._reserve(microbatch_index, row, length, space) for row, length, space in places)
        rows_needed = len(set(_fit(np.full(len(needed), self._layout.row_length), needed) or ()))
        raise ValueError(
            f"rollout {name} has {len(lengths)} sequences of {sum(lengths)} tokens in total, which need "
            f"{rows_needed} rows of {self._layout.row_length} positions, but a microbatch has "
            f"{self._layout.rows_per_microbatch} and a rollout cannot be split over microbatches; "
            "increase rows_per_microbatch"
        )

    def _place_single(self, length: int, space: int) -> Slot:
        """Reserve space for a rollout of one sequence in the first row with enough space."""
        last_space, last_row = self._last_single
        # Rows before the last one have less than `last_space`, because the free space of a row never grows.
        begin = last_row if space >= last_space else 0
        end = (self._microbatches + 1) * self._layout.rows_per_microbatch
        row = begin + int(np.argmax(self._free.reshape(-1)[begin:end] >= space))
        self._last_single = (space, row)
        return self._reserve(*divmod(row, self._layout.rows_per_microbatch), length, space)

    def _reserve(self, microbatch_index: int, row: int, length: int, space: int) -> Slot:
        self._microbatches = max(self._microbatches, microbatch_index + 1)
        start = self._layout.row_length - int(self._free[microbatch_index, row])
        self._free[microbatch_index, row] -= space
        self._sequences[microbatch_index, row] += 1
        return Slot(microbatch_index, row, start, int(self._sequences[microbatch_index, row]), length)
