# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Validated outputs of levanter's engine, with the versions of the weights that sampled them."""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from levanter.inference.engine import GenerationResult

from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SamplerError
from marin_rl.types import Generation, StopReason, WeightVersion


class Swap(NamedTuple):
    """An update of the weights during decoding."""

    version: WeightVersion
    lengths: list[int]
    """Length of each sequence, in tokens, at the time of the update."""


class EngineAnswer(NamedTuple):
    """Output of one call of the engine."""

    result: GenerationResult
    first_version: WeightVersion
    """Version of the weights that processed the prompts and sampled every first token."""
    swaps: Sequence[Swap]
    """Weight updates in order."""

    def last_version(self, index: int) -> WeightVersion:
        """Return the version of the weights that sampled the last token of a sequence."""
        length = len(self.result.tokens[index])
        versions = [swap.version for swap in self.swaps if swap.lengths[index] < length]
        return versions[-1] if versions else self.first_version


def read_answer(
    answer: EngineAnswer, first: int, allowed: Sequence[int], stop_ids: Collection[int]
) -> list[Generation]:
    """Convert the engine's output to generations, and validate them.

    Args:
        answer: output of the engine.
        first: index of its first request among all requests, for error messages.
        allowed: maximum number of new tokens of each sequence.
        stop_ids: tokens that end a sequence.

    Raises:
        SamplerError: if a sequence is incomplete, or a log-probability is not finite or above 0.
    """
    result = answer.result
    if result.logprobs is None:
        raise SamplerError(f"requests from {first}: the engine returned no log-probabilities")
    _check_logprobs(result.logprobs, first)
    generations = []
    for offset, (tokens, logprobs) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        stopped = bool(tokens) and tokens[-1] in stop_ids
        if not (stopped and len(tokens) <= allowed[offset]) and len(tokens) != allowed[offset]:
            raise SamplerError(
                f"request {first + offset}: the engine returned {len(tokens)} tokens without a final stop token, "
                f"of {allowed[offset]} allowed; it dropped or cut the request"
            )
        generations.append(
            Generation(
                token_ids=tuple(tokens),
                logprobs=tuple([min(value, 0.0) for value in logprobs]),
                stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
                first_version=answer.first_version,
                last_version=answer.last_version(offset),
            )
        )
    return generations


def _check_logprobs(logprobs: Sequence[Sequence[float]], first: int) -> None:
    flat = np.fromiter(itertools.chain.from_iterable(logprobs), dtype=np.float64)
    valid = flat <= LOGPROB_ROUNDING
    valid &= flat > -np.inf
    if valid.all():
        return
    owners = np.repeat(np.arange(len(logprobs)), [len(values) for values in logprobs])
    invalid = int(np.argmin(valid))
    raise SamplerError(
        f"request {first + int(owners[invalid])}: the engine returned log-probability {flat[invalid]}; it must be "
        "finite and at most 0. Check the weights for NaN"
    )
