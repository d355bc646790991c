# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.batching.packing import (
    GroupRow,
    Prompt,
    RowLayout,
    Slot,
    choose_layout,
    count_microbatches,
    pack_groups,
    pack_sequences,
)

Lengths = list[list[int]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Lengths, RowLayout]:
    """Valid rollouts: at most as many sequences as rows, or (packed) short sequences that share a row."""
    layout = RowLayout(draw(st.integers(1, 24)), draw(st.integers(1, 5)), draw(st.booleans()))
    lengths: Lengths = []
    for _ in range(draw(st.integers(0, 12))):
        if layout.packed and draw(st.booleans()):
            free, own = layout.row_length, []
            while free and len(own) < 8:
                own.append(draw(st.integers(1, free)))
                free -= own[-1]
        else:
            own = draw(st.lists(st.integers(1, layout.row_length), max_size=layout.rows_per_microbatch))
        lengths.append(own)
    return lengths, layout


def rows_of(slots: Sequence[Sequence[Slot]]) -> dict[tuple[int, int], list[Slot]]:
    """The slots of each used row, from left to right."""
    rows: dict[tuple[int, int], list[Slot]] = {}
    for slot in sorted(slot for own in slots for slot in own):
        rows.setdefault((slot.microbatch_index, slot.row), []).append(slot)
    return rows


def filling(slots: Sequence[Sequence[Slot]]) -> list[list[tuple[int, ...]]]:
    """Per microbatch, the lengths in each row, without the identity of the sequences."""
    by_microbatch: dict[int, list[tuple[int, ...]]] = {}
    for (microbatch_index, _), row in sorted(rows_of(slots).items()):
        by_microbatch.setdefault(microbatch_index, []).append(tuple(sorted(slot.length for slot in row)))
    return [sorted(rows) for rows in by_microbatch.values()]


@given(problems())
def test_sequences_are_complete_and_do_not_overlap(problem: tuple[Lengths, RowLayout]) -> None:
    lengths, layout = problem
    slots = pack_sequences(lengths, layout)
    assert [[slot.length for slot in own] for own in slots] == lengths
    taken = Counter(
        (slot.microbatch_index, slot.row, position)
        for own in slots
        for slot in own
        for position in range(slot.start, slot.start + slot.length)
    )
    assert set(taken.values()) <= {1}
    assert sum(taken.values()) == sum(map(sum, lengths))
    for _, row, position in taken:
        assert 0 <= row < layout.rows_per_microbatch
        assert 0 <= position < layout.row_length


@given(problems())
def test_rows_are_filled_from_the_left(problem: tuple[Lengths, RowLayout]) -> None:
    lengths, layout = problem
    for row in rows_of(pack_sequences(lengths, layout)).values():
        starts = np.cumsum([0, *(slot.length for slot in row)])[:-1]
        assert [slot.start for slot in row] == starts.tolist()
        assert layout.packed or len(row) == 1


@given(problems())
def test_each_rollout_is_in_one_microbatch_and_no_microbatch_is_empty(problem: tuple[Lengths, RowLayout]) -> None:
    lengths, layout = problem
    slots = pack_sequences(lengths, layout)
    for own in slots:
        assert len({slot.microbatch_index for slot in own}) <= 1
    used = {slot.microbatch_index for own in slots for slot in own}
    assert used == set(range(len(used)))
    assert count_microbatches(slots) == max(len(used), 1)


@given(problems(), st.randoms(use_true_random=False))
def test_packing_does_not_depend_on_rollout_order(problem, random) -> None:
    lengths, layout = problem
    order = list(range(len(lengths)))
    random.shuffle(order)
    expected = filling(pack_sequences(lengths, layout))
    assert filling(pack_sequences([lengths[index] for index in order], layout)) == expected
    assert pack_sequences(lengths, layout) == pack_sequences([list(own) for own in lengths], layout)


