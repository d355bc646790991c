# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Where each sequence of a batch goes: which pass of the model, which row of it, and from which position on.

A batch is cut into *microbatches* of one fixed shape, so that a run compiles once however many sequences a step
has. Plain integers; importing this module loads no jax.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The fixed shape of every microbatch of a run."""

    row_length: int
    """Positions of a row."""
    rows_per_microbatch: int
    """Rows in one microbatch of the model."""
    packed: bool
    """True puts several sequences into a row; False gives each a row of its own."""
    whole_rollouts: bool = True
    """Whether all sequences of a rollout must lie within one microbatch, where ratios of whole rollouts are
    computed."""

    def __post_init__(self) -> None:
        for name in ("row_length", "rows_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"RowLayout.{name} is {getattr(self, name)}; it must be at least 1")


class Slot(NamedTuple):
    """The place of one sequence."""

    microbatch_index: int
    """Which pass."""
    row: int
    """Which row of that pass."""
    start: int
    """Position of its first token."""
    segment: int
    """Its segment id: 1 for the first sequence of a row, then 2, …"""
    length: int
    """Its tokens."""


def pack_sequences(
    lengths: Sequence[Sequence[int]], layout: RowLayout, ids: Sequence[str] | None = None
) -> tuple[tuple[Slot, ...], ...]:
    """Give each sequence a place, in few microbatches: first-fit decreasing.

    With `whole_rollouts`, rollouts of several sequences choose first, longest first; those of one sequence, again
    longest first, fill what is left. Each takes the first place that is large enough, a new microbatch where there is
    none. Equal input gives equal output.

    Args:
        lengths: per rollout, the tokens of each of its sequences, at least 1 each. A rollout may have none.
        layout: rows, and whether they are shared.
        ids: names the rollouts in errors; without it, their index does.

    Returns:
        Per rollout, per sequence, its slot.

    Raises:
        ValueError: if a sequence is empty or longer than a row, or a rollout does not fit into one microbatch. The
            message names the rollout.

    >>> slots = pack_sequences([[5], [2], [3]], RowLayout(row_length=8, rows_per_microbatch=1, packed=True))
    >>> [(slot.microbatch_index, slot.start, slot.segment) for (slot,) in slots]
    [(0, 0, 1), (1, 0, 1), (0, 5, 2)]

    Source: Johnson 1973, Near-optimal bin packing algorithms: at most 11/9 of the fewest rows, plus one.
    """
    names = [str(index) for index in range(len(lengths))] if ids is None else ids
    for name, own in zip(names, lengths, strict=True):
        _check_lengths(name, own, layout)
    if not layout.whole_rollouts:
        apart = dataclasses.replace(layout, whole_rollouts=True)
        single = iter(pack_sequences([[length] for own in lengths for length in own], apart))
        return tuple(tuple(next(single)[0] for _ in own) for own in lengths)
    rows = _Rows(layout, capacity=len(lengths))
    slots: list[tuple[Slot, ...]] = [()] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: _turn(lengths[index])):
        if lengths[index]:
            slots[index] = rows.place(names[index], lengths[index])
    return tuple(slots)


def count_microbatches(slots: Sequence[Sequence[Slot]]) -> int:
    """Passes that a layout needs: at least 1, also for no sequences, because a step always runs the model."""
    return max((slot.microbatch_index + 1 for own in slots for slot in own), default=1)


def _turn(lengths: Sequence[int]) -> tuple[bool, int, list[int]]:
    """Sort key. Decided by lengths alone, so that the order of rollouts does not change how rows are filled."""
    return len(lengths) == 1, -sum(lengths), sorted(-length for length in lengths)


def _check_lengths(name: str, lengths: Sequence[int], layout: RowLayout) -> None:
    for length in lengths:
        if length < 1:
            raise ValueError(f"rollout {name} has a sequence of {length} tokens; a sequence has at least 1")
        if length > layout.row_length:
            raise ValueError(
                f"rollout {name} has a sequence of {length} tokens, which does not fit into rows of "
                f"{layout.row_length} positions; make the rows longer"
            )


def _spaces(lengths: Sequence[int], layout: RowLayout) -> list[int]:
    """Positions that each sequence takes from its row."""
    return [length if layout.packed else layout.row_length for length in lengths]


def _fit(free: Int64[np.ndarray, " rows"], needed: Sequence[int]) -> list[int] | None:
    """Rows for several sequences by first-fit decreasing, or None where they do not fit together."""
    free = free.copy()
    rows = [0] * len(needed)
    for index in sorted(range(len(needed)), key=lambda index: -needed[index]):
        row = int(np.argmax(free >= needed[index]))
        if free[row] < needed[index]:
            return None
        rows[index] = row
        free[row] -= needed[index]
    return rows


class _Rows:
    """What is still free, over all microbatches opened so far."""

    def __init__(self, layout: RowLayout, capacity: int):
        self._layout = layout
        self._microbatches = 0
        self._free = np.full((capacity, layout.rows_per_microbatch), layout.row_length)
        self._sequences = np.zeros((capacity, layout.rows_per_microbatch), np.int64)

    def place(self, name: str, lengths: Sequence[int]) -> tuple[Slot, ...]:
        """Take the first pass, and the first rows in it, that hold all of `lengths`."""
        needed = _spaces(lengths, self._layout)
        free = self._free[: self._microbatches]
        promising = (free.max(axis=1) >= max(needed)) & (free.sum(axis=1) >= sum(needed))
        for microbatch_index in [*np.flatnonzero(promising).tolist(), self._microbatches]:
            rows = _fit(self._free[microbatch_index], needed)
            if rows is not None:
                self._microbatches = max(self._microbatches, microbatch_index + 1)
                places = zip(rows, lengths, needed, strict=True)
                return tuple(self._take(microbatch_index, row, length, space) for row, length, space in places)
        raise ValueError(
            f"rollout {name} has {len(lengths)} sequences of {sum(lengths)} tokens together, which take "
            f"{self._rows_needed(needed)} rows of {self._layout.row_length} positions, but a microbatch has "
            f"{self._layout.rows_per_microbatch} and a rollout cannot be split over microbatches; "
            "put more rows into a microbatch"
        )

    def _rows_needed(self, needed: Sequence[int]) -> int:
        rows = _fit(np.full(len(needed), self._layout.row_length), needed)
        return len(set(rows or ()))

    def _take(self, microbatch_index: int, row: int, length: int, space: int) -> Slot:
        start = self._layout.row_length - int(self._free[microbatch_index, row])
        self._free[microbatch_index, row] -= space
        self._sequences[microbatch_index, row] += 1
        return Slot(microbatch_index, row, start, int(self._sequences[microbatch_index, row]), length)
