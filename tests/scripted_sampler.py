# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler with scripted replies, for tests."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from marin_rl.sampling.sampler import SampledTokens, Sampler, SampleRequest
from marin_rl.types import Generation, StopReason, WeightVersion

Script = Mapping[tuple[int, ...], Sequence[int]] | Callable[[SampleRequest], Sequence[int]]
"""Reply tokens by prompt tokens, or a function from the request to the reply tokens."""


def experts_of(tokens: Sequence[int]) -> np.ndarray:
    """Return a choice of 3 experts in each of 2 layers for each token; it depends on the tokens before, too."""
    digest, rows = hashlib.sha256(), []
    for token in tokens:
        digest.update(f"{token} ".encode())
        rows.append([byte % 255 for byte in digest.digest()[:6]])
    return np.array(rows, np.uint8).reshape(len(rows), 2, 3)


class BatchSampler(Sampler):
    """A sampler without slots, which answers the oldest requests in batches."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._count = 0
        self._waiting: list[tuple[int, SampleRequest]] = []

    def answer(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Answer a batch of requests."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Maximum number of requests in a batch."""
        return self._batch_size

    @property
    def is_idle(self) -> bool:
        """Whether all requests have been answered."""
        return not self._waiting

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Accept requests."""
        numbers = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        self._waiting += zip(numbers, requests, strict=True)
        return numbers

    def advance(self) -> list[tuple[int, Generation]]:
        """Answer a batch of the oldest requests."""
        batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        if not batch:
            return []
        numbers, requests = zip(*batch, strict=True)
        return list(zip(numbers, self.answer(requests), strict=True))

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return nothing: replies are complete."""
        return {}

    def prepare(self) -> None:
        pass

    def end_conversation(self, conversation: str) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Drop the requests that have no answer yet."""
        self._waiting = []

    def update_weights(self, model: object, version: WeightVersion) -> None:
        """Do nothing."""


class ScriptedSampler(BatchSampler):
    """Answers prompts from a script and records the requests.

    >>> sampler = ScriptedSampler({(1, 2): (3, 0)}, stop_token_ids=[0])
    >>> [generation] = sampler.sample([SampleRequest((1, 2), seed=0, max_new_tokens=8)])
    >>> generation.token_ids, generation.stop_reason.value
    ((3, 0), 'stop')
    """

    def __init__(
        self,
        script: Script,
        *,
        stop_token_ids: Sequence[int],
        logprob: float = -1.0,
        version: WeightVersion = 0,
        batch_size: int = 1_000_000,
        experts: bool = False,
    ) -> None:
        """Create the sampler.

        Args:
            script: replies; they are cut after their first stop token and at `max_new_tokens`.
            stop_token_ids: tokens that end a reply.
            logprob: log-probability (nats) of every token, at most 0.
            version: weight version of the generations.
            batch_size: number of requests that are answered together.
            experts: whether to report the experts that `experts_of` chooses.
        """
        self.version = version
        self._experts = experts
        super().__init__(batch_size)
        self.requests: list[SampleRequest] = []
        self._script = script
        self._stop_token_ids = frozenset(stop_token_ids)
        self._logprob = logprob

    def answer(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Record and answer requests.

        Raises:
            ValueError: if the script has no reply to a prompt, or one that ends before a stop token
                and before `max_new_tokens`, as no sampler's does.
        """
        self.requests += requests
        return [self._answer(request) for request in requests]

    def update_weights(self, model: object, version: WeightVersion) -> None:
        """Use the version for later generations."""
        self.version = version

    def _answer(self, request: SampleRequest) -> Generation:
        tokens: list[int] = []
        for token in self._reply(request)[: request.max_new_tokens]:
            tokens.append(token)
            if token in self._stop_token_ids:
                break
        stopped = bool(tokens) and tokens[-1] in self._stop_token_ids
        if not stopped and len(tokens) < request.max_new_tokens:
            raise ValueError(
                f"the scripted reply {tuple(tokens)} to prompt {request.prompt_tokens} ends in no stop token and is "
                f"shorter than max_new_tokens ({request.max_new_tokens}); add a stop token"
            )
        return Generation(
            token_ids=tuple(tokens),
            logprobs=(self._logprob,) * len(tokens),
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
            first_version=self.version,
            last_version=self.version,
            experts=experts_of((*request.prompt_tokens, *tokens)[:-1]) if self._experts else None,
        )

    def _reply(self, request: SampleRequest) -> Sequence[int]:
        if not isinstance(self._script, Mapping):
            return self._script(request)
        if request.prompt_tokens not in self._script:
            raise ValueError(f"the script has no reply to prompt {request.prompt_tokens}; add one")
        return self._script[request.prompt_tokens]


class TokenSampler(BatchSampler):
    """Samples one token of every request in each call; token i of prompt `[p]` is p + i, with chosen experts.

    >>> sampler = TokenSampler(length=2)
    >>> [generation] = sampler.sample([SampleRequest((7,), seed=0, max_new_tokens=2)])
    >>> generation.token_ids
    (7, 8)
    """

    def __init__(self, length: int, tokens_per_version: int = 1_000_000) -> None:
        """Create the sampler.

        Args:
            length: number of tokens of a reply.
            tokens_per_version: number of tokens of a reply that are sampled with the same weights.
        """
        super().__init__(batch_size=4)
        self._length = length
        self._tokens_per_version = tokens_per_version
        self._running: dict[int, SampleRequest] = {}
        self._counts: dict[int, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests."""
        return not self._running

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Accept requests."""
        numbers = super().start(requests)
        self._waiting.clear()
        self._running |= zip(numbers, requests, strict=True)
        self._counts |= dict.fromkeys(numbers, 0)
        return numbers

    def reset(self) -> None:
        """Drop all requests."""
        self._running.clear()

    def advance(self) -> list[tuple[int, Generation]]:
        """Sample a token of every request."""
        ended = []
        for number in list(self._running):
            self._counts[number] += 1
            if self._counts[number] == self._length:
                sampled = self._sampled(number, 0)
                ended.append((number, Generation(sampled[0], sampled[1], StopReason.STOP, *sampled[2:])))
                del self._running[number]
        return ended

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return the new tokens of requests in progress."""
        asked = seen.keys() & self._running.keys()
        return {number: self._sampled(number, seen[number]) for number in asked if self._counts[number] > seen[number]}

    def end_conversation(self, conversation: str) -> None:
        """Drop the request of a conversation."""
        self._running = {number: one for number, one in self._running.items() if one.conversation != conversation}

    def _sampled(self, number: int, start: int) -> SampledTokens:
        prompt, count = self._running[number].prompt_tokens, self._counts[number]
        tokens = tuple(range(prompt[0] + start, prompt[0] + count))
        experts = experts_of((*prompt, *range(prompt[0], prompt[0] + count))[:-1])
        # The first part has those of the prompt, too.
        experts = experts[len(prompt) + start - 1 :] if start else experts
        return SampledTokens(tokens, (-1.0,) * len(tokens), 0, (count - 1) // self._tokens_per_version, experts)
