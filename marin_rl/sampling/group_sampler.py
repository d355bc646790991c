# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler for RL in the learner's process: shared prompts, continuous batching, turns that continue from their cache.

Every sequence has a *slot*, a fixed part of the KV cache. A prompt is processed once, and its cache is copied to the
other samples of its group. A slot is refilled soon after its sequence has ended. A conversation keeps its slot between
turns, so that a further turn costs only its new tokens.

The host decides which request is in which slot, and calls programs of fixed shapes (`marin_rl.sampling.decoding`). Rows
of a program never interact, so a generation is a function of its conversation and the weights.
"""

import contextlib
import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import equinox as eqx
import haliax.partitioning
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax.partitioning import ResourceAxis
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.sampling.attention import PADDING, CacheAxes, Tokens, attention_form
from marin_rl.sampling.cached_model import Cache, CachedModel, cache_axes
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.decoding import Slots, compile_programs, head_shards
from marin_rl.sampling.host_mesh import copy_to_host, count_hosts, host_mesh
from marin_rl.sampling.sampler import (
    LOGPROB_ROUNDING,
    SampledTokens,
    Sampler,
    SampleRequest,
    SamplerError,
    WeightPoll,
    check_requests,
)
from marin_rl.types import Generation, StopReason, WeightVersion

DECODE_STEPS = 16
"""Tokens of each sequence in one call of `decode`."""
REFILL_FRACTION = 16
"""A call of `decode` ends when one in this number of slots can be refilled."""


class PrefillShape(NamedTuple):
    """Sizes of one call of `prefill` for each data shard."""

    rows: int
    """Number of sequences."""
    chunk: int
    """Number of tokens of each sequence."""


@dataclasses.dataclass
class SamplerWork:
    """The work of a sampler since it was created."""

    prefilled_tokens: int = 0
    """Tokens that were added to the cache without being sampled."""
    prefill_calls: int = 0
    """Calls of `prefill`, of `prefill_shape` tokens for each data shard."""
    sampled_tokens: int = 0
    """Sampled tokens."""
    slot_steps: int = 0
    """Decode steps times slots; `sampled_tokens / slot_steps` is the share of slots in use."""


class _Queued(NamedTuple):
    number: int
    request: SampleRequest
    allowed: int


class _Piece(NamedTuple):
    """Consecutive prompt tokens of a slot."""

    slot: int
    start: int
    tokens: np.ndarray


class GroupSampler(Sampler):
    """Continues prompts under the learner's weights.

    Equal requests, weights and `SamplingConfig` give bit-identical generations, independent of other requests and of
    their order. A further turn of a conversation depends also on its earlier turns, because keys and values of sampled
    tokens are rounded differently from those of prompt tokens.
    """

    def __init__(
        self,
        model: LmHeadModel,
        *,
        config: SamplingConfig,
        stop_sequences: Sequence[Sequence[int]],
        max_context: int,
        version: WeightVersion = 0,
        weight_poll: WeightPoll | None = None,
        trainer: TrainerConfig | None = None,
    ) -> None:
        """Check the sizes, without allocating memory or compiling.

        Args:
            model: initial weights. They are shared, not copied: after the learner donates them, call `update_weights`
                before the next request.
            config: sizes, and the type of the KV cache.
            stop_sequences: tokens that end a generation; each a sequence of one or more tokens. May be empty.
            max_context: maximum number of prompt and new tokens of a sequence, at least 2.
            version: number of training steps that produced `model`.
            weight_poll: polls for newer weights during decoding; None disables polling. Polling without newer weights
                does not change generations.
            trainer: mesh, axis mapping and compute precision; None uses one device and `model`'s precision. If its mesh
                spans several processes, each has a sampler on its own devices.

        Raises:
            ValueError: if the sizes are inconsistent, or the KV cache exceeds `config.max_cache_gib`.
        """
        if max_context < 2:
            raise ValueError(f"max_context is {max_context}; it must be at least 2, one prompt token and one new token")
        self._stop_sequences = _stop_table(stop_sequences, model.Vocab.size)
        self._config = config
        self._max_context = max_context
        self._vocab_size = model.Vocab.size
        self._weight_poll = weight_poll
        self._trainer = trainer
        self._version = version
        self._mesh = None if trainer is None else host_mesh(trainer.device_mesh)
        self._num_hosts = 1 if trainer is None else count_hosts(trainer.device_mesh)
        self._shards = 1 if self._mesh is None else self._mesh.size // self._mesh.shape[ResourceAxis.MODEL]
        self._shard_slots = -(-config.max_seqs // (self._shards * self._num_hosts))
        self._num_slots = self._shard_slots * self._shards
        device = jax.devices()[0] if self._mesh is None else self._mesh.devices.flat[0]
        form = attention_form(device.platform, device.device_kind)
        dtype = jnp.dtype(config.cache_dtype(device.platform))
        heads = head_shards(trainer, self._mesh)
        axes = cache_axes(model.config, form, self._num_slots, max_context, heads)
        _check_cache_size(axes, dtype, self._shards * heads, config, max_context)
        self._prefill = prefill_shape(device.platform, self._shard_slots, max_context, config.max_new_tokens)
        steps = DECODE_STEPS if weight_poll is None else min(weight_poll.decode_steps, DECODE_STEPS)
        self._programs = compile_programs(
            trainer,
            model.config,
            form,
            slots=self._num_slots,
            context=max_context,
            dtype=dtype,
            steps=steps,
            mesh=self._mesh,
        )
        self._source = model
        self._count = 0
        self.work = SamplerWork()
        """The work since the sampler was created."""
        self.reset()

    @property
    def version(self) -> WeightVersion:
        """Version of the weights that the next tokens are sampled with."""
        return self._version

    @property
    def batch_size(self) -> int:
        """Number of sequences that are decoded together."""
        return self._num_slots

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests, or all wait for slots of conversations between two turns."""
        if self._active.any() or self._next_turns:
            return False
        return not self._queue or len(self._slot_of) == self._num_slots

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Queue requests for `advance`; see `Sampler.start`."""
        allowed = check_requests(
            requests,
            max_context=self._max_context,
            vocab_size=self._vocab_size,
            max_new_tokens=self._config.max_new_tokens,
        )
        in_progress = set(self._in_progress)
        for request in requests:
            if request.conversation in in_progress:
                raise ValueError(
                    f"conversation {request.conversation!r} has two requests at the same time; wait for the first "
                    "generation"
                )
            if request.conversation is not None:
                in_progress.add(request.conversation)
        self._in_progress = in_progress
        numbers = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        for queued in map(_Queued, numbers, requests, allowed):
            conversation = queued.request.conversation
            (self._next_turns if conversation in self._slot_of else self._queue).append(queued)
        return numbers

    def advance(self) -> list[tuple[int, Generation]]:
        """Sample some tokens of the started requests; see `Sampler.advance`."""
        if self.is_idle:
            return []
        try:
            with self._on_mesh():
                if self._weight_poll is not None:
                    self._weight_poll.poll()
                self._admit()
                return self._decode()
        except BaseException:
            # Also after an interrupt: the cache may have been donated to a program that did not return.
            self.reset()
            raise

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return the new tokens of requests in progress; see `Sampler.progress`."""
        found: dict[int, SampledTokens] = {}
        for slot in np.flatnonzero(self._active).tolist():
            running, count = self._running[slot], int(self._counts[slot])
            assert running is not None
            if (start := seen.get(running.number, count)) < count:
                found[running.number] = self._sampled(slot, start)
        return found

    def end_conversation(self, conversation: str) -> None:
        """Free the slot of a conversation; see `Sampler.end_conversation`. A request in progress is dropped."""
        if conversation in self._in_progress:
            self._in_progress.remove(conversation)
            for waiting in (self._queue, self._next_turns):
                for queued in [queued for queued in waiting if queued.request.conversation == conversation]:
                    waiting.remove(queued)
        slot = self._slot_of.pop(conversation, None)
        if slot is not None:
            self._active[slot] = False

    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Use new weights for later tokens.

        Sequences and conversations that have begun keep the cache of the former weights, as in PipelineRL (Piché et al.
        2025). The log-probabilities are those of the distribution that each token is sampled from.

        Args:
            model: same structure, shapes and dtypes as before.
            version: number of training steps that produced it.

        Raises:
            ValueError: if the structure, a shape or a dtype differs.
        """
        if _signature(model) != _signature(self._source):
            raise ValueError(
                f"update_weights to version {version}: the model's structure, shapes or dtypes differ from those "
                "of the sampler's; create a new GroupSampler for it"
            )
        self._source, self._model = model, None
        self._version = version
        self._slot_of_prompt.clear()

    def prepare(self) -> None:
        """Copy the weights to the devices of this process, in the layout for decoding; see `Sampler.prepare`."""
        # GPT-2 has flags of its dropout layers among its weights; programs take arrays only.
        model = eqx.filter(self._source, eqx.is_array)
        if self._trainer is not None and self._num_hosts > 1:
            mesh = self._trainer.device_mesh
            with self._trainer.use_device_mesh():
                model = _cast_program(self._trainer.mp)(model)
            model = copy_to_host(model, mesh, self._trainer.compute_axis_mapping)
        with self._on_mesh():
            self._model = self._programs.prepare(model)

    def reset(self) -> None:
        """Drop all requests and conversations, and release the device memory until the next request."""
        slots = self._num_slots
        self._model: CachedModel | None = None
        self._cache: Cache | None = None
        self._queue: deque[_Queued] = deque()
        self._next_turns: list[_Queued] = []
        """Requests of conversations that have a slot."""
        self._in_progress: set[str] = set()
        """Conversations with a request that has not ended."""
        self._slot_of: dict[str, int] = {}
        """Slot of each open conversation."""
        self._slot_of_prompt: dict[tuple[int, tuple[int, ...]], int] = {}
        """A slot whose cache begins with a prompt under the current weights, by shard and prompt."""
        self._prompts: list[tuple[int, ...]] = [()] * slots
        """The prompt with which each slot's sequence began."""
        self._cached: list[tuple[int, ...]] = [()] * slots
        """The tokens in each slot's cache after its last generation."""
        self._running: list[_Queued | None] = [None] * slots
        self._active = np.zeros(slots, bool)
        self._lengths = np.zeros(slots, np.int32)
        self._last_tokens = np.zeros(slots, np.int32)
        self._remaining = np.zeros(slots, np.int32)
        self._keys = np.zeros((slots, 2), np.uint32)
        self._temperatures = np.ones(slots, np.float32)
        self._counts = np.zeros(slots, np.int64)
        """Number of tokens sampled for the current request."""
        self._tokens = np.full((slots, self._config.max_new_tokens), -1, np.int32)
        self._logprobs = np.zeros(self._tokens.shape, np.float32)
        self._first_versions = np.zeros(slots, np.int64)
        self._last_versions = np.zeros(slots, np.int64)

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        if self._mesh is None:
            yield
            return
        with haliax.partitioning.set_mesh(self._mesh):
            yield

    def _admit(self) -> None:
        """Put waiting requests into slots, and their prompts into the cache."""
        pieces: list[_Piece] = []
        copies: list[tuple[int, int]] = []
        for queued in self._next_turns:
            pieces += self._continue(queued)
        self._next_turns.clear()
        free = self._free_slots() if self._queue else []
        while self._queue and any(free):
            queued = self._queue.popleft()
            slot = self._take_slot(free, queued.request.prompt_tokens)
            pieces += self._begin(slot, queued, copies)
        if not pieces and not copies:
            return
        model, cache = self._loaded()
        self.work.prefilled_tokens += sum(len(piece.tokens) for piece in pieces)
        for tokens in self._prefill_calls(pieces):
            self.work.prefill_calls += 1
            cache = self._programs.prefill(model, cache, tokens)
        if copies:
            cache = self._programs.copy_slots(cache, *self._copy_arguments(copies))
        self._cache = cache

    def _loaded(self) -> tuple[CachedModel, Cache]:
        """Return model and cache, which is donated to the next program."""
        if self._model is None:
            if self._num_hosts > 1:
                raise RuntimeError("weights of a mesh of several processes are copied by `prepare`, in all of them")
            self.prepare()
            assert self._model is not None
        cache, self._cache = self._cache, None
        return self._model, self._programs.empty() if cache is None else cache

    def _free_slots(self) -> list[dict[int, None]]:
        """Return the free slots of each shard as an ordered set, the lowest last."""
        taken = self._active.copy()
        taken[list(self._slot_of.values())] = True
        return [
            dict.fromkeys((shard * self._shard_slots + np.flatnonzero(~row)[::-1]).tolist())
            for shard, row in enumerate(taken.reshape(self._shards, -1))
        ]

    def _take_slot(self, free: Sequence[dict[int, None]], prompt: tuple[int, ...]) -> int:
        """Choose a slot in a shard that has the prompt in its cache, otherwise in the shard with most free slots."""
        shards = [shard for shard, slots in enumerate(free) if slots]
        sharing = [shard for shard in shards if (shard, prompt) in self._slot_of_prompt]
        shard = max(sharing or shards, key=lambda shard: len(free[shard]))
        slot = self._slot_of_prompt.get((shard, prompt))
        # So the source of a copy is never a free slot, which a later request could overwrite before the copy.
        if slot is None or slot not in free[shard]:
            return free[shard].popitem()[0]
        del free[shard][slot]
        return slot

    def _begin(self, slot: int, queued: _Queued, copies: list[tuple[int, int]]) -> list[_Piece]:
        """Assign a free slot; return the prompt tokens to process, or append to `copies` if a slot has them."""
        prompt = queued.request.prompt_tokens
        if prompt != self._prompts[slot]:
            self._forget_prompt(slot)
            self._prompts[slot] = prompt
        if queued.request.conversation is not None:
            self._slot_of[queued.request.conversation] = slot
        self._assign(slot, queued)
        source = self._slot_of_prompt.get((slot // self._shard_slots, prompt))
        if len(prompt) == 1 or source == slot:
            return []
        if source is not None:
            copies.append((source, slot))
            return []
        self._slot_of_prompt[slot // self._shard_slots, prompt] = slot
        return [_Piece(slot, 0, np.array(prompt[:-1], np.int32))]

    def _continue(self, queued: _Queued) -> list[_Piece]:
        """Start a further turn in its conversation's slot; return the tokens that are not in the cache."""
        prompt, conversation = queued.request.prompt_tokens, queued.request.conversation
        assert conversation is not None
        slot = self._slot_of[conversation]
        start = min(_common_prefix(self._cached[slot], prompt), len(prompt) - 1)
        if start < len(self._prompts[slot]) - 1:
            self._forget_prompt(slot)
        self._assign(slot, queued)
        return [_Piece(slot, start, np.array(prompt[start:-1], np.int32))] if start < len(prompt) - 1 else []

    def _assign(self, slot: int, queued: _Queued) -> None:
        request = queued.request
        self._running[slot] = queued
        self._active[slot] = True
        self._lengths[slot], self._last_tokens[slot] = len(request.prompt_tokens) - 1, request.prompt_tokens[-1]
        self._remaining[slot] = queued.allowed
        self._keys[slot] = divmod(request.seed, 2**32)
        self._temperatures[slot] = request.temperature
        self._counts[slot] = 0
        self._tokens[slot] = -1

    def _forget_prompt(self, slot: int) -> None:
        """Stop sharing the cache of a slot's first prompt."""
        key = slot // self._shard_slots, self._prompts[slot]
        if self._slot_of_prompt.get(key) == slot:
            del self._slot_of_prompt[key]

    def _copy_arguments(self, copies: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the arguments of `copy_slots`, with slots numbered within their shard."""
        pairs = np.zeros((2, self._shards, self._shard_slots), np.int32)
        counts = np.zeros(self._shards, np.int32)
        for source, target in copies:
            shard = source // self._shard_slots
            pairs[:, shard, counts[shard]] = source % self._shard_slots, target % self._shard_slots
            counts[shard] += 1
        return pairs[0].reshape(-1), pairs[1].reshape(-1), counts

    def _prefill_calls(self, pieces: Sequence[_Piece]) -> Iterator[Tokens]:
        """Yield the arguments of `prefill`: chunks of the pieces, in order.

        A call may have several chunks of a slot, because each layer writes all keys and values before it reads any.
        """
        rows, chunk = self._prefill
        waiting: list[deque[_Piece]] = [deque() for _ in range(self._shards)]
        for slot, start, tokens in pieces:
            waiting[slot // self._shard_slots] += (
                _Piece(slot, start + offset, tokens[offset : offset + chunk]) for offset in range(0, len(tokens), chunk)
            )
        while any(waiting):
            ids = np.zeros((self._shards, rows, chunk), np.int32)
            positions = np.full(ids.shape, PADDING, np.int32)
            slots = np.full(ids.shape[:2], self._shard_slots, np.int32)
            for shard, parts in enumerate(waiting):
                for row in range(min(rows, len(parts))):
                    slot, start, tokens = parts.popleft()
                    ids[shard, row, : len(tokens)] = tokens
                    positions[shard, row, : len(tokens)] = start + np.arange(len(tokens))
                    slots[shard, row] = slot % self._shard_slots
            arrays = ids.reshape(-1, chunk), slots.reshape(-1), positions.reshape(-1, chunk)
            yield Tokens(*cast(tuple[jax.Array, jax.Array, jax.Array], arrays))

    def _decode(self) -> list[tuple[int, Generation]]:
        """Sample some tokens in all active slots, and return the generations that have ended."""
        # Refill slots before few are active: a call costs the same for any number of sequences.
        refills = bool(self._queue or self._slot_of)
        exit_after = max(self._shard_slots // REFILL_FRACTION, 1) if refills else self._shard_slots
        window = self._stop_sequences.shape[1] - 1
        ends = self._counts[:, None] - np.arange(window, 0, -1)
        recent = np.where(ends < 0, -1, np.take_along_axis(self._tokens, np.maximum(ends, 0), axis=1))
        # Copies, because jax may still read an argument after the call has returned.
        slots = Slots(
            *(
                cast(jax.Array, np.array(array))
                for array in (
                    self._active,
                    self._lengths,
                    self._last_tokens,
                    recent.astype(np.int32),
                    self._remaining,
                    self._keys,
                    self._temperatures,
                )
            )
        )
        model, cache = self._loaded()
        self._cache, decoded = self._programs.decode(model, cache, slots, self._stop_sequences, np.int32(exit_after))
        return self._collect(*map(np.asarray, decoded))

    def _collect(self, tokens: np.ndarray, logprobs: np.ndarray, stopped: np.ndarray) -> list[tuple[int, Generation]]:
        """Add the fields of `Decoded` to their requests; return and remove those that have ended."""
        sampled = tokens >= 0
        steps, slots = np.nonzero(sampled)
        columns = self._counts[slots] + steps
        self._tokens[slots, columns] = tokens[steps, slots]
        self._logprobs[slots, columns] = logprobs[steps, slots]
        counts = sampled.sum(axis=0)
        self.work.sampled_tokens += len(steps)
        self.work.slot_steps += int(counts.max()) * self._num_slots
        self._first_versions[(counts > 0) & (self._counts == 0)] = self._version
        self._last_versions[counts > 0] = self._version
        self._counts += counts
        self._lengths += counts
        self._remaining -= counts
        newest = self._tokens[np.arange(self._num_slots), self._counts - 1]
        self._last_tokens = np.where(counts > 0, newest, self._last_tokens)
        ended = np.flatnonzero(self._active & (stopped | (self._remaining == 0)))
        self._active[ended] = False
        return [self._generation(slot, bool(stopped[slot])) for slot in ended.tolist()]

    def _generation(self, slot: int, stopped: bool) -> tuple[int, Generation]:
        """Return the ended request of a slot."""
        running = self._running[slot]
        assert running is not None
        tokens, logprobs = self._sampled(slot, 0)
        self._running[slot] = None
        if running.request.conversation is not None:
            self._in_progress.discard(running.request.conversation)
        self._cached[slot] = (*running.request.prompt_tokens, *tokens[:-1])
        generation = Generation(
            token_ids=tokens,
            logprobs=logprobs,
            stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
            first_version=int(self._first_versions[slot]),
            last_version=int(self._last_versions[slot]),
        )
        return running.number, generation

    def _sampled(self, slot: int, start: int) -> SampledTokens:
        """Return the sampled tokens of a slot's request from index `start`, with valid log-probabilities."""
        running, count = self._running[slot], self._counts[slot]
        assert running is not None
        logprobs = self._logprobs[slot, start:count]
        valid = (logprobs <= LOGPROB_ROUNDING) & np.isfinite(logprobs)
        if not valid.all():
            raise SamplerError(
                f"request {running.number}: a sampled token has log-probability {logprobs[~valid][0]}; it must be "
                "finite and at most 0. Check the weights for NaN"
            )
        return SampledTokens(tuple(self._tokens[slot, start:count].tolist()), tuple(np.minimum(logprobs, 0.0).tolist()))


def prefill_shape(platform: str, slots: int, max_context: int, max_new_tokens: int) -> PrefillShape:
    """Return the sizes of a call of `prefill`.

    The sizes are fixed, because a program of other shapes may round differently, and then the time at which a prompt
    arrives would affect its tokens. On a CPU small calls waste least; accelerators need many tokens per call.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        slots: number of slots of a data shard.
        max_context: maximum number of tokens of a sequence.
        max_new_tokens: maximum number of new tokens of a request.
    """
    tokens, shortest, longest = (256, 8, 32) if platform == "cpu" else (4096, 128, 512)
    prompt_room = max(max_context - max_new_tokens, 1)
    chunk = min(max(1 << (prompt_room - 1).bit_length(), shortest), longest, max_context)
    return PrefillShape(min(tokens // chunk, slots), chunk)


def _stop_table(sequences: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Return stop sequences as rows, aligned at the end, with -1 before them."""
    table = sorted({tuple(sequence) for sequence in sequences})
    invalid = [sequence for sequence in table if not sequence or min(sequence) < 0 or max(sequence) >= vocab_size]
    if invalid:
        raise ValueError(
            f"stop_sequences has {list(invalid[0])}; a stop sequence has one or more tokens of the model's vocabulary "
            f"of {vocab_size}"
        )
    # A token of -2 is never sampled.
    rows = np.full((max(len(table), 1), max(map(len, table), default=1)), -1 if table else -2, np.int32)
    for row, sequence in zip(rows, table, strict=False):
        row[len(row) - len(sequence) :] = sequence
    return rows


def _check_cache_size(
    axes: Sequence[CacheAxes], dtype: jnp.dtype, devices: int, config: SamplingConfig, max_context: int
) -> None:
    """Compare the size of the KV cache on one device with its limit."""
    elements = sum(math.prod(axis.size for axis in array) for layer in axes for array in layer)
    gib = elements * dtype.itemsize / devices / 2**30
    if config.max_cache_gib is not None and gib > config.max_cache_gib:
        raise ValueError(
            f"the KV cache of {config.max_seqs} sequences (sampling.max_seqs) of {max_context} tokens takes {gib:.2f} "
            f"GiB on each device, more than sampling.max_cache_gib {config.max_cache_gib:g}; lower sampling.max_seqs "
            "or rollouts.max_length, or set sampling.kv_cache_dtype: bfloat16"
        )


def _common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the number of leading tokens that are equal."""
    if second[: len(first)] == first:
        return len(first)
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second)
    )


@functools.cache
def _cast_program(precision: jmp.Policy) -> Callable[[LmHeadModel], LmHeadModel]:
    # The copies are made of the compute type, which may be smaller.
    return jax.jit(precision.cast_to_compute)


def _signature(model: LmHeadModel) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
