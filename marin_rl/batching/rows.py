# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The shapes of batch rows: of the batches of a run, of a server's calls and of a scorer.

All are chosen here, from the sizes of sequences, the attention kernel and the devices.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from levanter.models.lm_model import LmConfig

from marin_rl.batching.attention_kernel import AttentionKernel, attention_kernel
from marin_rl.batching.packing import (
    GroupRow,
    Prompt,
    RowLayout,
    Slot,
    count_microbatches,
    pack_groups,
    pack_sequences,
)
from marin_rl.batching.row_sizes import TOKENS_PER_MICROBATCH, RowSizes
from marin_rl.utils.devices.setup import platform_of
from marin_rl.utils.devices.trainer_config import TrainerConfig

SHORTEST_ROW = 128
"""Positions of the shortest rows of a server's calls without shared prompts."""


class GroupSizes(NamedTuple):
    """Sizes of the groups of a step whose sequences share a prompt."""

    prompts: int
    """Groups of a step."""
    group_size: int
    """Sequences of a group."""
    max_new_tokens: int
    """Tokens of the rest of a sequence after its prompt."""


class Placed(NamedTuple):
    """Some sequences of a call, in microbatches of one shape."""

    indices: list[int]
    """Indices of the sequences."""
    layout: RowLayout
    """Shape of a microbatch."""
    slots: list[Slot]
    """Place of each of them. With a group, a sequence has one token more, its last target, which is not computed."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Chooses the rows of batches of a model."""

    kernel: AttentionKernel
    """Attention kernel."""
    model: LmConfig | None
    """The architecture; None if it is not known."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    devices: int
    """Number of data-parallel devices."""

    @classmethod
    def of(cls, model: LmConfig | None, trainer: TrainerConfig, context_shards: int = 1) -> "Rows":
        """Make it for a model on the devices of `trainer`, as returned by `start_devices`."""
        platform = platform_of(trainer)
        return cls(attention_kernel(model, platform, context_shards), model, platform, trainer.data_axis_size)

    def layout(
        self,
        row_length: int,
        rows: int,
        *,
        packed: bool = True,
        whole_rollouts: bool = True,
        group: GroupRow | None = None,
    ) -> RowLayout:
        """Return the layout of microbatches of `rows` rows, with its cost."""
        cost = self.kernel.row_cost(row_length, 1024 if self.model is None else self.model.Embed.size, group)
        return RowLayout(row_length, rows, packed, whole_rollouts=whole_rollouts, group=group, row_cost=cost)

    def of_run(
        self, sizes: RowSizes, rows: int, own_rows: int, groups: GroupSizes | None = None, *, whole_rollouts: bool
    ) -> RowLayout:
        """Return the layout of all batches of a run, with its alternatives.

        Args:
            sizes: sizes of the sequences.
            rows: rows of a microbatch, unless the layout is an alternative.
            own_rows: configured rows of a microbatch on each device, for the memory of a device; 0 for the default.
                Rows of other lengths then have no more positions.
            groups: sizes of groups that share prompts; None if they do not.
            whole_rollouts: whether all sequences of a rollout must be in one microbatch.

        Raises:
            ValueError: if the attention kernel does not support the configured length of a row, or a microbatch has no
                room for an item of the batch.
        """
        packed = sizes.packing is not False
        layout = self.layout(sizes.positions(self.kernel), rows, packed=packed, whole_rollouts=whole_rollouts)
        if rows * (layout.row_length // sizes.max_length) < sizes.sequences_per_item:
            raise ValueError(
                f"trainer.per_device_parallelism is {own_rows}, so a microbatch is a row of {layout.row_length} "
                "positions, but both answers of a pair must fit into one; set at least 2"
            )
        others = []
        separate = sizes._replace(packing=False)
        if sizes.packing is None and (length := separate.positions(self.kernel)) != layout.row_length:
            rows = (own_rows or separate.rows_per_device(self.platform, self.devices)) * self.devices
            others.append(self.layout(length, rows, packed=False, whole_rollouts=whole_rollouts))
        if groups is not None and packed and sizes.row_length is None:
            most = own_rows * layout.row_length
            if (group := self._group_row(sizes, groups, most or TOKENS_PER_MICROBATCH[self.platform])) is not None:
                rows = (most // group.row_length if own_rows else self._group_rows(groups, group)) * self.devices
                others.append(self.layout(group.row_length, rows, whole_rollouts=whole_rollouts, group=group))
        return dataclasses.replace(layout, alternatives=tuple(others))

    def _group_row(self, sizes: RowSizes, groups: GroupSizes, most_tokens: int) -> GroupRow | None:
        """Return the row of a prompt and the answers of its group, or None if at most one fits into a microbatch.

        The answers are split evenly over as few rows as possible. The part of each has `max_new_tokens` positions: that
        of the prompt's last token, which predicts its first one, and those of all its tokens but the last.
        `most_tokens` is the number of positions of a microbatch on each device.
        """
        longest = sizes.max_length - groups.max_new_tokens - 1
        if longest < 1 or not self.kernel.supports_shared_prompts(self.model):
            return None
        if (places := self.kernel.fit_group(longest, groups.max_new_tokens)) is None:
            return None
        prompt, answer = places
        most = (most_tokens - prompt) // answer
        if min(most, groups.group_size) < 2:
            return None
        row = GroupRow(prompt, -(-groups.group_size // -(-groups.group_size // most)), answer)
        return row if self.kernel.supports_shared_prompts(self.model, row) else None

    def _group_rows(self, groups: GroupSizes, group: GroupRow) -> int:
        """Return the default rows with groups per microbatch on each device.

        They have at most `TOKENS_PER_MICROBATCH` tokens on an accelerator, whose memory is limited, and at least as
        many on a CPU.
        """
        tokens = TOKENS_PER_MICROBATCH[self.platform]
        most = -(-tokens // group.row_length) if self.platform == "cpu" else tokens // group.row_length
        rows = -(-groups.prompts * -(-groups.group_size // group.answers) // self.devices)
        return -(-rows // -(-rows // most))

    def of_scores(self, max_length: int, tokens: int) -> RowLayout:
        """Return the layout of sequences of any number: of rows with at least `tokens` positions on each device."""
        length = self.kernel.fit(max_length)
        return self.layout(length, -(-tokens // length) * self.devices)

    def of_call(self, lengths: Sequence[int], prompts: Sequence[Prompt], longest: int) -> list[Placed]:
        """Place the sequences of a call, at least one, in microbatches of few shapes whatever the calls are.

        Sequences with a common beginning share one copy of it in a row, if that costs less. It depends on the arguments
        only, so that the same call has the same results.

        Args:
            lengths: number of tokens of each sequence.
            prompts: beginning of each, as from `find_prompts`.
            longest: maximum number of tokens of a sequence in any call.
        """
        longest = self.kernel.fit(longest)
        whole = [self._place_whole(lengths, range(len(lengths)), longest)]
        sharing = {index: prompt for index, prompt in enumerate(prompts) if prompt.length}
        if not sharing or (shared := self._place_groups(lengths, sharing, longest)) is None:
            return whole
        alone = [index for index in range(len(lengths)) if index not in sharing]
        parts = [shared, self._place_whole(lengths, alone, longest)] if alone else [shared]
        return min(whole, parts, key=lambda placed: sum(map(_cost, placed)))

    def _place_whole(self, lengths: Sequence[int], indices: Sequence[int], longest: int) -> Placed:
        """Place sequences in rows of 128, 256, 512, … positions."""
        own = [[lengths[index]] for index in indices]
        length = self.kernel.fit(row_length(max(own)[0], longest))
        layout = self._few_rows(length, count_microbatches(pack_sequences(own, RowLayout(length, 1, packed=True))))
        return _placed(indices, layout, pack_sequences(own, layout))

    def _place_groups(self, lengths: Sequence[int], prompts: Mapping[int, Prompt], longest: int) -> Placed | None:
        """Place sequences that share prompts, by index; None if the kernel does not support the rows."""
        rests = [lengths[index] - prompt.length for index, prompt in prompts.items()]
        layouts = self._group_layouts(collections.Counter(prompts.values()), max(1, *rests), longest)
        if not layouts:
            return None
        layout = min(layouts, key=lambda one: one[0])[1]
        # The model does not compute the last token of a sequence, here the last target.
        slots = pack_groups([[lengths[index] + 1] for index in prompts], [[one] for one in prompts.values()], layout)
        assert slots is not None
        return _placed(list(prompts), layout, slots)

    def _group_layouts(self, counts: Mapping[Prompt, int], rest: int, longest: int) -> list[tuple[float, RowLayout]]:
        """Return cost and shape of the possible rows for prompts and their numbers of sequences, with `rest` positions.

        `longest` is the number of positions of the longest row in any call.
        """
        most = max(prompt.length for prompt in counts)
        places = self.kernel.fit_group(round_size(most, 8, 8), round_size(rest, 2, 2))
        found = []
        for answers in sorted({round_size(count, 2) for count in range(2, max(counts.values()) + 1)}, reverse=True):
            group = None if places is None else GroupRow(places[0], answers, places[1])
            if group is None or group.row_length > max(TOKENS_PER_MICROBATCH[self.platform], longest):
                continue
            if self.kernel.supports_shared_prompts(self.model, group):
                rows = sum(-(-count // answers) for count in counts.values())
                layout = self._few_rows(group.row_length, rows, group)
                found.append((layout.cost(-(-rows // layout.rows_per_microbatch)), layout))
        return found

    def _few_rows(self, length: int, rows: int, group: GroupRow | None = None) -> RowLayout:
        """Return microbatches for a number of rows: as few as the limit allows, of 1, 2, 4, … rows, or the limit."""
        most = max(TOKENS_PER_MICROBATCH[self.platform] // length, 1)
        of_device = -(-rows // self.devices)
        each = -(-of_device // -(-of_device // most))
        own = min(1 << (each - 1).bit_length(), most)
        return self.layout(length, own * self.devices, group=group)


def row_layout(
    model: LmConfig,
    trainer: TrainerConfig,
    max_length: int,
    sequences: int,
    group_size: int = 1,
    max_new_tokens: int = 1,
    sequences_per_item: int = 1,
) -> RowLayout:
    """Return the layout of batches for a model, with its alternatives, as the commands choose it by default.

    Args:
        model: the architecture.
        trainer: as returned by `start_devices`.
        max_length: maximum tokens of a sequence.
        sequences: number of sequences of a batch.
        group_size: number of them that have the same prompt.
        max_new_tokens: maximum tokens after the prompt, if `group_size` is above 1.
        sequences_per_item: number of sequences that must be in one microbatch, such as the answers of a pair.
    """
    rows = Rows.of(model, trainer)
    sizes = RowSizes("", max_length, sequences, packing=None, sequences_per_item=sequences_per_item)
    groups = GroupSizes(sequences // group_size, group_size, max_new_tokens) if group_size > 1 else None
    each = sizes.rows_per_device(rows.platform, rows.devices) * rows.devices
    return rows.of_run(sizes, each, 0, groups, whole_rollouts=sequences_per_item > 1)


def row_length(longest: int, most: int) -> int:
    """Return the smallest of `SHORTEST_ROW`, twice, four times, … it that is at least `longest`, but at most `most`.

    >>> [row_length(n, 1000) for n in (5, 129, 600)]
    [128, 256, 1000]
    """
    length = SHORTEST_ROW
    while length < longest:
        length *= 2
    return min(length, most)


def round_size(length: int, steps: int, unit: int = 1) -> int:
    """Round up to one of `steps` sizes between two powers of two, and to a multiple of `unit`, so that sizes are few.

    >>> [round_size(length, 8, 8) for length in (6, 17, 69, 130)], [round_size(length, 2) for length in (5, 6, 7, 13)]
    ([8, 24, 72, 144], [6, 6, 8, 16])
    """
    multiple = max((1 << (length - 1).bit_length()) // 2 // steps, unit)
    return -(-length // multiple) * multiple


def find_prompts(starts: Sequence[Int64[np.ndarray, "_ values"]]) -> list[Prompt]:
    """Return the beginning that each sequence shares with others; of length 0 if there is none.

    Of the sequences in the order of their beginnings, neighbours share one such that most positions are saved: the
    samples of a prompt, and not all sequences that begin with the same few tokens. `starts` has the values of each
    position, of every sequence up to the first one that cannot be shared.
    """
    order = sorted(range(len(starts)), key=lambda index: starts[index].tobytes())
    common = [_common_length(starts[left], starts[right]) for left, right in itertools.pairwise(order)]
    prompts = [Prompt(b"", 0)] * len(starts)
    for run in _split(common).runs:
        length = min(common[run[0] : run[-1]], default=0)
        shared = Prompt(starts[order[run[0]]][:length].tobytes(), length)
        for place in run:
            prompts[order[place]] = shared
    return prompts


class _Split(NamedTuple):
    """Neighbours, as runs that share a beginning."""

    runs: list[range]
    saved: int
    """Positions that need not be computed."""


def _split(common: Sequence[int]) -> _Split:
    """Split sequences, which have `common` positions in common with the next one, such that most positions are saved.

    Joins neighbours in the order of what they have in common. So what a run shares is that of its last two parts.
    """
    parts = {place: _Split([range(place, place + 1)], 0) for place in range(len(common) + 1)}
    first = list(parts)
    for place in sorted(range(len(common)), key=lambda place: -common[place]):
        left, right = parts[first[place]], parts.pop(place + 1)
        run = range(left.runs[0].start, right.runs[-1].stop)
        shared = _Split([run], common[place] * (len(run) - 1))
        apart = _Split(left.runs + right.runs, left.saved + right.saved)
        parts[run.start] = max(shared, apart, key=lambda split: split.saved)
        first[run.stop - 1] = run.start
    return parts[0]


def _common_length(left: Int64[np.ndarray, "left values"], right: Int64[np.ndarray, "right values"]) -> int:
    length = min(len(left), len(right))
    return int(np.argmax(np.append((left[:length] != right[:length]).any(axis=1), True)))


def _placed(indices: Sequence[int], layout: RowLayout, slots: Sequence[Sequence[Slot]]) -> Placed:
    return Placed(list(indices), layout, [slot for (slot,) in slots])


def _cost(placed: Placed) -> float:
    return placed.layout.cost(count_microbatches([placed.slots]))
