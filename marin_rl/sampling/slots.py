# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The requests in the sampler's slots, and the tokens that have been sampled for them, on the host."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import jax
import numpy as np

from marin_rl.sampling.decoding import Slots
from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SampledTokens, SampleRequest, SamplerError
from marin_rl.sampling.stops import ENDED, START
from marin_rl.types import Generation, StopReason, WeightVersion


class AcceptedRequest(NamedTuple):
    """A valid request, which waits for a slot or has one."""

    number: int
    """Number of the request, unique for the sampler."""
    request: SampleRequest
    """The request."""
    allowed: int
    """Maximum number of new tokens."""


class SlotTable:
    """The state of every slot: arrays whose first axis is the slot.

    `decode` gets them as `decode_inputs`, and its output is added by `add`.
    """

    def __init__(self, num_slots: int, max_new_tokens: int) -> None:
        """Create free slots.

        Args:
            num_slots: number of slots, of all data shards together.
            max_new_tokens: largest `AcceptedRequest.allowed`.
        """
        self.active = np.zeros(num_slots, bool)
        """Whether tokens are sampled."""
        self._requests: list[AcceptedRequest | None] = [None] * num_slots
        self._lengths = np.zeros(num_slots, np.int32)
        self._last_tokens = np.zeros(num_slots, np.int32)
        self._stop_states = np.full(num_slots, START, np.int32)
        self._remaining = np.zeros(num_slots, np.int32)
        self._keys = np.zeros((num_slots, 2), np.uint32)
        self._temperatures = np.ones(num_slots, np.float32)
        self._counts = np.zeros(num_slots, np.int64)
        """Number of tokens sampled for the current request."""
        self._tokens = np.full((num_slots, max_new_tokens), -1, np.int32)
        self._logprobs = np.zeros(self._tokens.shape, np.float32)
        self._first_versions = np.zeros(num_slots, np.int64)
        self._last_versions = np.zeros(num_slots, np.int64)

    def assign(self, slot: int, accepted: AcceptedRequest) -> None:
        """Start a request in a slot, whose cache has, or will have, all tokens of its prompt but the last."""
        request = accepted.request
        self._requests[slot] = accepted
        self.active[slot] = True
        self._lengths[slot], self._last_tokens[slot] = len(request.prompt_tokens) - 1, request.prompt_tokens[-1]
        self._stop_states[slot] = START
        self._remaining[slot] = accepted.allowed
        self._keys[slot] = divmod(request.seed, 2**32)
        self._temperatures[slot] = request.temperature
        self._counts[slot] = 0
        self._tokens[slot] = -1

    def decode_inputs(self, steps: int) -> Slots:
        """Return the state for `decode`.

        Args:
            steps: maximum number of tokens of each slot in this call.
        """
        sizes = (self._lengths, self._last_tokens, self._stop_states, np.minimum(self._remaining, steps))
        # Copies, because jax may still read an argument after the call has returned.
        copies = (np.array(array) for array in (self.active, *sizes, self._keys, self._temperatures))
        return Slots(*cast(tuple[jax.Array, ...], tuple(copies)))

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: WeightVersion) -> np.ndarray:
        """Add sampled tokens to the requests.

        Args:
            tokens: as in `Decoded`.
            logprobs: as in `Decoded`.
            version: number of training steps that produced the weights.

        Returns:
            The number of sampled tokens of each slot.

        Raises:
            SamplerError: if a log-probability is invalid.
        """
        sampled = tokens >= 0
        steps, slots = np.nonzero(sampled)
        values = logprobs[steps, slots]
        valid = (values <= LOGPROB_ROUNDING) & np.isfinite(values)
        if not valid.all():
            first = np.argmin(valid)
            number = self._request(int(slots[first])).number
            raise SamplerError(
                f"request {number}: a sampled token has log-probability {values[first]}; it must be finite and at most "
                "0. Check the weights for NaN"
            )
        columns = self._counts[slots] + steps
        self._tokens[slots, columns] = tokens[steps, slots]
        self._logprobs[slots, columns] = np.minimum(values, 0.0)
        counts = sampled.sum(axis=0)
        self._first_versions[(counts > 0) & (self._counts == 0)] = version
        self._last_versions[counts > 0] = version
        self._counts += counts
        self._lengths += counts
        self._remaining -= counts
        newest = self._tokens[np.arange(len(self._counts)), self._counts - 1]
        self._last_tokens = np.where(counts > 0, newest, self._last_tokens)
        return counts

    def end(self, stop_states: np.ndarray) -> list[tuple[int, AcceptedRequest, Generation]]:
        """End the requests that are complete.

        Args:
            stop_states: as in `Decoded`.

        Returns:
            Slot, request and generation of each.
        """
        self._stop_states = np.array(stop_states)
        stopped = self._stop_states == ENDED
        ended = np.flatnonzero(self.active & (stopped | (self._remaining == 0)))
        self.active[ended] = False
        return [(slot, *self._finish(slot, stopped=bool(stopped[slot]))) for slot in ended.tolist()]

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return the new tokens of active requests; see `Sampler.progress`."""
        found: dict[int, SampledTokens] = {}
        for slot in np.flatnonzero(self.active).tolist():
            number, count = self._request(slot).number, int(self._counts[slot])
            if (start := seen.get(number, count)) < count:
                found[number] = self._sampled(slot, start)
        return found

    def _finish(self, slot: int, *, stopped: bool) -> tuple[AcceptedRequest, Generation]:
        accepted = self._request(slot)
        sampled = self._sampled(slot, 0)
        self._requests[slot] = None
        return accepted, Generation(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
            first_version=sampled.first_version,
            last_version=sampled.last_version,
        )

    def _request(self, slot: int) -> AcceptedRequest:
        accepted = self._requests[slot]
        assert accepted is not None
        return accepted

    def _sampled(self, slot: int, start: int) -> SampledTokens:
        """Return the sampled tokens of a slot's request from index `start`."""
        new = slice(start, self._counts[slot])
        return SampledTokens(
            tuple(self._tokens[slot, new].tolist()),
            tuple(self._logprobs[slot, new].tolist()),
            int(self._first_versions[slot]),
            int(self._last_versions[slot]),
        )
