# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sequence packing: the microbatch, row and start position of each sequence of a batch.

All microbatches of a run have one fixed shape, so a run compiles once regardless of the number of sequences per step.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64


class GroupRow(NamedTuple):
    """Parts of a row that holds a prompt once for several sequences: the prompt, then the rest of each of them.

    The model does not compute the position of the last token of a sequence: it predicts no other token.
    """

    prompt_length: int
    """Positions of the prompt."""
    answers: int
    """Sequences that share it."""
    answer_length: int
    """Positions of the rest of each sequence that the model computes, one less than its tokens."""

    @property
    def longest(self) -> int:
        """Positions of the longest sequence that has a place in the row."""
        return self.prompt_length + self.answer_length

    @property
    def row_length(self) -> int:
        """Positions of the row that the model computes.

        >>> GroupRow(prompt_length=4, answers=2, answer_length=3).row_length
        10
        """
        return self.prompt_length + self.answers * self.answer_length

    @property
    def tokens(self) -> int:
        """Tokens of the row.

        >>> GroupRow(prompt_length=4, answers=2, answer_length=3).tokens
        12
        """
        return self.prompt_length + self.answers * self.answer_tokens

    @property
    def answer_tokens(self) -> int:
        """Tokens of the rest of each sequence; the model does not compute the position of the last one."""
        return self.answer_length + 1

    @property
    def attention_pairs(self) -> float:
        """Pairs of a query and a key before it: the prompt attends to itself, each answer to the prompt and itself.

        >>> GroupRow(prompt_length=4, answers=2, answer_length=3).attention_pairs
        41.0
        """
        prompt, answers, answer = self
        return prompt**2 / 2 + answers * answer * (prompt + answer / 2)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Shape of the microbatches of a batch."""

    row_length: int
    """Positions per row that the model computes."""
    rows_per_microbatch: int
    """Rows per microbatch."""
    packed: bool
    """Whether several sequences may share a row; if False, each sequence has a separate row."""
    whole_rollouts: bool = True
    """Whether all sequences of a rollout must be in one microbatch, as required by ratios of whole rollouts."""
    group: GroupRow | None = None
    """Parts of a row whose sequences share their prompt; None for rows without shared prompts."""
    row_cost: float = 0.0
    """Relative cost of one row, to compare layouts."""
    alternatives: tuple["RowLayout", ...] = ()
    """Layouts of batches that cost less in them."""

    def __post_init__(self) -> None:
        for name in ("row_length", "rows_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"RowLayout.{name} is {getattr(self, name)}; it must be at least 1")
        if self.group is not None and self.group.row_length != self.row_length:
            raise ValueError(
                f"RowLayout.row_length is {self.row_length}, but its group has {self.group.row_length} positions; "
                "make them equal"
            )

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a row has room for: as many as positions, except with a group."""
        return self.row_length if self.group is None else self.group.tokens

    @property
    def attended(self) -> float:
        """Keys before a query of a row, on average."""
        return self.row_length / 2 if self.group is None else self.group.attention_pairs / self.row_length

    def microbatches(self, rollouts: int) -> int:
        """Return the number of microbatches of rollouts of one sequence each, if no two of them share a row.

        Rows with groups are counted as full, because a batch that fills them badly costs less in another layout.

        >>> RowLayout(row_length=8, rows_per_microbatch=4, packed=True).microbatches(9)
        3
        """
        rows = rollouts if self.group is None else -(-rollouts // self.group.answers)
        microbatches = -(-rows // self.rows_per_microbatch)
        return max([microbatches, *(layout.microbatches(rollouts) for layout in self.alternatives)])

    def cost(self, microbatches: int) -> float:
        """Return the cost of a number of microbatches, in units of `row_cost`."""
        return microbatches * self.rows_per_microbatch * self.row_cost


class Slot(NamedTuple):
    """Location of one sequence in the microbatches of a batch.

    The first `prompt_length` tokens are at the start of the row, where other sequences have theirs too. The other
    tokens are at `start`.
    """

    microbatch_index: int
    """Index of the microbatch."""
    row: int
    """Row of the microbatch."""
    start: int
    """Position of the first token after the shared prompt."""
    length: int
    """Number of tokens after the shared prompt."""
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
    _check_lengths(names, lengths, layout)
    several = [index for index, of_rollout in enumerate(lengths) if layout.whole_rollouts and len(of_rollout) > 1]
    # It depends on lengths only, so the order of rollouts does not affect the packing.
    several.sort(key=lambda index: (-sum(lengths[index]), sorted(-length for length in lengths[index])))
    in_several = set(several)
    single = [length for index, of_rollout in enumerate(lengths) if index not in in_several for length in of_rollout]
    rows = _FreeRows(layout, capacity=len(several) + -(-len(single) // layout.rows_per_microbatch))
    slots = {index: rows.place_rollout(names[index], lengths[index]) for index in several}
    placed = iter(rows.place_single(single))
    return tuple(
        slots.get(index) or tuple(next(placed) for _ in of_rollout) for index, of_rollout in enumerate(lengths)
    )


def choose_layout(
    lengths: Sequence[Sequence[int]],
    layout: RowLayout,
    ids: Sequence[str] | None = None,
    prompts: Sequence[Sequence[Prompt]] | None = None,
) -> tuple[RowLayout, tuple[tuple[Slot, ...], ...]]:
    """Pack a batch in the layout in which it costs least.

    Depends on the lengths and prompts only.

    Args:
        lengths: per rollout, the number of tokens of each sequence.
        layout: layout that can hold any batch; its alternatives are the other candidates.
        ids: rollout ids for error messages; indices by default.
        prompts: per rollout, the prompt of each sequence; required by layouts with groups.

    Returns:
        The chosen layout, and per rollout the slot of each sequence.

    Raises:
        ValueError: as for `pack_sequences`.

    >>> separate = RowLayout(row_length=6, rows_per_microbatch=1, packed=False, row_cost=6.0)
    >>> layout = RowLayout(row_length=8, rows_per_microbatch=1, packed=True, row_cost=9.0, alternatives=(separate,))
    >>> [choose_layout([[n], [n], [n]], layout)[0].packed for n in (2, 4, 6)]
    [True, True, False]
    """
    slots = pack_sequences(lengths, layout, ids)
    cost = layout.cost(count_microbatches(slots))
    for other in layout.alternatives if any(lengths) else ():
        found = _pack_alternative(lengths, other, ids, prompts)
        if found is not None and (found_cost := other.cost(count_microbatches(found))) < cost:
            layout, slots, cost = other, found, found_cost
    return layout, slots


def _pack_alternative(
    lengths: Sequence[Sequence[int]],
    layout: RowLayout,
    ids: Sequence[str] | None,
    prompts: Sequence[Sequence[Prompt]] | None,
) -> tuple[tuple[Slot, ...], ...] | None:
    """Pack a batch in an alternative layout; None if it does not fit."""
    if layout.group is not None:
        return None if prompts is None else pack_groups(lengths, prompts, layout)
    fits = max(len(of_rollout) for of_rollout in lengths) <= layout.rows_per_microbatch
    return pack_sequences(lengths, layout, ids) if fits else None


def pack_groups(
    lengths: Sequence[Sequence[int]], prompts: Sequence[Sequence[Prompt]], layout: RowLayout
) -> tuple[tuple[Slot, ...], ...] | None:
    """Assign each sequence to a slot in rows that hold one prompt and the rest of several sequences.

    Rows do not depend on the order of the rollouts, apart from sequences of equal length and prompt. A prompt with more
    sequences than a row can hold is in several rows. The end of a prompt that is longer than its place in the row is
    repeated in each answer.

    Args:
        lengths: per rollout, the number of tokens of each sequence, as for `pack_sequences`.
        prompts: per rollout, the prompt of each sequence.
        layout: shape of a microbatch, with a group.

    Returns:
        Per rollout, the slot of each sequence; None if a sequence does not fit, or if a rollout has several although
        `whole_rollouts` is set.

    >>> layout = RowLayout(row_length=10, rows_per_microbatch=1, packed=True, group=GroupRow(4, 2, 3))
    >>> slots = pack_groups([[6], [7]], [[Prompt(b"abcd", 4)], [Prompt(b"abcd", 4)]], layout)
    >>> [(slot.prompt_length, slot.start, slot.length) for (slot,) in slots]
    [(4, 8, 2), (4, 4, 3)]
    """
    group = layout.group
    if group is None or (layout.whole_rollouts and any(len(of_rollout) > 1 for of_rollout in lengths)):
        return None
    sharing: dict[Prompt, list[tuple[int, int, int]]] = defaultdict(list)
    for rollout, (of_rollout, prompts_of_rollout) in enumerate(zip(lengths, prompts, strict=True)):
        for index, (length, prompt) in enumerate(zip(of_rollout, prompts_of_rollout, strict=True)):
            if length - min(prompt.length, group.prompt_length) > group.answer_tokens:
                return None
            sharing[prompt].append((-length, rollout, index))
    slots = [[Slot(0, 0, 0, 0)] * len(of_rollout) for of_rollout in lengths]
    rows = 0
    for prompt in sorted(sharing):
        shared = min(prompt.length, group.prompt_length)
        for number, (negative_length, rollout, index) in enumerate(sorted(sharing[prompt])):
            row, place = divmod(number, group.answers)
            start = group.prompt_length + place * group.answer_tokens
            row = divmod(rows + row, layout.rows_per_microbatch)
            slots[rollout][index] = Slot(*row, start, -negative_length - shared, shared)
        rows += -(-len(sharing[prompt]) // group.answers)
    return tuple(map(tuple, slots))


def count_microbatches(slots: Sequence[Sequence[Slot]]) -> int:
    """Count the microbatches of a layout. At least 1, because a step without sequences still runs the model."""
    return 1 + max([slot.microbatch_index for sequences in slots for slot in sequences], default=0)


def _check_lengths(names: Sequence[str], lengths: Sequence[Sequence[int]], layout: RowLayout) -> None:
    for name, sequences in zip(names, lengths, strict=True):
        for length in sequences:
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

    def place_rollout(self, name: str, lengths: Sequence[int]) -> tuple[Slot, ...]:
        """Reserve space for all sequences of a rollout in the first microbatch, and its first rows, with enough."""
        needed = [length if self._layout.packed else self._layout.row_length for length in lengths]
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

    def _reserve(self, microbatch_index: int, row: int, length: int, space: int) -> Slot:
        self._microbatches = max(self._microbatches, microbatch_index + 1)
        start = self._layout.row_length - int(self._free[microbatch_index, row])
        self._free[microbatch_index, row] -= space
        return Slot(microbatch_index, row, start, length)

    def place_single(self, lengths: Sequence[int]) -> list[Slot]:
        """Reserve space for sequences, longest first, each in the first row with enough; call it last."""
        row_length, free = self._layout.row_length, self._free.reshape(-1)
        needed = np.array(lengths, np.int64) if self._layout.packed else np.full(len(lengths), row_length)
        rows, starts = np.empty_like(needed), np.empty_like(needed)
        order = np.argsort(-np.array(lengths, np.int64), kind="stable")
        used = self._microbatches * self._layout.rows_per_microbatch
        sizes, counts = np.unique(needed, return_counts=True)
        for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
            # Sequences of one size fill one row after another, and at last empty rows.
            room = free[: used - (-count // (row_length // size))] // size
            placed, order = order[:count], order[count:]
            row = np.repeat(np.arange(len(room)), room)[:count]
            number = np.arange(count) - np.searchsorted(row, row)
            rows[placed], starts[placed] = row, row_length - free[row] + number * size
            free[: len(room)] -= np.bincount(row, minlength=len(room)) * size
            used = max(used, int(row[-1]) + 1)
        microbatches, rows = np.divmod(rows, self._layout.rows_per_microbatch)
        return list(map(Slot, microbatches.tolist(), rows.tolist(), starts.tolist(), lengths))
