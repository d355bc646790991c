# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Places of sequences; tests/batching/test_rl_example.py compares whole batches with a layout by hand."""

import numpy as np

from marin_rl.batching.packing import Slot
from marin_rl.batching.places import find_places

SHAPE = (2, 3, 4)
SLOTS = [
    [Slot(0, 2, 1, 2)],
    [Slot(1, 0, 0, 3), Slot(0, 0, 0, 4)],
]
"""Two rollouts; the second has two sequences."""
ROW_LENGTHS = [2, 4]


def test_sequences_are_in_the_order_of_their_positions():
    places = find_places(SLOTS, SHAPE, ROW_LENGTHS)
    assert places.start.tolist() == [0, 9, 12]
    assert places.owner.tolist() == [1, 0, 1]
    assert places.source.tolist() == [6, 0, 2]
    assert places.number.tolist() == [1, 0, 0]
    assert places.spread(places.length, 0, np.int32).reshape(SHAPE).tolist() == [
        [[4, 4, 4, 4], [0, 0, 0, 0], [0, 2, 2, 0]],
        [[3, 3, 3, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]


def test_gather_takes_the_tokens_of_every_sequence():
    joined = np.array([1, 2, *(3, 4, 5, 0), *(6, 7, 8, 9)])
    gathered = find_places(SLOTS, SHAPE, ROW_LENGTHS).gather(joined, np.int32, padding=-1).reshape(SHAPE)
    assert gathered[0].tolist() == [[6, 7, 8, 9], [-1] * 4, [-1, 1, 2, -1]]
    assert gathered[1].tolist() == [[3, 4, 5, -1], [-1] * 4, [-1] * 4]


def test_sequences_in_some_rows_keep_their_numbers():
    every = find_places(SLOTS, SHAPE, ROW_LENGTHS)
    places = every.in_rows(np.array([0, 2]), SHAPE)
    assert (places.start.tolist(), places.source.tolist(), places.size) == ([0, 5, 8], [6, 0, 2], 16)
    places = every.in_rows(np.array([2]), SHAPE)
    assert (places.start.tolist(), places.source.tolist(), places.number.tolist()) == ([1], [0], [0])
    assert places.size == 8
    assert every.in_rows(np.array([1]), SHAPE).tokens.tolist() == [False] * 8
