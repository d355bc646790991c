# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Samples in progress: their checks, and their ends at the stops of clients."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serving.text import ReplyReader
from marin_rl.serving.tinker.records import (
    MAX_TOPK,
    RequestError,
    Sample,
    SampleJob,
    SampleOutputs,
    SampleParams,
    SampleSource,
    TopK,
)
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, StopReason


def check_sample(params: SampleParams, max_context: int, vocab_size: int) -> None:
    """Check a request. `max_context` is the maximum number of tokens of a sample with its prompt.

    Raises:
        RequestError: if a value is out of range or not supported; names it.
    """
    room = max_context - len(params.prompt)
    if not params.prompt:
        raise RequestError("the prompt is empty; it must have at least one token")
    if min(params.prompt) < 0 or max(params.prompt) >= vocab_size:
        raise RequestError(f"the prompt has a token outside the vocabulary of {vocab_size}")
    if room < 0 or (room == 0 and not (params.prompt_logprobs or params.topk_prompt_logprobs)):
        raise RequestError(
            f"the prompt has {len(params.prompt)} tokens, which leaves no room in the context of "
            f"{max_context} (--max_context)"
        )
    if params.max_tokens is not None and params.max_tokens < 1:
        raise RequestError(f"max_tokens is {params.max_tokens}; it must be at least 1")
    if params.num_samples < 1:
        raise RequestError(f"num_samples is {params.num_samples}; it must be at least 1")
    if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature < math.inf:
        raise RequestError(
            f"temperature is {params.temperature}; it must be 0 (greedy), or finite and at least {MIN_TEMPERATURE}"
        )
    if params.top_k != -1 or params.top_p != 1:
        raise RequestError(
            f"top_k is {params.top_k} and top_p {params.top_p}; the server samples from the whole distribution, as the "
            "ratios of losses need it: set top_k=-1 and top_p=1"
        )
    if params.stop is not None and (not params.stop or "" in params.stop):
        raise RequestError(
            "stop is empty, or has an empty text; the server always ends a sample at the tokenizer's end tokens"
        )
    most = min(MAX_TOPK, vocab_size)
    if not 0 <= params.topk_prompt_logprobs <= most:
        raise RequestError(f"topk_prompt_logprobs is {params.topk_prompt_logprobs}; it must be from 0 to {most}")


class _Reply:
    """A sample in progress."""

    def __init__(self, key: str, reader: ReplyReader | None, conversation: str | None) -> None:
        self.key, self.reader, self.conversation = key, reader, conversation
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.seen = 0


class Replies:
    """The samples of one version of the weights that are in progress."""

    def __init__(self, sampler: GroupSampler, tokenizer: ChatTokenizer, source: SampleSource, max_context: int) -> None:
        self._sampler, self._tokenizer, self._source = sampler, tokenizer, source
        self._max_context = max_context
        self._running: dict[int, tuple[_Reply, int]] = {}
        """Reply, and its index among the samples of its request, by number in the sampler."""
        self._results: dict[str, tuple[list[Sample | None], np.ndarray | None, TopK | None]] = {}

    def start(self, job: SampleJob, prompt_logprobs: np.ndarray | None, topk: TopK | None) -> None:
        """Start the samples of a request, and keep what its prompt gave; see `SampleOutputs`."""
        params, room = job.params, self._max_context - len(job.params.prompt)
        if not room:
            # A sample that filled the context is scored. There is no room for a new token.
            samples = [Sample((), (), False)] * params.num_samples
            self._source.finish(job.key, SampleOutputs(samples, prompt_logprobs, topk))
            return
        ends = params.stop or ()
        texts = tuple(end for end in ends if isinstance(end, str))
        tokens = tuple(end for end in ends if not isinstance(end, str))
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._results[job.key] = [None] * params.num_samples, prompt_logprobs, topk
        for index in range(params.num_samples):
            conversation = f"{job.key}/{index}" if ends else None
            request = SampleRequest(
                params.prompt,
                (params.seed + index) % 2**63,
                max_tokens,
                params.temperature,
                conversation,
            )
            reader = ReplyReader(lambda ids: self._tokenizer.decode_reply(ids, False), texts, tokens) if ends else None
            (number,) = self._sampler.start([request])
            self._running[number] = _Reply(job.key, reader, conversation), index

    def advance(self) -> bool:
        """Sample some tokens; return whether samples are in progress."""
        if not self._running:
            return False
        for number, generation in self._sampler.advance():
            reply, _ = self._running[number]
            self._end(number, self._rest(reply, generation))
        watched = {number: reply.seen for number, (reply, _) in self._running.items() if reply.reader is not None}
        for number, part in self._sampler.progress(watched).items() if watched else ():
            reply, _ = self._running[number]
            self._add(reply, part.token_ids, part.logprobs, None)
            if cast(ReplyReader, reply.reader).finish_reason is not None:
                self._end(number, Sample(tuple(reply.tokens), tuple(reply.logprobs), True))
        return True

    def _rest(self, reply: _Reply, generation: Generation) -> Sample:
        """Return the sample of a generation that has ended."""
        stopped = generation.stop_reason is StopReason.STOP
        if reply.reader is None:
            return Sample(tuple(generation.token_ids), tuple(generation.logprobs), stopped)
        rest = generation.token_ids[reply.seen :], generation.logprobs[reply.seen :]
        self._add(reply, *rest, generation.stop_reason)
        return Sample(tuple(reply.tokens), tuple(reply.logprobs), reply.reader.finish_reason == "stop")

    @staticmethod
    def _add(reply: _Reply, tokens: Sequence[int], logprobs: Sequence[float], end: StopReason | None) -> None:
        assert reply.reader is not None
        part = reply.reader.push(tokens, logprobs, end)
        reply.seen += len(tokens)
        reply.tokens += part.token_ids
        reply.logprobs += part.logprobs

    def _end(self, number: int, sample: Sample) -> None:
        reply, index = self._running.pop(number)
        if reply.conversation is not None:
            self._sampler.end_conversation(reply.conversation)
        samples, prompt_logprobs, topk = self._results[reply.key]
        samples[index] = sample
        if all(samples):
            del self._results[reply.key]
            self._source.finish(reply.key, SampleOutputs(cast(list[Sample], samples), prompt_logprobs, topk))
