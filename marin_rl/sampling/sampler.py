# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The sampler interface: prompts of token ids as input, generations of token ids as output."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from marin_rl.errors import UserError
from marin_rl.types import Generation

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
    """0 is greedy. Log-probabilities are computed at this temperature (at 1 if greedy)."""


@runtime_checkable
class Sampler(Protocol):
    """Continues prompts under the current weights."""

    @property
    def batch_size(self) -> int:
        """Number of requests that are processed together; additional ones wait."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt; generations are in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a new token.
        """
        ...


class PromptTooLongError(ValueError):
    """A prompt does not fit into the context; the message names its length and the limit."""


class SamplerError(UserError):
    """The engine or server returned an invalid output; the message names the request."""
