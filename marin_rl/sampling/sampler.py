# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sampler interface: prompts of token ids as input, generations of token ids as output."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.types import Generation, WeightVersion
from marin_rl.utils.errors import UserError

LOGPROB_ROUNDING = 1e-5
"""Rounding error, in nats, by which the log-probability of a near-certain token may exceed 0."""


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One prompt to continue."""

    prompt_tokens: tuple[int, ...]
    """`[length]`, the exact tokens that the policy sees. At least one."""
    seed: int
    """Non-negative, below 2**63. Equal requests with equal seeds and weights give equal generations, independent of the
    rest of the batch."""
    max_new_tokens: int
    """Maximum number of tokens to sample, the stop token included. At least one."""
    temperature: float = 1.0
    """0 is greedy; otherwise at least 1e-30. Log-probabilities are computed at this temperature (at 1 if greedy)."""
    conversation: str | None = None
    """Identifies the turns of one conversation, so that a further turn can reuse the work of earlier ones, until
    `Sampler.end_conversation`. A turn is requested after the previous one has ended. None: a request on its own."""


class SampledTokens(NamedTuple):
    """Consecutive tokens of a request in progress."""

    token_ids: tuple[int, ...]
    """`[length]`, the sampled tokens."""
    logprobs: tuple[float, ...]
    """`[length]`, their log-probabilities, as in `Generation`."""
    first_version: WeightVersion
    """Version of the weights that produced the request's first token."""
    last_version: WeightVersion
    """Version of the weights that produced the last of these tokens."""
    experts: np.ndarray | None = None
    """`Generation.experts` up to the token before the last of these, without the rows that earlier parts have."""


class Sampler(abc.ABC):
    """Continues prompts under the current weights."""

    @property
    @abc.abstractmethod
    def batch_size(self) -> int:
        """Number of requests that are processed together; additional ones wait."""

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether `advance` has no effect until a request is started or a conversation ends."""

    @abc.abstractmethod
    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Accept requests, which `advance` processes; return a number for each, unique for this sampler.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a new token; no request is accepted.
            ValueError: if a request is malformed; no request is accepted.
        """

    @abc.abstractmethod
    def advance(self) -> list[tuple[int, Generation]]:
        """Process the accepted requests for a short time.

        Returns:
            Number and generation of each request that has ended. May be empty; is empty without requests.

        Raises:
            SamplerError: if a result is invalid. After any error all requests and conversations are dropped.
        """

    @abc.abstractmethod
    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return the new tokens of requests in progress, which `advance` will return again as part of a generation.

        Args:
            seen: number of tokens that the caller has already received, by number of the request.

        Returns:
            The tokens after those, for each of these requests that has any. Empty if the sampler only knows complete
            generations.
        """

    @abc.abstractmethod
    def prepare(self) -> None:
        """Load the weights for the next requests.

        If several training processes share the learner's mesh, all of them call this together before the requests of
        each round; `reset` ends the round. Otherwise the call is optional.
        """

    @abc.abstractmethod
    def end_conversation(self, conversation: str) -> None:
        """Release the resources of a conversation, which sends no further requests. It need not have sent any."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Drop all requests and conversations, and release resources that the next request would allocate again."""

    @abc.abstractmethod
    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Use new weights for later tokens. `version` is the number of training steps that produced them."""

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt, end all conversations and reset; generations are in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a new token; nothing is sampled.
            ValueError: if a request is malformed; nothing is sampled.
            SamplerError: if a result is invalid.
        """
        try:
            numbers = self.start(requests)
            started = dict(zip(numbers, requests, strict=True))
            generations: dict[int, Generation] = {}
            while len(generations) < len(numbers):
                for number, generation in self.advance():
                    generations[number] = generation
                    if (conversation := started[number].conversation) is not None:
                        self.end_conversation(conversation)
            return [generations[number] for number in numbers]
        finally:
            self.reset()


class PromptTooLongError(ValueError):
    """A prompt does not fit into the context; the message names its length and the limit."""


class SamplerError(UserError):
    """The engine or server returned an invalid output; the message names the request."""


@dataclasses.dataclass(frozen=True)
class WeightPoll:
    """Polls for newer weights between decode steps."""

    poll: Callable[[], None]
    """Called before every few decode steps, in the thread that samples. It may call
    `update_weights`; an exception ends the call of `advance`."""
    decode_steps: int
    """Number of decode steps between two polls; each samples one token per sequence. At least 1."""


def check_requests(
    requests: Sequence[SampleRequest], *, max_context: int, vocab_size: int, max_new_tokens: int
) -> list[int]:
    """Validate requests and return the maximum number of new tokens of each; see `allowed_tokens`."""
    return [
        allowed_tokens(index, request, max_context=max_context, vocab_size=vocab_size, max_new_tokens=max_new_tokens)
        for index, request in enumerate(requests)
    ]


def allowed_tokens(
    index: int, request: SampleRequest, *, max_context: int, vocab_size: int, max_new_tokens: int
) -> int:
    """Validate a request and return the maximum number of new tokens.

    `index` names the request in errors. `max_context` counts prompt and new tokens of a sequence; `max_new_tokens` is
    the maximum of `request.max_new_tokens`.

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
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < math.inf:
        raise ValueError(
            f"request {index}: temperature is {request.temperature}; it must be 0 (greedy) or at least "
            f"{MIN_TEMPERATURE}"
        )
    if not 0 <= request.seed < 2**63:
        raise ValueError(f"request {index}: seed is {request.seed}; it must be at least 0 and below 2**63")
    return min(request.max_new_tokens, max_context - length)
