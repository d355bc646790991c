# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sequence packing: the microbatch, row and start position of each sequence of a batch.

All microbatches of a run have one fixed shape, so a run compiles once regardless of the number of sequences per step.
"""

import dataclasses
import itertools
from collections import defaultdict
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
    share_prompts: bool = False
    """Whether sequences with the same prompt may share one copy of it; requires `packed`."""
    row_cost: float = 0.0
    """Relative cost of one row, to compare layouts."""
    unpacked: "RowLayout | None" = None
    """Layout of batches that cost less with one sequence per row; None if there are none."""

    def __post_init__(self) -> None:
        for name in ("row_length", "rows_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"RowLayout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.share_prompts and not self.packed:
            raise ValueError("RowLayout.share_prompts is true, but packed is false; sequences share a prompt in a row")

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
    """Location of one sequence in the microbatches of a batch.

    The first `prompt_length` tokens are at `prompt_start`, where other sequences may have theirs too. The other tokens
    are at `start`.
    """

    microbatch_index: int
    """Index of the microbatch."""
    row: int
    """Row of the microbatch."""
    start: int
    """Position of the first token after the shared prompt."""
    length: int
    """Number of tokens after the shared prompt."""
    prompt_start: int = 0
    """Position of the shared prompt; 0 without one."""
    prompt_length: int = 0
    """Number of tokens of the shared prompt; 0 without one."""


class Prompt(NamedTuple):
    """The tokens of a sequence that may be shared with other sequences."""

    token_ids: bytes
    """The tokens; only compared for equality."""
    length: int
    """Number of tokens; 0 if nothing can be shared."""


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
    >>> [(slot.microbatch_index, slot.start) for (slot,) in slots]
    [(0, 0), (1, 0), (0, 5)]

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
    lengths: Sequence[Sequence[int]],
    layout: RowLayout,
    ids: Sequence[str] | None = None,
    prompts: Sequence[Sequence[Prompt]] | None = None,
) -> tuple[RowLayout, tuple[tuple[Slot, ...], ...]]:
    """Pack a batch, share prompts if that takes fewer microbatches, or give each sequence a row if that costs less.

    Depends on the lengths and prompts only.

    Args:
        lengths: per rollout, the number of tokens of each sequence.
        layout: layout of packed rows; its `unpacked` is the other candidate.
        ids: rollout ids for error messages; indices by default.
        prompts: per rollout, the prompt of each sequence, to share them in packed rows; None for no sharing.

    Returns:
        The chosen layout, and per rollout the slot of each sequence.

    Raises:
        ValueError: as for `pack_sequences`.

    >>> separate = RowLayout(row_length=6, rows_per_microbatch=1, packed=False, row_cost=6.0)
    >>> layout = RowLayout(row_length=8, rows_per_microbatch=1, packed=True, row_cost=9.0, unpacked=separate)
    >>> [choose_layout([[n], [n], [n]], layout)[0].packed for n in (2, 4, 6)]
    [True, True, False]
    """
    slots = pack_sequences(lengths, layout, ids)
    if prompts is not None:
        shared = pack_shared_prompts(lengths, prompts, layout)
        # All microbatches of a layout take the same time.
        slots = shared if count_microbatches(shared) < count_microbatches(slots) else slots
    separate, rows = layout.unpacked, sum(len(sequences) for sequences in lengths)
    if not rows or separate is None or max(len(sequences) for sequences in lengths) > separate.rows_per_microbatch:
        return layout, slots
    # A lower bound: whole rollouts may need a few microbatches more.
    if layout.cost(count_microbatches(slots)) <= separate.cost(-(-rows // separate.rows_per_microbatch)):
        return layout, slots
    return separate, pack_sequences(lengths, separate, ids)


def pack_shared_prompts(
    lengths: Sequence[Sequence[int]], prompts: Sequence[Sequence[Prompt]], layout: RowLayout
) -> tuple[tuple[Slot, ...], ...]:
    """Assign each sequence to a slot, with one copy of each prompt for as many of its sequences as a row can hold.

    A row contains a prompt, then the rest of each sequence that shares it. If they do not fit into one row, each row
    has a copy of the prompt. With `whole_rollouts`, only rollouts of one sequence share prompts.

    Args:
        lengths: per rollout, the number of tokens of each sequence, as for `pack_sequences`.
        prompts: per rollout, the prompt of each sequence, shorter than the sequence.
        layout: shape of a microbatch.

    Returns:
        Per rollout, the slot of each sequence.

    Raises:
        ValueError: as for `pack_sequences`.

    >>> layout = RowLayout(row_length=10, rows_per_microbatch=1, packed=True)
    >>> slots = pack_shared_prompts([[6], [7]], [[Prompt(b"abcd", 4)], [Prompt(b"abcd", 4)]], layout)
    >>> [(slot.prompt_start, slot.prompt_length, slot.start, slot.length) for (slot,) in slots]
    [(0, 4, 7, 2), (0, 4, 4, 3)]
    """
    sharing: dict[Prompt, list[tuple[int, int]]] = defaultdict(list)
    units: list[_Unit] = []
    for rollout, own in enumerate(lengths):
        sequences = [(rollout, index) for index in range(len(own))]
        if layout.whole_rollouts and len(own) > 1:
            units.append(_Unit(0, tuple(sequences), own))
            continue
        for sequence, length, prompt in zip(sequences, own, prompts[rollout], strict=True):
            if prompt.length:
                sharing[prompt].append(sequence)
            else:
                units.append(_Unit(0, (sequence,), (length,)))
    for prompt, sequences in sharing.items():
        units += _split_over_rows(prompt.length, sequences, lengths, layout.row_length)
    # Equal sums must not be ordered by rollout, because the order of rollouts does not affect the packing.
    units.sort(key=lambda unit: (unit.prompt_length, sorted(unit.lengths)))
    by_unit = pack_sequences([unit.spaces for unit in units], dataclasses.replace(layout, whole_rollouts=True))
    by_sequence = {
        sequence: slot
        for unit, slots in zip(units, by_unit, strict=True)
        for sequence, slot in zip(unit.sequences, unit.place(slots), strict=True)
    }
    return tuple(tuple(by_sequence[rollout, index] for index in range(len(own))) for rollout, own in enumerate(lengths))


class _Unit(NamedTuple):
    """Sequences that are placed together: in one row with a shared prompt, or the sequences of a rollout."""

    prompt_length: int
    """Tokens of the shared prompt; 0 without one."""
    sequences: tuple[tuple[int, int], ...]
    """Rollout and index of each sequence."""
    lengths: Sequence[int]
    """Tokens of each sequence, without the shared prompt."""

    @property
    def spaces(self) -> Sequence[int]:
        """Number of positions of each space that the unit needs."""
        return (self.prompt_length + sum(self.lengths),) if self.prompt_length else self.lengths

    def place(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Return the slot of each sequence, for slots of the unit's spaces."""
        if not self.prompt_length:
            return slots
        (slot,) = slots
        starts = itertools.accumulate(self.lengths, initial=slot.start + self.prompt_length)
        return [
            slot._replace(start=start, length=length, prompt_start=slot.start, prompt_length=self.prompt_length)
            for start, length in zip(starts, self.lengths, strict=False)
        ]


def _split_over_rows(
    prompt_length: int, sequences: Sequence[tuple[int, int]], lengths: Sequence[Sequence[int]], row_length: int
) -> list[_Unit]:
    """Distribute the sequences of a prompt over as few rows as first-fit decreasing finds."""
    rest = [lengths[rollout][index] - prompt_length for rollout, index in sequences]
    slots = pack_sequences([[length] for length in rest], RowLayout(row_length - prompt_length, 1, packed=True))
    rows: dict[int, list[tuple[tuple[int, int], int]]] = defaultdict(list)
    for (slot,), sequence, length in sorted(zip(slots, sequences, rest, strict=True)):
        rows[slot.microbatch_index].append((sequence, length))
    units = []
    for row in rows.values():
        in_row, own = zip(*row, strict=True)
        # A single sequence has nothing to share.
        units.append(_Unit(prompt_length, in_row, own) if len(row) > 1 else _Unit(0, in_row, (prompt_length + own[0],)))
    return units


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
        return Slot(microbatch_index, row, start, length)
