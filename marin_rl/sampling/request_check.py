# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Validation of sample requests."""

import math

from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest


def allowed_tokens(
    index: int, request: SampleRequest, *, max_context: int, vocab_size: int, max_new_tokens: int
) -> int:
    """Validate a request and return the maximum number of new tokens.

    Args:
        index: index of the request, for error messages.
        request: the request.
        max_context: maximum number of prompt and new tokens of a sequence.
        vocab_size: vocabulary size of the model.
        max_new_tokens: maximum value of `request.max_new_tokens`.

    Raises:
        PromptTooLongError: if the prompt leaves no room for a new token.
        ValueError: if the request is malformed.
    """
    length = len(request.prompt_tokens)
    if length >= max_context:
        raise PromptTooLongError(
            f"request {index}: the prompt has {length} tokens, but the limit is {max_context - 1} (a context of "
            f"{max_context} less one new token); shorten the prompt or enlarge the context"
        )
    if length == 0:
        raise ValueError(f"request {index}: prompt_tokens is empty; a prompt needs at least one token")
    low, high = min(request.prompt_tokens), max(request.prompt_tokens)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"request {index}: prompt token {low if low < 0 else high} is not in the model's vocabulary of {vocab_size}"
        )
    if not 1 <= request.max_new_tokens <= max_new_tokens:
        raise ValueError(
            f"request {index}: max_new_tokens is {request.max_new_tokens}; it must be between 1 and "
            f"sampling.max_new_tokens, which is {max_new_tokens}"
        )
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise ValueError(f"request {index}: temperature is {request.temperature}; it must be 0 (greedy) or above")
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"request {index}: seed is {request.seed}; it must be at least 0 and below 2**63")
    return min(request.max_new_tokens, max_context - length)
