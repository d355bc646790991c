# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest

from marin_rl.sampling.sampler import SampledTokens, SampleRequest, SamplerError
from marin_rl.sampling.slots import AcceptedRequest, SlotTable
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
    assert slots.add(*columns((-1, 11, 21), (-1, 12, -1)), 4).tolist() == [0, 2, 1]
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


def test_inputs_are_copies():
    slots = table()
    inputs = slots.decode_inputs(16)
    slots.add(*columns((-1, 11, 21)), 0)
    slots.active[:] = False
    assert np.asarray(inputs.lengths).tolist()[1:] == [0, 2]
    assert np.asarray(inputs.active).tolist() == [False, True, True]


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
