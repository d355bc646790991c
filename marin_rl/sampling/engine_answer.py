# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a call of levanter's engine answered: checked, and with the weights that sampled it."""

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from levanter.inference.engine import GenerationResult

from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SamplerError
from marin_rl.types import Generation, StopReason, WeightVersion


class Swap(NamedTuple):
    """Newer weights that came while sequences were being decoded."""

    version: WeightVersion
    lengths: list[int]
    """Tokens that each sequence had by then."""


class EngineAnswer(NamedTuple):
    """What a call of the engine gave."""

    result: GenerationResult
    first_version: WeightVersion
    """Of the weights that read the prompts, and so sampled every first token."""
    swaps: Sequence[Swap]
    """In the order in which they came."""

    def last_version(self, index: int) -> WeightVersion:
        """Of the weights that sampled the last token of a sequence."""
        length = len(self.result.tokens[index])
        behind = [swap.version for swap in self.swaps if swap.lengths[index] < length]
        return behind[-1] if behind else self.first_version


def read_answer(
    answer: EngineAnswer, first: int, allowed: Sequence[int], stop_ids: Collection[int]
) -> list[Generation]:
    """The sequences of an answer as generations, checked.

    Args:
        answer: what the engine gave.
        first: number of its first request among all that were asked; named in errors.
        allowed: most tokens of each sequence.
        stop_ids: each of them alone ends a sequence.

    Raises:
        SamplerError: if a sequence is incomplete, or a log-probability is none.
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
                f"request {first + offset}: the engine returned {len(tokens)} tokens that end in no stop token, "
                f"where {allowed[offset]} were allowed; it dropped or cut the request"
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
    good = flat <= LOGPROB_ROUNDING
    good &= flat > -np.inf
    if good.all():
        return
    owners = np.repeat(np.arange(len(logprobs)), [len(values) for values in logprobs])
    bad = int(np.argmin(good))
    raise SamplerError(
        f"request {first + int(owners[bad])}: the engine returned log-probability {flat[bad]}; it must be finite and "
        "at most 0. Check the weights for NaN"
    )
