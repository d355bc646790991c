# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""OpenAI's completions protocol in vLLM's dialect, token ids in and out: what is asked, and what an answer must hold.

The additions to OpenAI's protocol are `return_token_ids`, which adds `token_ids` and `prompt_token_ids` to a choice,
`stop_token_ids` and `ignore_eos`, which leave the ends of an answer to the caller, and `top_k`, `min_p` and
`repetition_penalty`, which are named because a server takes what is left out from the model's own defaults.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SampleRequest, SamplerError
from marin_rl.types import StopReason

ABORTED = "abort"
"""The finish reason of vLLM and SGLang for a request that was aborted, as before a reload of weights."""
LEAST_LOGPROB = -9999.0
"""What vLLM writes for a log-probability of minus infinity."""


class Completion(NamedTuple):
    """An answer that was found good."""

    token_ids: tuple[int, ...]
    """`[length]`, at least one unless the server aborted the request."""
    logprobs: tuple[float, ...]
    """`[length]`, finite and at most 0."""
    stop_reason: StopReason
    """What ended it."""


def completion_body(
    model: str, request: SampleRequest, allowed: int, stop_token_ids: Collection[int]
) -> dict[str, Any]:
    """What is sent for a request, as JSON.

    Args:
        model: the model's name at the server.
        request: what is asked.
        allowed: most tokens of the answer.
        stop_token_ids: each of them alone ends it, and is its last token.
    """
    return {
        "model": model,
        "prompt": list(request.prompt_tokens),
        "max_tokens": allowed,
        "temperature": request.temperature,
        "seed": request.seed,
        "logprobs": 1,
        "return_token_ids": True,
        "stop_token_ids": sorted(stop_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        # The whole distribution, whatever the server or the model's generation_config.json has for a default.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def read_completion(
    answer: object,
    index: int,
    request: SampleRequest,
    *,
    allowed: int,
    stop_token_ids: Collection[int],
    vocab_size: int,
) -> Completion:
    """The tokens of an answer and their log-probabilities, checked.

    Args:
        answer: what the server sent, parsed.
        index: where the request stands among the others; named in errors.
        request: what was asked.
        allowed: most tokens that were asked for.
        stop_token_ids: those that were sent.
        vocab_size: of the model.

    Raises:
        SamplerError: if something is missing or cannot be.
    """
    choice = _only_choice(answer, index)
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and prompt != list(request.prompt_tokens):
        raise SamplerError(
            f"request {index}: the server read the prompt as {_shown(prompt)}, but it was sent "
            f"{_shown(list(request.prompt_tokens))}; it must take token ids as they are"
        )
    tokens = _token_ids(choice, index, vocab_size)
    logprobs = _token_logprobs(choice, index, len(tokens))
    inner = next((token for token in tokens[:-1] if token in stop_token_ids), None)
    if inner is not None:
        raise SamplerError(
            f"request {index}: the server went on after stop token {inner}; it must honour stop_token_ids"
        )
    stopped = bool(tokens) and tokens[-1] in stop_token_ids
    if choice.get("finish_reason") == ABORTED and not stopped and len(tokens) <= allowed:
        return Completion(tuple(tokens), tuple([min(value, 0.0) for value in logprobs]), StopReason.ABORT)
    if not (stopped and len(tokens) <= allowed) and len(tokens) != allowed:
        raise SamplerError(
            f"request {index}: the server returned {len(tokens)} tokens that end in no stop token, where {allowed} "
            f"were allowed, with finish_reason {choice.get('finish_reason')!r}; it must honour stop_token_ids, "
            "ignore_eos and max_tokens, return the stop token, and add none of its own (vLLM: --generation-config vllm)"
        )
    reason = StopReason.STOP if stopped else StopReason.LENGTH
    return Completion(tuple(tokens), tuple([min(value, 0.0) for value in logprobs]), reason)


def most_likely_logprob(answer: object, index: int) -> float | None:
    """Log-probability of the most likely first token; None where the server does not tell.

    Args:
        answer: what the server sent, parsed.
        index: named in errors.
    """
    said = _only_choice(answer, index).get("logprobs")
    listed = said.get("top_logprobs") if isinstance(said, Mapping) else None
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], Mapping):
        return None
    return max((float(value) for value in listed[0].values() if _is_logprob(value)), default=None)


def _only_choice(answer: object, index: int) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise SamplerError(
            f"request {index}: the server answered {_shown(answer)}, which is not one completion; sampler.base_url "
            "must lead to a completions API, such as http://localhost:8000/v1"
        )
    return choices[0]


def _token_ids(choice: Mapping[str, Any], index: int, vocab_size: int) -> list[int]:
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        raise SamplerError(
            f"request {index}: token_ids is {_shown(tokens)} in the server's answer; it must honour return_token_ids, "
            "as recent versions of vLLM do"
        )
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise SamplerError(
                f"request {index}: the server returned token {_shown(token)}, which is not in the model's vocabulary "
                f"of {vocab_size}; have it serve this run's model"
            )
    return tokens


def _token_logprobs(choice: Mapping[str, Any], index: int, length: int) -> list[float]:
    said = choice.get("logprobs")
    logprobs = said.get("token_logprobs") if isinstance(said, Mapping) else None
    if not isinstance(logprobs, list) or len(logprobs) != length:
        raise SamplerError(
            f"request {index}: logprobs.token_logprobs is {_shown(logprobs)} in the server's answer; it must honour "
            f"logprobs, with one number for each of the {length} tokens"
        )
    for value in logprobs:
        if not _is_logprob(value):
            raise SamplerError(
                f"request {index}: the server returned log-probability {_shown(value)}; it must be finite and at most "
                "0. Check the weights for NaN"
            )
    return [float(value) for value in logprobs]


def _is_logprob(value: object) -> bool:
    return type(value) in (float, int) and LEAST_LOGPROB < cast(float, value) <= LOGPROB_ROUNDING


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
