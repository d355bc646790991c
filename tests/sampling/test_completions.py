# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math
from collections.abc import Callable
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.sampling.completions import read_completion, read_echo
from marin_rl.sampling.sampler import SampleRequest, SamplerError
from marin_rl.sampling.stops import stop_table
from marin_rl.types import Generation, StopReason

VOCAB = 6
STOPS = frozenset({4, 5})
TWO = SampleRequest((1, 2), seed=2**63 - 1, max_new_tokens=4, temperature=0.1)


def read(answer: object, allowed: int = 4) -> Any:
    return read_completion(
        answer, 0, TWO, allowed=allowed, stop_token_ids=STOPS, stops=stop_table(VOCAB, STOPS), version=3
    )


def outcome(reading: Callable[[object], Any], answer: object) -> Any:
    """Return the result for a response, or the error message if it is rejected."""
    try:
        return reading(answer)
    except SamplerError as error:
        return str(error)


@given(
    tokens=st.lists(st.integers(-1, VOCAB), max_size=6),
    values=st.lists(st.floats(-12000.0, 1.0) | st.sampled_from([math.nan, -math.inf, 1e-6, 0.0]), max_size=6),
    pad=st.booleans(),
)
def test_accepted_responses_are_valid_generations(tokens: list[int], values: list[float], pad: bool):
    if pad:
        values = [*values, *[-1.0] * len(tokens)][: len(tokens)]
    good = (
        len(values) == len(tokens)
        and all(0 <= token < VOCAB for token in tokens)
        and all(-9999.0 < value <= 1e-5 for value in values)
        and 1 <= len(tokens) <= 4
        and not STOPS & set(tokens[:-1])
        and (tokens[-1] in STOPS or len(tokens) == 4)
    )
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": values}}
    completion = outcome(read, {"choices": [choice]})
    assert isinstance(completion, Generation) == good
    if isinstance(completion, Generation):
        assert completion.token_ids == tuple(tokens)
        assert completion.logprobs == tuple(min(value, 0.0) for value in values)
        assert completion.stop_reason is (StopReason.STOP if tokens[-1] in STOPS else StopReason.LENGTH)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3, 1]])
def test_aborted_request_keeps_its_tokens(tokens: list[int]):
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}, "finish_reason": "abort"}
    expected = Generation(tuple(tokens), (-1.0,) * len(tokens), StopReason.ABORT, 3, 3)
    assert outcome(read, {"choices": [choice]}) == expected
    # A generation that ends with a stop token is complete for any finish reason; five tokens exceed the limit.
    choice = {"token_ids": [1, 4], "logprobs": {"token_logprobs": [-1.0] * 2}, "finish_reason": "abort"}
    assert read({"choices": [choice]}).stop_reason is StopReason.STOP
    choice = {"token_ids": [1] * 5, "logprobs": {"token_logprobs": [-1.0] * 5}, "finish_reason": "abort"}
    assert "returned 5 tokens without a final stop token" in outcome(read, {"choices": [choice]})


PIECES = [b"a", b"b", b"ab", b"", b"", b""]


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([0, 1], [0, 1], StopReason.STOP),
        ([2], [2], StopReason.STOP),
        # Some servers return the tokens that were sampled in the same step.
        ([1, 2, 0, 4], [1, 2], StopReason.STOP),
        ([1, 0, 0, 0], [1, 0, 0, 0], StopReason.LENGTH),
        ([1, 4], [1, 4], StopReason.STOP),
    ],
)
def test_a_stop_text_ends_a_generation(tokens: list[int], kept: list[int], reason: StopReason):
    stops = stop_table(VOCAB, STOPS, ["ab"], PIECES.__getitem__)
    values = [-0.5 - position for position in range(len(tokens))]
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": values}, "finish_reason": "stop"}
    answer = {"choices": [choice]}
    read = read_completion(answer, 0, TWO, allowed=4, stop_token_ids=STOPS, stops=stops)
    assert read == Generation(tuple(kept), tuple(values[: len(kept)]), reason, 0, 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(whole=JSON, choice=JSON, tokens=JSON, logprobs=JSON, values=JSON)
def test_invalid_responses_raise_only_sampler_errors(whole: Any, choice: Any, tokens: Any, logprobs: Any, values: Any):
    for answer in (
        whole,
        {"choices": whole},
        {"choices": [choice]},
        {"choices": [{"token_ids": tokens, "logprobs": logprobs, "prompt_token_ids": choice}]},
        {"choices": [{"token_ids": [1, 2, 3, 4], "logprobs": {"token_logprobs": values}}]},
        {"choices": [{"index": 0, "prompt_token_ids": [1, 2, 3], "logprobs": {"token_logprobs": values}}]},
        {"choices": [{"index": 0, "prompt_token_ids": tokens, "logprobs": logprobs}]},
        {"choices": [{"logprobs": logprobs}]},
    ):
        for reading in (read, lambda said: read_echo(said, 0, 1)):
            found = outcome(reading, answer)
            assert isinstance(found, Generation | list) or found.startswith("request 0: ")
