# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The requests in the sampler's slots and the tokens sampled for them, on the host, and the arguments of programs."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np

from marin_rl.sampling.attention import PADDING, Tokens
from marin_rl.sampling.decoding import Slots
from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SampledTokens, SampleRequest, SamplerError
from marin_rl.sampling.sizes import PrefillShape, PrefillShapes
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
        """Create free slots of all data shards. `max_new_tokens` is the largest `AcceptedRequest.allowed`."""
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
        """Return the state for `decode`, for at most `steps` tokens of each slot."""
        sizes = (self._lengths, self._last_tokens, self._stop_states, np.minimum(self._remaining, steps))
        # Copies, because jax may still read an argument after the call has returned.
        copies = (np.array(array) for array in (self.active, *sizes, self._keys, self._temperatures))
        return Slots(*cast(tuple[jax.Array, ...], tuple(copies)))

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: WeightVersion) -> np.ndarray:
        """Add sampled tokens, as in `Decoded`, to the requests; return the number of tokens of each slot.

        `version` is the number of training steps that produced the weights.

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
        """End the requests that are complete by the `stop_states` of `Decoded`; return slot, request and generation."""
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

    def place_of(self, number: int) -> tuple[int, int]:
        """Return the slot of a request in progress, and the length of its prompt."""
        slot = next(index for index, one in enumerate(self._requests) if one is not None and one.number == number)
        return slot, len(self._request(slot).request.prompt_tokens)

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


class PromptPiece(NamedTuple):
    """Consecutive prompt tokens of a slot."""

    slot: int
    """The slot."""
    start: int
    """Position of the first token in its sequence."""
    tokens: np.ndarray
    """int32 `[length]`, token ids."""


def prefill_calls(
    pieces: Sequence[PromptPiece], shapes: PrefillShapes, shards: int, shard_slots: int
) -> Iterator[Tokens]:
    """Yield the arguments of `prefill`: chunks of the pieces, in order; see `PrefillShapes.long_tokens`.

    Slots are numbered within their shard; each shard has `shard_slots`.
    """
    cuts = [shapes.long_tokens(len(tokens)) for _, _, tokens in pieces]
    firsts = [piece._replace(tokens=piece.tokens[:cut]) for piece, cut in zip(pieces, cuts, strict=True)]
    rests = [
        PromptPiece(slot, start + cut, tokens[cut:]) for (slot, start, tokens), cut in zip(pieces, cuts, strict=True)
    ]
    yield from _calls(firsts, shapes.long, shards, shard_slots)
    yield from _calls(rests, shapes.short, shards, shard_slots)


def _calls(pieces: Sequence[PromptPiece], shape: PrefillShape, shards: int, shard_slots: int) -> Iterator[Tokens]:
    """Yield the arguments of calls of one shape.

    A call may have several chunks of a slot, because each layer writes all keys and values before it reads any.
    """
    rows, chunk = shape
    waiting: list[deque[PromptPiece]] = [deque() for _ in range(shards)]
    for slot, start, tokens in pieces:
        waiting[slot // shard_slots] += (
            PromptPiece(slot, start + offset, tokens[offset : offset + chunk])
            for offset in range(0, len(tokens), chunk)
        )
    while any(waiting):
        ids = np.zeros((shards, rows, chunk), np.int32)
        positions = np.full(ids.shape, PADDING, np.int32)
        slots = np.full(ids.shape[:2], shard_slots, np.int32)
        for shard, parts in enumerate(waiting):
            for row in range(min(rows, len(parts))):
                slot, start, tokens = parts.popleft()
                ids[shard, row, : len(tokens)] = tokens
                positions[shard, row, : len(tokens)] = start + np.arange(len(tokens))
                slots[shard, row] = slot % shard_slots
        arrays = ids.reshape(-1, chunk), slots.reshape(-1), positions.reshape(-1, chunk)
        yield Tokens(*cast(tuple[jax.Array, jax.Array, jax.Array], arrays))


def copy_arguments(
    copies: Sequence[tuple[int, int]], shards: int, shard_slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of `copy_slots`, with slots numbered within their shard.

    Source and target of each copy are in the same shard, which has `shard_slots`.
    """
    pairs = np.zeros((2, shards, shard_slots), np.int32)
    counts = np.zeros(shards, np.int32)
    for source, target in copies:
        shard = source // shard_slots
        pairs[:, shard, counts[shard]] = source % shard_slots, target % shard_slots
        counts[shard] += 1
    return pairs[0].reshape(-1), pairs[1].reshape(-1), counts
