# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest

from marin_rl.sampling.attention import PADDING
from marin_rl.sampling.sampler import SampledTokens, SampleRequest, SamplerError
from marin_rl.sampling.sizes import PrefillShape, PrefillShapes, prefill_shapes
from marin_rl.sampling.slots import AcceptedRequest, PromptPiece, SlotTable, copy_arguments, prefill_calls
from marin_rl.sampling.stops import ENDED, START
from marin_rl.types import Generation, StopReason

FIRST = AcceptedRequest(7, SampleRequest((5, 6, 7), seed=2**32 + 3, max_new_tokens=9, temperature=0.5), 3)
SECOND = AcceptedRequest(8, SampleRequest((4,), seed=1, max_new_tokens=9), 9)


def table() -> SlotTable:
    """Return three slots, of which the last two have a request."""
    slots = SlotTable(3, 9)
    slots.assign(2, FIRST)
    slots.assign(1, SECOND)
    return slots


def columns(*rows: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens of each slot in each step, and log-probabilities that are a tenth of them, negative."""
    tokens = np.array(rows)
    return tokens, -tokens / 10


def test_inputs_of_decode_are_those_of_the_requests():
    inputs = table().decode_inputs(16)
    assert np.asarray(inputs.active).tolist() == [False, True, True]
    assert np.asarray(inputs.lengths).tolist()[1:] == [0, 2]
    assert np.asarray(inputs.last_tokens).tolist()[1:] == [4, 7]
    assert np.asarray(inputs.stop_states).tolist()[1:] == [START, START]
    assert np.asarray(inputs.remaining).tolist()[1:] == [9, 3]
    assert np.asarray(inputs.keys).tolist()[1:] == [[0, 1], [1, 3]]
    assert np.asarray(inputs.temperatures).tolist()[1:] == [1.0, 0.5]


def test_sampled_tokens_are_added_until_a_request_ends():
    slots = table()
    earlier = slots.decode_inputs(16)
    assert slots.add(*columns((-1, 11, 21), (-1, 12, -1)), 4).tolist() == [0, 2, 1]
    assert np.asarray(earlier.lengths).tolist()[1:] == [0, 2], "a copy"
    inputs = slots.decode_inputs(16)
    assert np.asarray(inputs.lengths).tolist()[1:] == [2, 3]
    assert np.asarray(inputs.last_tokens).tolist()[1:] == [12, 21]
    assert np.asarray(inputs.remaining).tolist()[1:] == [7, 2]
    assert slots.end(np.array([START, 2, START])) == []
    assert np.asarray(slots.decode_inputs(16).stop_states).tolist() == [START, 2, START]
    slots.add(*columns((-1, 13, 22), (-1, -1, 23)), 5)
    (first, *stop), (second, *limit) = slots.end(np.array([START, ENDED, 2]))
    assert (first, second) == (1, 2)
    logprobs = [tuple(np.float32(-token / 10).item() for token in tokens) for tokens in ((11, 12, 13), (21, 22, 23))]
    assert stop == [SECOND, Generation((11, 12, 13), logprobs[0], StopReason.STOP, 4, 5)]
    assert limit == [FIRST, Generation((21, 22, 23), logprobs[1], StopReason.LENGTH, 4, 5)]
    assert not slots.active.any()
    # A slot forgets its last request.
    slots.assign(1, FIRST)
    assert np.asarray(slots.decode_inputs(16).stop_states).tolist()[1] == START


def test_progress_is_that_of_the_requests_asked_for():
    slots = table()
    slots.add(*columns((-1, 11, 21)), 3)
    slots.add(*columns((-1, 12, 22)), 4)
    logprob = np.float32(-1.2).item()
    assert slots.progress({8: 1, 99: 0}) == {8: SampledTokens((12,), (logprob,), 3, 4)}
    assert slots.progress({8: 2}) == {}
    slots.active[1] = False
    assert slots.progress({8: 0}) == {}


@pytest.mark.parametrize("value", [math.nan, -math.inf, 0.1])
def test_invalid_log_probability_is_an_error(value: float):
    with pytest.raises(SamplerError, match=f"request 8: a sampled token has log-probability {value}"):
        table().add(np.array([[-1, 11, -1]]), np.array([[0.0, value, 0.0]]), 0)


def test_rounding_above_zero_is_clamped():
    slots = table()
    slots.add(np.array([[-1, 11, -1]]), np.array([[0.0, 1e-6, 0.0]]), 0)
    [(_, _, generation)] = slots.end(np.array([START, ENDED, START]))
    assert generation.logprobs == (0.0,)


# Arguments of programs for prompts.


@pytest.mark.parametrize(
    ("platform", "slots", "max_context", "max_new_tokens", "shapes"),
    [
        ("cpu", 4, 96, 64, ((4, 32), (4, 16))),
        ("cpu", 512, 12, 4, ((32, 8), (8, 8))),
        # Further turns are longer than the first prompt.
        ("cpu", 64, 1024, 5000, ((32, 8), (8, 8))),
        ("cpu", 64, 5, 4, ((51, 5), (12, 5))),
        ("tpu", 128, 1536, 1280, ((16, 256), (8, 64))),
        ("gpu", 128, 4096, 1024, ((8, 512), (8, 64))),
    ],
)
def test_prefill_has_long_calls_and_short_ones(platform, slots, max_context, max_new_tokens, shapes):
    assert prefill_shapes(platform, slots, max_context, max_new_tokens) == shapes


SHAPES = PrefillShapes(PrefillShape(8, 512), PrefillShape(8, 64))


@pytest.mark.parametrize("count", [1, 50, 64, 500, 1000, 2047, 2048, 2500, 4096, 30_000])
def test_positions_of_a_call_are_at_most_twice_the_tokens_and_a_short_call(count: int):
    """For a piece on its own, when the rest of its calls is padding."""
    calls = list(prefill_calls([PromptPiece(0, 0, np.arange(count))], SHAPES, 1, 4))
    assert sum(np.size(ids) for ids, _, _ in calls) < 2 * count + SHAPES.short.positions


def read_calls(
    pieces: list[PromptPiece], shapes: PrefillShapes, shards: int, shard_slots: int
) -> list[list[tuple[int, int, int]]]:
    """Return slot, position and token of each token, in the order of a call's rows."""
    read = []
    for ids, slots, positions in prefill_calls(pieces, shapes, shards, shard_slots):
        shape = PrefillShape(len(ids) // shards, np.shape(ids)[1])
        assert shape in shapes
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
    ("long", "short", "calls"),
    [((2, 4), (2, 4), 2), ((1, 4), (2, 4), 3), ((8, 4), (8, 4), 1), ((2, 4), (3, 2), 3), ((4, 4), (2, 2), 3)],
)
def test_calls_have_all_tokens_of_a_slot_in_order(long: tuple[int, int], short: tuple[int, int], calls: int):
    pieces = [
        PromptPiece(slot, start, 100 * slot + np.arange(count))
        for slot, start, count in ((1, 0, 11), (0, 7, 3), (5, 2, 4))
    ]
    read = read_calls(pieces, PrefillShapes(PrefillShape(*long), PrefillShape(*short)), 2, 3)
    assert len(read) == calls
    for slot, start, tokens in pieces:
        found = [token for call in read for token in call if token[0] == slot]
        assert found == [(slot, start + index, token) for index, token in enumerate(tokens.tolist())]


def chunks_of(slot: int, pieces: list[PromptPiece]) -> list[tuple[int, int]]:
    """Return the first position of each chunk of a slot, and the size of the chunk."""
    return [
        (int(np.asarray(positions)[row, 0]), np.shape(ids)[1])
        for ids, slots, positions in prefill_calls(pieces, SHAPES, 1, 9)
        for row in np.flatnonzero(np.asarray(slots) == slot)
    ]


def test_chunks_of_a_piece_do_not_depend_on_other_pieces():
    """Programs of different shapes may round differently."""
    counts = (50, 3000, 2047, 2048, 600, 64, 1, 9000)
    pieces = [PromptPiece(slot, 7 * slot, np.arange(count)) for slot, count in enumerate(counts)]
    for slot, piece in enumerate(pieces):
        assert chunks_of(slot, pieces) == chunks_of(slot, pieces[::-1]) == chunks_of(slot, [piece])


def test_copies_are_numbered_within_their_shard():
    sources, targets, counts = copy_arguments([(4, 5), (0, 2), (4, 3)], 2, 3)
    assert counts.tolist() == [1, 2]
    pairs = np.stack([sources, targets], axis=1).reshape(2, 3, 2)
    assert [shard[:count].tolist() for shard, count in zip(pairs, counts, strict=True)] == [[[0, 2]], [[1, 2], [1, 0]]]
