# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Requests and responses of OpenAI's completions protocol, with token ids and log-probabilities.

They use vLLM's extensions: `return_token_ids` adds `token_ids` and `prompt_token_ids` to a choice, and `stop_token_ids`
and `ignore_eos` let the client define the stop tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SampleRequest, SamplerError
from marin_rl.sampling.stops import StopTable
from marin_rl.types import Generation, StopReason, WeightVersion

_ABORTED = "abort"
"""The finish reason of vLLM and SGLang for an aborted request, for example before a weight reload."""
_MIN_LOGPROB = -9999.0
"""vLLM's encoding of a log-probability of minus infinity."""


def completion_body(
    model: str, request: SampleRequest, allowed: int, stop_token_ids: Collection[int], stop: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the JSON body of a request.

    Args:
        model: name of the model on the server.
        request: the prompt and its sampling parameters.
        allowed: maximum number of new tokens.
        stop_token_ids: tokens that end a generation; the stop token is part of it.
        stop: texts that end a generation, and are part of it.
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
        # Sample from the whole distribution. A server fills missing values from generation_config.json.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        **({"stop": list(stop), "include_stop_str_in_output": True} if stop else {}),
    }


def read_completion(
    response: object,
    index: int,
    request: SampleRequest,
    *,
    allowed: int,
    stop_token_ids: Collection[int],
    stops: StopTable,
    version: WeightVersion = 0,
) -> Generation:
    """Read a generation from a response, and validate it.

    Tokens after the one that completes a stop text are dropped: some servers return them if they sample several tokens
    at a time.

    Args:
        response: the server's response, parsed.
        index: index of the request, for error messages.
        request: the request.
        allowed: maximum number of new tokens in the request.
        stop_token_ids: stop tokens in the request.
        stops: the end of a generation by stop tokens and stop texts, over the model's vocabulary.
        version: number of training steps that produced the server's weights.

    Raises:
        SamplerError: if a field is missing or invalid.
    """
    [choice] = _choices(response, index, 1)
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and prompt != list(request.prompt_tokens):
        raise SamplerError(
            f"request {index}: the server read the prompt as {_shown(prompt)}, but the request has "
            f"{_shown(list(request.prompt_tokens))}; it must use token ids unchanged"
        )
    tokens, vocab_size = _token_ids(choice, "token_ids", index), len(stops.classes)
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise SamplerError(
                f"request {index}: the server returned token {_shown(token)}, which is not in the model's vocabulary "
                f"of {vocab_size}; configure it to serve this run's model"
            )
    logprobs = _token_logprobs(choice, index, len(tokens))
    end = stops.first_end(tokens)
    if end is not None and end < len(tokens) and tokens[end - 1] in stop_token_ids:
        raise SamplerError(
            f"request {index}: the server continued after stop token {tokens[end - 1]}; it must honour stop_token_ids"
        )
    stopped = end is not None
    reason = StopReason.STOP if stopped else StopReason.LENGTH
    if choice.get("finish_reason") == _ABORTED and not stopped:
        reason = StopReason.ABORT
    # Only a stop token, a stop text or an abort ends a generation early.
    if len(tokens) > allowed or (reason is StopReason.LENGTH and len(tokens) != allowed):
        raise SamplerError(
            f"request {index}: the server returned {len(tokens)} tokens without a final stop token, of {allowed} "
            f"allowed, with finish_reason {_shown(choice.get('finish_reason'))}; it must honour stop_token_ids, stop, "
            "ignore_eos and max_tokens, return the stop token, and add no other ones (vLLM: --generation-config vllm)"
        )
    return Generation(tuple(tokens[:end]), tuple(logprobs[:end]), reason, version, version)


def echo_body(model: str, prompts: Sequence[Sequence[int] | str]) -> dict[str, Any]:
    """Build the JSON body of a request for the log-probabilities of prompts, without new tokens.

    Args:
        model: name of the model on the server.
        prompts: tokens of each prompt, or texts, which the server tokenizes.
    """
    return {
        "model": model,
        "prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 1.0,
    }


def read_echo(response: object, index: int, count: int) -> list[tuple[list[int], list[float]]]:
    """Read the tokens of prompts and their log-probabilities from a response, and validate them.

    Args:
        response: the server's response, parsed.
        index: index of the request, for error messages.
        count: number of prompts in the request.

    Returns:
        The tokens of each prompt, and the log-probability of each; 0 for the first one, which nothing predicts.

    Raises:
        SamplerError: if a field is missing or invalid.
    """
    choices = _choices(response, index, count)
    if [choice.get("index") for choice in choices] != list(range(count)):
        raise SamplerError(f"request {index}: the completions of the server are not in the order of the prompts")
    read = []
    for choice in choices:
        tokens = _token_ids(choice, "prompt_token_ids", index)
        read.append((tokens, [0.0, *_token_logprobs(choice, index, len(tokens) - 1, skipped=1)]))
    return read


def _choices(response: object, index: int, count: int) -> list[Mapping[str, Any]]:
    """Return the completions of a response, which must be as many as the prompts of its request."""
    choices = response.get("choices") if isinstance(response, Mapping) else None
    if not isinstance(choices, list) or len(choices) != count or not all(isinstance(c, Mapping) for c in choices):
        wanted = "one completion" if count == 1 else f"one completion for each of the {count} prompts"
        raise SamplerError(
            f"request {index}: the server returned {_shown(response)}, which is not {wanted}; base_url must be the "
            "address of a completions API, such as http://localhost:8000/v1"
        )
    return choices


def _token_ids(choice: Mapping[str, Any], name: str, index: int) -> list[Any]:
    tokens = choice.get(name)
    if not isinstance(tokens, list):
        raise SamplerError(
            f"request {index}: {name} is {_shown(tokens)} in the server's response; it must honour return_token_ids, "
            "as recent versions of vLLM do"
        )
    return tokens


def _logprobs_field(choice: Mapping[str, Any], name: str) -> Any:
    fields = choice.get("logprobs")
    return fields.get(name) if isinstance(fields, Mapping) else None


def _token_logprobs(choice: Mapping[str, Any], index: int, length: int, skipped: int = 0) -> list[float]:
    """Return the log-probabilities of tokens after the first `skipped`, which have none."""
    logprobs = _logprobs_field(choice, "token_logprobs")
    logprobs = logprobs[skipped:] if isinstance(logprobs, list) else logprobs
    if not isinstance(logprobs, list) or len(logprobs) != length:
        raise SamplerError(
            f"request {index}: logprobs.token_logprobs is {_shown(logprobs)} in the server's response; it must honour "
            f"logprobs, with one number for each of the {length} tokens"
        )
    for value in logprobs:
        if not _is_logprob(value):
            raise SamplerError(
                f"request {index}: the server returned log-probability {_shown(value)}; it must be finite and at most "
                "0. Check the weights for NaN"
            )
    return [min(float(value), 0.0) for value in logprobs]


def _is_logprob(value: object) -> bool:
    return type(value) in (float, int) and _MIN_LOGPROB < cast(float, value) <= LOGPROB_ROUNDING


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a nested value"
    return text if len(text) <= 200 else f"{text[:200]}…"
