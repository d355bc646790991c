# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The rows of the data of a call: data with a common beginning share one copy of it in a row, if that costs less.

A beginning is shared up to the first position that differs in its token or target, or that has a weight or an advantage
in any of the data. So it adds nothing to the loss, and its log-probs are those of each of the data.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64
from levanter.models.lm_model import LmConfig

from marin_rl.batching.packing import (
    GroupRow,
    Prompt,
    RowLayout,
    Slot,
    count_microbatches,
    pack_groups,
    pack_sequences,
)
from marin_rl.learner.attention_kernel import AttentionKernel
from marin_rl.serving.tinker.losses import LOSSES, TARGETS, Loss
from marin_rl.serving.tinker.records import Datum

SHORTEST_ROW = 128
"""Positions of the shortest rows without shared prompts."""


class Placed(NamedTuple):
    """Some data of a call, in microbatches of one shape."""

    indices: list[int]
    """Indices of the data."""
    layout: RowLayout
    """Shape of a microbatch."""
    slots: list[Slot]
    """Place of each of the data. With a group, a datum has one token more, its last target, which is not computed."""


def round_size(length: int, steps: int, unit: int = 1) -> int:
    """Round up to one of `steps` sizes between two powers of two, and to a multiple of `unit`, so that sizes are few.

    >>> [round_size(length, 8, 8) for length in (6, 17, 69, 130)], [round_size(length, 2) for length in (5, 6, 7, 13)]
    ([8, 24, 72, 144], [6, 6, 8, 16])
    """
    multiple = max((1 << (length - 1).bit_length()) // 2 // steps, unit)
    return -(-length // multiple) * multiple


def find_prompts(data: Sequence[Datum], loss_fn: str) -> list[Prompt]:
    """Return the beginning that each of the data shares with others; of length 0 if there is none.

    Of the data in the order of their beginnings, neighbours share one such that most positions are saved: the samples
    of a prompt, and not all data that begin with the same few tokens. All data have equal numbers of targets.
    """
    starts = [_without_loss(datum, LOSSES[loss_fn]) for datum in data]
    order = sorted(range(len(data)), key=lambda index: starts[index].tobytes())
    common = [_common_length(starts[left], starts[right]) for left, right in itertools.pairwise(order)]
    prompts = [Prompt(b"", 0)] * len(data)
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
    """Split data, which have `common` positions in common with the next one, such that most positions are saved.

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


def _without_loss(datum: Datum, loss: Loss) -> Int64[np.ndarray, "start values"]:
    """Return token and targets of each position before the first one with a term in the loss."""
    length = len(datum.tokens)
    if "beta" in loss.settings:
        # A penalty, which positions without advantage have, too.
        length = 0
    elif loss.factor in datum.inputs:
        with_loss = datum.inputs[loss.factor].reshape(length, -1).any(axis=1)
        length = int(np.argmax(np.append(with_loss, True)))
    targets = datum.inputs[TARGETS].reshape(len(datum.tokens), -1)
    return np.column_stack([datum.tokens, targets])[:length].astype(np.int64)


def _common_length(left: Int64[np.ndarray, "left values"], right: Int64[np.ndarray, "right values"]) -> int:
    length = min(len(left), len(right))
    return int(np.argmax(np.append((left[:length] != right[:length]).any(axis=1), True)))


class Rows:
    """Chooses the rows of data; depends on the data only, so that the same call has the same results."""

    def __init__(self, kernel: AttentionKernel, model: LmConfig, *, longest: int, tokens: int, shards: int) -> None:
        """Choose nothing yet.

        Args:
            kernel: attention kernel.
            model: the architecture.
            longest: maximum number of tokens of a datum.
            tokens: positions of a microbatch on each device, about.
            shards: number of data-parallel devices.
        """
        self._kernel, self._model, self._longest = kernel, model, kernel.fit(longest)
        self._tokens, self._shards = tokens, shards

    def place(self, data: Sequence[Datum], indices: Sequence[int], loss_fn: str) -> list[Placed]:
        """Place the data of `indices`, at least one, with equal numbers of targets."""
        prompts = find_prompts([data[index] for index in indices], loss_fn)
        sharing = {index: prompt for index, prompt in zip(indices, prompts, strict=True) if prompt.length}
        whole = [self._place_whole(data, indices)]
        if not sharing or (shared := self._place_groups(data, sharing)) is None:
            return whole
        alone = [index for index in indices if index not in sharing]
        parts = [shared, self._place_whole(data, alone)] if alone else [shared]
        return min(whole, parts, key=lambda placed: sum(map(_cost, placed)))

    def _place_whole(self, data: Sequence[Datum], indices: Sequence[int]) -> Placed:
        """Place data in rows of 128, 256, 512, … positions."""
        lengths = [[len(data[index].tokens)] for index in indices]
        length = self._kernel.fit(row_length(max(lengths)[0], self._longest))
        rows = pack_sequences(lengths, RowLayout(length, 1, packed=True))
        layout = self._layout(length, count_microbatches(rows))
        return _placed(indices, layout, pack_sequences(lengths, layout))

    def _place_groups(self, data: Sequence[Datum], prompts: Mapping[int, Prompt]) -> Placed | None:
        """Place data that share prompts, by index; None if the kernel does not support the rows."""
        rests = [len(data[index].tokens) - prompt.length for index, prompt in prompts.items()]
        layouts = self._group_layouts(collections.Counter(prompts.values()), max(1, *rests))
        if not layouts:
            return None
        layout = min(layouts, key=lambda one: one[0])[1]
        # The model does not compute the last token of a sequence, here the last target.
        lengths = [[len(data[index].tokens) + 1] for index in prompts]
        slots = pack_groups(lengths, [[prompt] for prompt in prompts.values()], layout)
        assert slots is not None
        return _placed(list(prompts), layout, slots)

    def _group_layouts(self, counts: Mapping[Prompt, int], rest: int) -> list[tuple[float, RowLayout]]:
        """Return cost and shape of the possible rows for prompts and their numbers of data, with `rest` positions."""
        longest = max(prompt.length for prompt in counts)
        places = self._kernel.fit_group(round_size(longest, 8, 8), round_size(rest, 2, 2))
        found = []
        for answers in sorted({round_size(count, 2) for count in range(2, max(counts.values()) + 1)}, reverse=True):
            group = None if places is None else GroupRow(places[0], answers, places[1])
            if group is None or group.row_length > max(self._tokens, self._longest):
                continue
            if self._kernel.supports_shared_prompts(self._model, group):
                rows = sum(-(-count // answers) for count in counts.values())
                layout = self._layout(group.row_length, rows, group)
                found.append((layout.cost(-(-rows // layout.rows_per_microbatch)), layout))
        return found

    def _layout(self, length: int, rows: int, group: GroupRow | None = None) -> RowLayout:
        """Return microbatches for a number of rows: as few as the limit allows, of 1, 2, 4, … rows, or the limit."""
        most = max(self._tokens // length, 1)
        of_device = -(-rows // self._shards)
        each = -(-of_device // -(-of_device // most))
        own = min(1 << (each - 1).bit_length(), most)
        cost = self._kernel.row_cost(length, self._model.Embed.size, group)
        return RowLayout(length, own * self._shards, packed=True, group=group, row_cost=cost)


def row_length(longest: int, most: int) -> int:
    """Return the smallest of `SHORTEST_ROW`, twice, four times, … it that is at least `longest`, but at most `most`.

    >>> [row_length(n, 1000) for n in (5, 129, 600)]
    [128, 256, 1000]
    """
    length = SHORTEST_ROW
    while length < longest:
        length *= 2
    return min(length, most)


def _placed(indices: Sequence[int], layout: RowLayout, slots: Sequence[Sequence[Slot]]) -> Placed:
    return Placed(list(indices), layout, [slot for (slot,) in slots])


def _cost(placed: Placed) -> float:
    return placed.layout.cost(count_microbatches([placed.slots]))
