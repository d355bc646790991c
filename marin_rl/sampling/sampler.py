# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What every sampler offers: prompts of token ids in, generations of token ids out."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from marin_rl.types import Generation

LOGPROB_ROUNDING = 1e-5
"""Nats by which rounding may push the log-probability of a near-certain token above 0."""


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One prompt to be continued once."""

    prompt_tokens: tuple[int, ...]
    """`[length]`, the exact tokens that the policy sees. At least one."""
    seed: int
    """Non-negative, below 2**63. Equal requests with equal seeds and equal weights give equal generations,
    whatever else is in the batch."""
    max_new_tokens: int
    """Most tokens to sample, the stop token included. At least one."""
    temperature: float = 1.0
    """0 is greedy. Log-probabilities are those at this temperature (at 1 where greedy)."""


@runtime_checkable
class Sampler(Protocol):
    """Continues prompts under the current weights."""

    @property
    def batch_size(self) -> int:
        """Requests that are answered together; with more, some wait for the others."""
        ...

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt; the answers come in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a single new token.
        """
        ...


class PromptTooLongError(ValueError):
    """A prompt does not fit into the context; the message names its length and the limit."""


class SamplerError(RuntimeError):
    """The engine answered something it should not have; the message names the request."""
