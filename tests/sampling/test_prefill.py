# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

from marin_rl.sampling.attention import PADDING
from marin_rl.sampling.prefill import Piece, PrefillShape, copy_arguments, prefill_calls, prefill_shape


@pytest.mark.parametrize(
    ("platform", "slots", "max_context", "max_new_tokens", "shape"),
    [
        ("cpu", 128, 96, 64, (8, 32)),
        ("cpu", 4, 96, 64, (4, 32)),
        ("cpu", 512, 12, 4, (32, 8)),
        # Further turns are longer than the first prompt.
        ("cpu", 64, 1024, 1023, (32, 8)),
        ("cpu", 64, 1024, 5000, (32, 8)),
        ("cpu", 64, 5, 4, (51, 5)),
        ("tpu", 128, 1536, 1280, (16, 256)),
        ("gpu", 128, 4096, 4095, (32, 128)),
    ],
)
def test_prefill_has_few_short_chunks(platform, slots, max_context, max_new_tokens, shape):
    assert prefill_shape(platform, slots, max_context, max_new_tokens) == shape


def read_calls(
    pieces: list[Piece], shape: PrefillShape, shards: int, shard_slots: int
) -> list[list[tuple[int, int, int]]]:
    """Return slot, position and token of each token, in the order of a call's rows."""
    read = []
    for ids, slots, positions in prefill_calls(pieces, shape, shards, shard_slots):
        assert np.shape(ids) == np.shape(positions) == (shards * shape.rows, shape.chunk)
        tokens = []
        for row in range(len(ids)):
            used = np.asarray(positions)[row] != PADDING
            assert used.any() == (slots[row] < shard_slots)
            slot = row // shape.rows * shard_slots + int(slots[row])
            pairs = zip(np.asarray(positions)[row, used].tolist(), np.asarray(ids)[row, used].tolist(), strict=True)
            tokens += [(slot, *pair) for pair in pairs]
        read.append(tokens)
    return read


@pytest.mark.parametrize(
    ("shape", "calls"), [(PrefillShape(2, 4), 2), (PrefillShape(1, 4), 4), (PrefillShape(8, 4), 1)]
)
def test_calls_have_all_tokens_of_a_slot_in_order(shape: PrefillShape, calls: int):
    pieces = [
        Piece(slot, start, 100 * slot + np.arange(count)) for slot, start, count in ((1, 0, 11), (0, 7, 3), (5, 2, 4))
    ]
    read = read_calls(pieces, shape, 2, 3)
    assert len(read) == calls
    for slot, start, tokens in pieces:
        found = [token for call in read for token in call if token[0] == slot]
        assert found == [(slot, start + index, token) for index, token in enumerate(tokens.tolist())]


def test_no_pieces_need_no_calls():
    assert list(prefill_calls([], PrefillShape(2, 4), 1, 3)) == []


def test_copies_are_numbered_within_their_shard():
    sources, targets, counts = copy_arguments([(4, 5), (0, 2), (4, 3)], 2, 3)
    assert counts.tolist() == [1, 2]
    pairs = np.stack([sources, targets], axis=1).reshape(2, 3, 2)
    assert [shard[:count].tolist() for shard, count in zip(pairs, counts, strict=True)] == [[[0, 2]], [[1, 2], [1, 0]]]