@given(st.lists(st.integers(1, 24), max_size=40), st.integers(1, 5))
def test_single_sequences_match_textbook_first_fit_decreasing(lengths: list[int], rows_per_microbatch: int) -> None:
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row, free in enumerate(room) if free >= length), len(room))
        room[row:] = [24, *room[row + 1 :]] if row == len(room) else room[row:]
        room[row] -= length
    slots = pack_sequences([[length] for length in lengths], RowLayout(24, rows_per_microbatch, packed=True))
    used = [sum(slot.length for slot in row) for _, row in sorted(rows_of(slots).items())]
    assert used == [24 - free for free in room]
    # Rows are opened in order, so only the last microbatch may have empty rows.
    assert count_microbatches(slots) == max(-(-len(room) // rows_per_microbatch), 1)


def place_by_hand(lengths: Lengths, layout: RowLayout) -> list[list[tuple[int, int]]]:
    """Try every microbatch and every row in order; per rollout, the microbatch and row of each sequence."""

    def priority(index: int) -> tuple[bool, int, list[int]]:
        own = lengths[index]
        return len(own) == 1, -sum(own), sorted(-length for length in own)

    order = sorted(range(len(lengths)), key=priority)
    microbatches: list[list[int]] = []
    places: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for index in order:
        own = lengths[index] if layout.packed else [layout.row_length] * len(lengths[index])
        for number in range(len(microbatches) + 1):
            free = [layout.row_length] * layout.rows_per_microbatch
            free = list(microbatches[number]) if number < len(microbatches) else free
            rows = [-1] * len(own)
            for sequence in sorted(range(len(own)), key=lambda i: -own[i]):
                rows[sequence] = next((row for row, left in enumerate(free) if left >= own[sequence]), -1)
                if rows[sequence] < 0:
                    break
                free[rows[sequence]] -= own[sequence]
            if own and min(rows) >= 0:
                microbatches[number:] = [free, *microbatches[number + 1 :]]
                places[index] = [(number, row) for row in rows]
                break
    return places


@given(problems())
def test_places_match_first_fit_by_hand(problem: tuple[Lengths, RowLayout]) -> None:
    lengths, layout = problem
    slots = pack_sequences(lengths, layout)
    assert [[(slot.microbatch_index, slot.row) for slot in own] for own in slots] == place_by_hand(lengths, layout)


@given(st.lists(st.integers(1, 24), max_size=40))
def test_no_two_rows_fit_into_one(lengths: list[int]) -> None:
    slots = pack_sequences([[length] for length in lengths], RowLayout(24, 1, packed=True))
    used = sorted(sum(slot.length for slot in row) for row in rows_of(slots).values())
    assert all(first + second > 24 for first, second in itertools.pairwise(used))


def log_normal_lengths(seed: int, sigma: float, *, count: int = 512, longest: int = 1024) -> list[list[int]]:
    """Lengths with a mean of a quarter of the maximum, truncated at the maximum like those of a sampler."""
    drawn = np.random.default_rng(seed).lognormal(0, sigma, count)
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if np.minimum(scale * drawn, longest).mean() < longest / 4 else (low, scale)
    return [[max(int(length), 1)] for length in np.minimum(low * drawn, longest)]


@pytest.mark.medium
@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_realistic_lengths_fill_at_least_95_percent(seed: int, sigma: float) -> None:
    lengths = log_normal_lengths(seed, sigma)
    tokens = sum(map(sum, lengths))
    assert tokens / 512 == pytest.approx(1024 / 4, rel=0.01)
    single = count_microbatches(pack_sequences(lengths, RowLayout(1024, 1, packed=True)))
    assert tokens / (single * 1024) >= 0.95
    unpacked = count_microbatches(pack_sequences(lengths, RowLayout(1024, 1, packed=False)))
    assert tokens / (unpacked * 1024) == pytest.approx(0.25, rel=0.01)
    for rows in (4, 8):  # only the last microbatch has empty rows
        assert count_microbatches(pack_sequences(lengths, RowLayout(1024, rows, packed=True))) == -(-single // rows)


@pytest.mark.parametrize("rows_per_microbatch", [4, 8])
def test_rollouts_of_several_sequences_use_few_microbatches(rows_per_microbatch: int) -> None:
    sequences = [length for (length,) in log_normal_lengths(0, 0.7)]
    lengths: Lengths = []
    while sequences:
        lengths.append([sequences.pop() for _ in range(min(len(lengths) % 4 + 1, len(sequences)))])
    slots = pack_sequences(lengths, RowLayout(1024, rows_per_microbatch, packed=True))
    minimum = -(-sum(map(sum, lengths)) // (1024 * rows_per_microbatch))
    assert count_microbatches(slots) <= minimum + 1


def test_ten_thousand_sequences() -> None:
    lengths = log_normal_lengths(0, 1.0, count=10_000)
    slots = pack_sequences(lengths, RowLayout(1024, 8, packed=True))
    assert sum(map(sum, lengths)) / (count_microbatches(slots) * 8 * 1024) >= 0.99


def test_worked_example() -> None:
    # The rollout of two sequences is placed first; 6 and 3 fit into its rows; 8 opens a microbatch, which 2 shares.
    lengths = [[2], [6], [4, 7], [8], [3]]
    slots = pack_sequences(lengths, RowLayout(row_length=10, rows_per_microbatch=2, packed=True))
    assert slots == (
        (Slot(1, 0, 8, 2),),
        (Slot(0, 1, 4, 6),),
        (Slot(0, 1, 0, 4), Slot(0, 0, 0, 7)),
        (Slot(1, 0, 0, 8),),
        (Slot(0, 0, 7, 3),),
    )


def test_unpacked_sequences_have_separate_rows() -> None:
    slots = pack_sequences([[3], [1], [2]], RowLayout(row_length=10, rows_per_microbatch=2, packed=False))
    assert [own[0][:3] for own in slots] == [(0, 0, 0), (1, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("lengths", [[], [[]], [[], []]])
def test_empty_batches_have_one_microbatch(lengths: Lengths) -> None:
    slots = pack_sequences(lengths, RowLayout(4, 2, packed=True))
    assert slots == ((),) * len(lengths)
    assert count_microbatches(slots) == 1


@pytest.mark.parametrize(
    ("lengths", "packed", "complaint"),
    [
        ([11], True, "a sequence of 11 tokens, which does not fit into rows of 10 positions"),
        ([11], False, "a sequence of 11 tokens, which does not fit into rows of 10 positions"),
        ([3, 0], True, "a sequence of 0 tokens; a sequence must have at least 1"),
        (
            [6, 7, 8],
            True,
            "3 sequences of 21 tokens in total, which need 3 rows of 10 positions, but a microbatch has 2",
        ),
        (
            [1, 2, 3],
            False,
            "3 sequences of 6 tokens in total, which need 3 rows of 10 positions, but a microbatch has 2",
        ),
    ],
)
def test_oversized_rollouts_raise_an_error_that_names_the_rollout(lengths, packed: bool, complaint: str) -> None:
    layout = RowLayout(10, 2, packed)
    with pytest.raises(ValueError, match=re.escape(f"rollout step-3/g/1 has {complaint}")):
        pack_sequences([[4], lengths], layout, ["step-3/g/0", "step-3/g/1"])
    with pytest.raises(ValueError, match="rollout 1 has"):
        pack_sequences([[4], lengths], layout)


def test_sequences_of_a_rollout_may_share_a_row() -> None:
    slots = pack_sequences([[1, 2, 8]], RowLayout(10, 2, packed=True))
    assert [slot.length for slot in slots[0]] == [1, 2, 8]


@pytest.mark.parametrize(("name", "shape"), [("row_length", (0, 1)), ("rows_per_microbatch", (1, 0))])
def test_empty_layouts_are_invalid(name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"RowLayout.{name} is 0"):
        RowLayout(*shape, packed=True)


SEPARATE = RowLayout(row_length=96, rows_per_microbatch=8, packed=False, whole_rollouts=False, row_cost=96 * 1.125)
GROUPS = RowLayout(543, 2, True, whole_rollouts=False, group=GroupRow(31, 8, 64), row_cost=543 * 1.12)
LAYOUT = RowLayout(128, 6, packed=True, whole_rollouts=False, row_cost=128 * 1.167, alternatives=(SEPARATE, GROUPS))


@pytest.mark.parametrize(
    ("lengths", "packed"), [([96] * 128, False), ([64] * 128, True), ([65] * 128, False), ([30] * 128, True)]
)
def test_the_cheaper_layout_is_chosen(lengths: list[int], packed: bool):
    layout, slots = choose_layout([[length] for length in lengths], LAYOUT)
    assert layout == (LAYOUT if packed else SEPARATE)
    assert slots == pack_sequences([[length] for length in lengths], layout)


def test_the_choice_does_not_depend_on_the_order_of_rollouts():
    lengths = np.random.default_rng(0).integers(40, 97, 100).tolist()
    chosen = {
        choose_layout([[length] for length in np.roll(lengths, shift).tolist()], LAYOUT)[0].packed for shift in range(5)
    }
    assert len(chosen) == 1


def test_a_rollout_with_more_sequences_than_unpacked_rows_is_packed():
    layout, _ = choose_layout([[96] * 9, [96] * 9], LAYOUT)
    assert layout == LAYOUT


def test_a_batch_of_no_rollouts_is_packed():
    assert choose_layout([], LAYOUT) == (LAYOUT, ())


def test_errors_name_the_rollout_in_both_layouts():
    with pytest.raises(ValueError, match="rollout r7 has a sequence of 129 tokens"):
        choose_layout([[129]], LAYOUT, ["r7"])


@st.composite
def group_problems(draw: st.DrawFn) -> tuple[Lengths, list[list[Prompt]], RowLayout]:
    """Sequences with one of four prompts, or with none, that fit into rows with groups."""
    group = GroupRow(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(2, 5)))
    layout = RowLayout(group.row_length, draw(st.integers(1, 3)), packed=True, whole_rollouts=False, group=group)
    pool = [Prompt(name, len(name)) for name in (b"", b"a", b"abc", b"abd", b"abcdef")]
    pool = [prompt for prompt in pool if prompt.length <= group.prompt_length + group.answer_length]
    lengths, prompts = [], []
    for _ in range(draw(st.integers(0, 10))):
        own = draw(st.lists(st.sampled_from(pool), max_size=3))
        prompts.append(own)
        most = [min(prompt.length, group.prompt_length) + group.answer_length + 1 for prompt in own]
        lengths.append([draw(st.integers(prompt.length + 1, n)) for prompt, n in zip(own, most, strict=True)])
    return lengths, prompts, layout


@given(group_problems())
def test_rows_of_groups_hold_one_prompt_and_aligned_answers(problem) -> None:
    lengths, prompts, layout = problem
    group, slots = layout.group, pack_groups(lengths, prompts, layout)
    assert group is not None
    assert slots is not None
    in_row: dict[tuple[int, int], Prompt] = {}
    starts = Counter()
    for own, own_lengths, own_prompts in zip(slots, lengths, prompts, strict=True):
        for slot, length, prompt in zip(own, own_lengths, own_prompts, strict=True):
            assert slot.length + slot.prompt_length == length
            assert slot.prompt_length == min(prompt.length, group.prompt_length)
            assert in_row.setdefault(slot[:2], prompt) == prompt
            assert 1 <= slot.length <= group.answer_length + 1
            assert slot.start in range(group.prompt_length, layout.tokens_per_row, group.answer_length + 1)
            assert slot.row < layout.rows_per_microbatch
            starts[slot[:3]] += 1
    assert set(starts.values()) <= {1}
    sharing = Counter(prompt for own in prompts for prompt in own)
    assert len(in_row) == sum(-(-count // group.answers) for count in sharing.values())
    assert count_microbatches(slots) == max(-(-len(in_row) // layout.rows_per_microbatch), 1)


@given(group_problems(), st.randoms(use_true_random=False))
def test_rows_of_groups_do_not_depend_on_rollout_order(problem, random) -> None:
    lengths, prompts, layout = problem
    order = list(range(len(lengths)))
    random.shuffle(order)
    expected = filling(pack_groups(lengths, prompts, layout))
    permuted = [[values[index] for index in order] for values in (lengths, prompts)]
    assert filling(pack_groups(*permuted, layout)) == expected


@pytest.mark.parametrize(
    ("lengths", "prompt", "whole_rollouts"),
    [([[6], [9]], Prompt(b"abcd", 4), True), ([[6], [4, 5]], Prompt(b"ab", 2), True), ([[5]], Prompt(b"", 0), False)],
    ids=["a long answer", "a rollout of two sequences", "a sequence without a prompt"],
)
def test_batches_that_do_not_fit_into_groups_are_packed(lengths: Lengths, prompt: Prompt, whole_rollouts: bool) -> None:
    groups = RowLayout(10, 1, packed=True, whole_rollouts=whole_rollouts, group=GroupRow(4, 2, 3))
    layout = RowLayout(12, 2, packed=True, whole_rollouts=whole_rollouts, row_cost=12.0, alternatives=(groups,))
    prompts = [[prompt] * len(own) for own in lengths]
    assert choose_layout(lengths, layout, prompts=prompts) == (layout, pack_sequences(lengths, layout))
    assert pack_groups(lengths, prompts, groups) is None


def test_a_row_must_be_as_long_as_its_group() -> None:
    with pytest.raises(ValueError, match=r"RowLayout\.row_length is 8, but its group has 10 positions"):
        RowLayout(8, 1, packed=True, group=GroupRow(4, 2, 3))


@pytest.mark.parametrize(
    ("length", "prompts", "prompt_length", "layout"),
    [(95, 16, 31, GROUPS), (40, 16, 31, LAYOUT), (95, 128, 31, SEPARATE), (95, 16, 20, SEPARATE)],
    ids=["long answers", "short answers", "different prompts", "answers that do not fit"],
)
def test_prompts_are_shared_if_that_costs_least(
    length: int, prompts: int, prompt_length: int, layout: RowLayout
) -> None:
    own = [[Prompt(bytes([index % prompts]), prompt_length)] for index in range(128)]
    chosen, slots = choose_layout([[length]] * 128, LAYOUT, prompts=own)
    assert chosen == layout
    assert any(slot.prompt_length for (slot,) in slots) == (layout is GROUPS)


def test_room_for_a_batch_in_any_layout() -> None:
    # 128 rows in microbatches of 6, 128 rows in those of 8, and 16 rows of 8 answers in those of 2.
    assert [layout.microbatches(128) for layout in (LAYOUT, SEPARATE, GROUPS)] == [22, 16, 8]
