# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from levanter.inference.engine import GenerationResult

from marin_rl.sampling.levanter_sampler import EngineAnswer, Swap, read_answer
from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SamplerError
from marin_rl.types import Generation, StopReason

STOP = 9


def answer_of(tokens: list[list[int]], logprobs: list[list[float]] | None) -> EngineAnswer:
    return EngineAnswer(GenerationResult(tokens, logprobs, sum(map(len, tokens))), 4, [])


def read(tokens: list[int], logprobs: list[float] | None = None, allowed: int = 3) -> Generation:
    """Return the second of two sequences, as request 8; the first one is valid."""
    given = [-1.0] * len(tokens) if logprobs is None else logprobs
    answer = answer_of([[1, STOP], tokens], [[-1.0, -1.0], given])
    return read_answer(answer, 7, [3, allowed], {STOP, 60})[1]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([STOP], StopReason.STOP),
        ([1, 60], StopReason.STOP),
        ([1, 2, STOP], StopReason.STOP),
        ([1, 2, 3], StopReason.LENGTH),
    ],
)
def test_sequence_ends_with_a_stop_token_or_at_its_limit(tokens: list[int], reason: StopReason):
    logprobs = [-0.5 * index for index in range(len(tokens))]
    assert read(tokens, logprobs) == Generation(tuple(tokens), tuple(logprobs), reason, 4, 4)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [1, 2, 3, STOP]])
def test_any_other_length_is_an_error(tokens: list[int]):
    said = f"request 8: the engine returned {len(tokens)} tokens without a final stop token, of 3 allowed"
    with pytest.raises(SamplerError, match=said):
        read(tokens)


@pytest.mark.parametrize("value", [1e-3, 2 * LOGPROB_ROUNDING, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2])
def test_invalid_logprob_is_an_error(value: float, place: int):
    logprobs = [-1.0, -2.0, -3.0]
    logprobs[place] = value
    with pytest.raises(SamplerError, match=rf"request 8: the engine returned log-probability {value}; .*for NaN"):
        read([1, 2, 3], logprobs)


def test_rounding_above_zero_is_clamped():
    assert read([1, 2, 3], [LOGPROB_ROUNDING, -1.0, 1e-7]).logprobs == (0.0, -1.0, 0.0)


def test_missing_logprobs_are_an_error():
    with pytest.raises(SamplerError, match="requests from 7: the engine returned no log-probabilities"):
        read_answer(answer_of([[1, STOP]], None), 7, [3], {STOP})


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    swaps_after=st.sets(st.integers(1, 9)),
)
def test_last_version_is_that_of_the_last_token(lengths: list[int], swaps_after: set[int]):
    version, swaps, sampled_by = 4, [], [[] for _ in lengths]
    # As in the engine: every decode step adds a token to each active sequence, with weight updates in between.
    for rounds in range(1, 10):
        for length, versions in zip(lengths, sampled_by, strict=True):
            if len(versions) < length:
                versions.append(version)
        if rounds in swaps_after:
            version += 3
            swaps.append(Swap(version, [len(versions) for versions in sampled_by]))
    tokens = [[1] * length for length in lengths]
    answer = EngineAnswer(GenerationResult(tokens, [[-1.0] * length for length in lengths], 0), 4, swaps)
    generations = read_answer(answer, 0, lengths, {STOP})
    assert [(g.first_version, g.last_version) for g in generations] == [(v[0], v[-1]) for v in sampled_by]
