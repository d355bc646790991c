# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest

from marin_rl.sampling.sampler import SampleRequest, allowed_tokens

GOOD: dict[str, Any] = {"prompt_tokens": (1, 2, 3), "seed": 0, "max_new_tokens": 5, "temperature": 1.0}


def allowed(**changes: Any) -> int:
    return allowed_tokens(4, SampleRequest(**{**GOOD, **changes}), max_context=10, vocab_size=8, max_new_tokens=6)


@pytest.mark.parametrize(("length", "expected"), [(1, 5), (5, 5), (6, 4), (9, 1)])
def test_allowed_tokens_is_limited_by_request_and_context(length: int, expected: int):
    limits = {"temperature": 1e-30, "seed": 2**63 - 1}
    assert allowed(prompt_tokens=(7,) * length, **limits) == expected
    assert allowed(temperature=0.0, max_new_tokens=1) == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_tokens": (0,) * 10}, "request 4: the prompt has 10 tokens, but the limit is 9"),
        ({"prompt_tokens": ()}, "request 4: prompt_tokens is empty"),
        ({"prompt_tokens": (1, 8)}, "request 4: prompt token 8 is not in the model's vocabulary of 8"),
        ({"prompt_tokens": (-1, 7)}, "request 4: prompt token -1 is not"),
        ({"max_new_tokens": 0}, "request 4: max_new_tokens is 0; it must be between 1 and .* which is 6"),
        ({"max_new_tokens": 7}, "request 4: max_new_tokens is 7"),
        ({"temperature": 1e-37}, r"request 4: temperature is 1e-37; it must be 0 \(greedy\) or at least 1e-30"),
        ({"temperature": -0.1}, "request 4: temperature is -0.1"),
        ({"temperature": float("nan")}, "request 4: temperature is nan"),
        ({"seed": -1}, "request 4: seed is -1"),
        ({"seed": 2**63}, "request 4: seed is 9223372036854775808"),
    ],
)
def test_error_names_a_malformed_request(changes: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        allowed(**changes)
