# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler for RL in the learner's process: shared prompts, continuous batching, turns that continue from their cache.

Every sequence has a *slot*, a fixed part of the KV cache. A prompt is processed once, and its cache is copied to the
other samples of its group. A slot is refilled soon after its sequence has ended. A conversation keeps its slot between
turns, so that a further turn costs only its new tokens.

This file decides which request is in which slot. `slots` has the state of each slot and the arguments of programs, and
`decoding` the programs, of fixed shapes. Rows of a program never interact, so a generation is a
function of its conversation and the weights.
"""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import equinox as eqx
import haliax.partitioning
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.cached_model import Cache, ModelArrays, records_experts
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.decoding import compile_programs, conversion_program, recorded_experts
from marin_rl.sampling.sampler import (
    SampledTokens,
    Sampler,
    SampleRequest,
    WeightPoll,
    check_requests,
)
from marin_rl.sampling.sizes import check_cache_size, copy_to_each_process, sampler_sizes
from marin_rl.sampling.slots import AcceptedRequest, PromptPiece, SlotTable, copy_arguments, prefill_calls
from marin_rl.sampling.stops import stop_table
from marin_rl.types import Generation, WeightVersion
from marin_rl.utils.devices.trainer_config import TrainerConfig

REFILL_FRACTION = 16
"""A call of `decode` ends when one in this number of slots can be refilled."""


@dataclasses.dataclass
class SamplerWork:
    """The work of a sampler since it was created."""

    prefilled_tokens: int = 0
    """Tokens that were added to the cache without being sampled."""
    prefill_positions: int = 0
    """Positions of all calls of `prefill`, padding included."""
    sampled_tokens: int = 0
    """Sampled tokens."""
    slot_steps: int = 0
    """Decode steps times slots; `sampled_tokens / slot_steps` is the share of slots in use."""


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
        stop_token_ids: Collection[int],
        max_context: int,
        token_bytes: Callable[[int], bytes] | None = None,
        version: WeightVersion = 0,
        weight_poll: WeightPoll | None = None,
        trainer: TrainerConfig | None = None,
        call_seconds: float = math.inf,
        experts: bool = False,
    ) -> None:
        """Check the sizes, without allocating memory or compiling.

        Args:
            model: initial weights. They are shared, not copied: after the learner donates them, call `update_weights`
                before the next request.
            config: sizes, the type of the KV cache, and stop texts.
            stop_token_ids: tokens that end a generation. May be empty.
            max_context: maximum number of prompt and new tokens of a sequence, at least 2.
            token_bytes: returns the bytes that a token adds to a text; needed for stop texts.
            version: number of training steps that produced `model`.
            weight_poll: polls for newer weights during decoding; None disables polling. Polling without newer weights
                does not change generations.
            trainer: mesh, axis mapping and compute precision; None uses one device and `model`'s precision. If its mesh
                spans several processes, each has a sampler on its own devices.
            call_seconds: time after which `advance` returns, about: between two decode steps, after at most
                `sizes.DECODE_STEPS`. New requests wait that long for a free slot, and parts of a stream for the next
                one.
            experts: whether generations have the chosen experts of a mixture.

        Raises:
            ValueError: if the sizes are inconsistent, or the KV cache exceeds `config.max_cache_gib`.
        """
        if max_context < 2:
            raise ValueError(f"max_context is {max_context}; it must be at least 2, one prompt token and one new token")
        self._stops = stop_table(model.Vocab.size, stop_token_ids, config.stop, token_bytes)
        self._config = config
        self._vocab_size = model.Vocab.size
        self._weight_poll = weight_poll
        self._trainer = trainer
        self._version = version
        self._sizes = sampler_sizes(config, max_context, trainer, experts=experts)
        check_cache_size(model.config, self._sizes, config)
        most = self._sizes.decode_steps
        self._steps = most if weight_poll is None else min(weight_poll.decode_steps, most)
        # The same program for any number of steps, because XLA rounds a loop of one step differently.
        self._programs = compile_programs(trainer, model.config, self._sizes)
        self._call_seconds = call_seconds
        self._step_seconds = 0.0
        """Time of a decode step in the last call."""
        self._source, self._signature = model, _signature(model)
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
        return self._sizes.slots

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests, or all wait for slots of conversations between two turns."""
        if self._slots.active.any() or self._next_turns:
            return False
        return not self._queue or len(self._slot_of) == self._sizes.slots

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Queue requests for `advance`; see `Sampler.start`."""
        allowed = check_requests(
            requests,
            max_context=self._sizes.context,
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
        for queued in map(AcceptedRequest, numbers, requests, allowed):
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
        found = self._slots.progress(seen)
        if not found or self._cache is None or not records_experts(self._cache, self._source.config):
            return found
        return {number: self._with_experts(number, seen[number], part) for number, part in found.items()}

    def _with_experts(self, number: int, start: int, part: SampledTokens) -> SampledTokens:
        """Add the experts of the tokens that no earlier part has; the first part has those of the prompt."""
        assert self._cache is not None
        slot, prompt = self._slots.place_of(number)
        experts = np.asarray(recorded_experts(self._cache, np.int32(slot)))
        last = prompt + start + len(part.token_ids) - 1
        return part._replace(experts=experts[prompt + start - 1 if start else 0 : last])

    def end_conversation(self, conversation: str) -> None:
        """Free the slot of a conversation; see `Sampler.end_conversation`. A request in progress is dropped."""
        if conversation in self._in_progress:
            self._in_progress.remove(conversation)
            for waiting in (self._queue, self._next_turns):
                for queued in [queued for queued in waiting if queued.request.conversation == conversation]:
                    waiting.remove(queued)
        slot = self._slot_of.pop(conversation, None)
        if slot is not None:
            self._slots.active[slot] = False

    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Use new weights for later tokens.

        Sequences and conversations that have begun keep the cache of the former weights, as in PipelineRL (Piché et al.
        2025). The log-probabilities are those of the distribution that each token is sampled from. The new model has
        the same structure, shapes and dtypes as before. `version` is the number of training steps that produced it.

        Raises:
            ValueError: if the structure, a shape or a dtype differs.
        """
        if _signature(model) != self._signature:
            raise ValueError(
                f"update_weights to version {version}: the model's structure, shapes or dtypes differ from those "
                "of the sampler's; create a new GroupSampler for it"
            )
        self._source, self._model = model, None
        self._version = version
        self._slot_of_prefix.clear()

    def prepare(self) -> None:
        """Copy the weights to the devices of this process, in the layout for decoding; see `Sampler.prepare`."""
        whole = None if self._sizes.mesh is None else NamedSharding(self._sizes.mesh, PartitionSpec())
        self._stops = jax.device_put(self._stops, whole)
        # GPT-2 has flags of its dropout layers among its weights; programs take arrays only.
        model = eqx.filter(self._source, eqx.is_array)
        if self._trainer is None or self._sizes.hosts == 1:
            with self._on_mesh():
                self._model = ModelArrays.of(self._programs.prepare(model))
            return
        with self._trainer.use_device_mesh():
            converted = conversion_program(self._trainer, self._sizes.form, self._sizes.context)(model)
        copies = copy_to_each_process(converted, self._trainer.device_mesh, self._trainer.compute_axis_mapping)
        self._model = ModelArrays.of(copies)

    def compile(self) -> None:
        """Compile all programs, so that no request waits for it. Call it when there are no requests."""
        for_long_calls = self._sizes.prefill.long.positions // 2 + 2
        lengths = [min(length, self._sizes.context - 1) for length in (2, for_long_calls)]
        # Of equal prompts, the second one is copied.
        self.sample([SampleRequest((0,) * length, seed, 1) for length in lengths for seed in range(2)])

    def reset(self) -> None:
        """Drop all requests and conversations, and release the device memory until the next request."""
        slots = self._sizes.slots
        self._model: ModelArrays | None = None
        self._cache: Cache | None = None
        self._queue: deque[AcceptedRequest] = deque()
        self._next_turns: list[AcceptedRequest] = []
        """Requests of conversations that have a slot."""
        self._in_progress: set[str] = set()
        """Conversations with a request that has not ended."""
        self._slot_of: dict[str, int] = {}
        """Slot of each open conversation."""
        self._slot_of_prefix: dict[tuple[int, bytes], int] = {}
        """A slot whose cache begins with a prefix under the current weights, by shard and prefix."""
        self._prefixes = [b""] * slots
        """The prefix with which each slot's sequence began."""
        self._cached: list[tuple[int, ...]] = [()] * slots
        """The tokens in each slot's cache after its last generation."""
        self._slots = SlotTable(slots, self._config.max_new_tokens)

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        if self._sizes.mesh is None:
            yield
            return
        with haliax.partitioning.set_mesh(self._sizes.mesh):
            yield

    def _admit(self) -> None:
        """Put waiting requests into slots, and their prompts into the cache."""
        pieces: list[PromptPiece] = []
        copies: list[tuple[int, int]] = []
        for queued in self._next_turns:
            pieces += self._continue(queued)
        self._next_turns.clear()
        free = self._free_slots() if self._queue else []
        while self._queue and any(free):
            queued = self._queue.popleft()
            prefix = _prefix(queued.request.prompt_tokens)
            pieces += self._begin(self._take_slot(free, prefix), queued, prefix, copies)
        if not pieces and not copies:
            return
        model, cache = self._loaded()
        self.work.prefilled_tokens += sum(len(piece.tokens) for piece in pieces)
        for tokens in prefill_calls(pieces, self._sizes.prefill, self._sizes.shards, self._sizes.shard_slots):
            self.work.prefill_positions += tokens.ids.size
            cache = self._programs.prefill(model, cache, tokens)
        if copies:
            cache = self._programs.copy_slots(
                cache, *copy_arguments(copies, self._sizes.shards, self._sizes.shard_slots)
            )
        self._cache = cache

    def _loaded(self) -> tuple[ModelArrays, Cache]:
        """Return model and cache, which is donated to the next program."""
        if self._model is None:
            if self._sizes.hosts > 1:
                raise RuntimeError("weights of a mesh of several processes are copied by `prepare`, in all of them")
            self.prepare()
            assert self._model is not None
        cache, self._cache = self._cache, None
        return self._model, self._programs.empty() if cache is None else cache

    def _free_slots(self) -> list[dict[int, None]]:
        """Return the free slots of each shard as an ordered set, the lowest last."""
        taken = self._slots.active.copy()
        taken[list(self._slot_of.values())] = True
        return [
            dict.fromkeys((shard * self._sizes.shard_slots + np.flatnonzero(~row)[::-1]).tolist())
            for shard, row in enumerate(taken.reshape(self._sizes.shards, -1))
        ]

    def _take_slot(self, free: Sequence[dict[int, None]], prefix: bytes) -> int:
        """Choose a slot in a shard that has the prefix in its cache, otherwise in the shard with most free slots."""
        shards = [shard for shard, slots in enumerate(free) if slots]
        sharing = [shard for shard in shards if (shard, prefix) in self._slot_of_prefix]
        shard = max(sharing or shards, key=lambda shard: len(free[shard]))
        slot = self._slot_of_prefix.get((shard, prefix))
        # So the source of a copy is never a free slot, which a later request could overwrite before the copy.
        if slot is None or slot not in free[shard]:
            return free[shard].popitem()[0]
        del free[shard][slot]
        return slot

    def _begin(
        self, slot: int, queued: AcceptedRequest, prefix: bytes, copies: list[tuple[int, int]]
    ) -> list[PromptPiece]:
        """Assign a free slot; return the prompt tokens to process, or append to `copies` if a slot has them."""
        if prefix != self._prefixes[slot]:
            self._forget_prefix(slot)
            self._prefixes[slot] = prefix
        if queued.request.conversation is not None:
            self._slot_of[queued.request.conversation] = slot
        self._slots.assign(slot, queued)
        source = self._slot_of_prefix.get((slot // self._sizes.shard_slots, prefix))
        if not prefix or source == slot:
            return []
        if source is not None:
            copies.append((source, slot))
            return []
        self._slot_of_prefix[slot // self._sizes.shard_slots, prefix] = slot
        return [PromptPiece(slot, 0, np.frombuffer(prefix, np.int32))]

    def _continue(self, queued: AcceptedRequest) -> list[PromptPiece]:
        """Start a further turn in its conversation's slot; return the tokens that are not in the cache."""
        prompt, conversation = queued.request.prompt_tokens, queued.request.conversation
        assert conversation is not None
        slot = self._slot_of[conversation]
        start = min(_common_prefix(self._cached[slot], prompt), len(prompt) - 1)
        if start * np.int32().itemsize < len(self._prefixes[slot]):
            self._forget_prefix(slot)
        self._slots.assign(slot, queued)
        return [PromptPiece(slot, start, np.array(prompt[start:-1], np.int32))] if start < len(prompt) - 1 else []

    def _forget_prefix(self, slot: int) -> None:
        """Stop sharing the cache of the prefix with which a slot's sequence began."""
        key = slot // self._sizes.shard_slots, self._prefixes[slot]
        if self._slot_of_prefix.get(key) == slot:
            del self._slot_of_prefix[key]

    def _decode(self) -> list[tuple[int, Generation]]:
        """Sample some tokens in all active slots, and return the generations that have ended."""
        # Refill slots before few are active: a call costs the same for any number of sequences.
        refills = bool(self._queue or self._slot_of)
        exit_after = max(self._sizes.shard_slots // REFILL_FRACTION, 1) if refills else self._sizes.shard_slots
        steps = self._steps
        if self._step_seconds * steps > self._call_seconds:
            steps = max(int(self._call_seconds / self._step_seconds), 1)
        slots = self._slots.decode_inputs(steps)
        model, cache = self._loaded()
        start = time.perf_counter()
        self._cache, decoded = self._programs.decode(model, cache, slots, self._stops, np.int32(exit_after))
        tokens, logprobs, stop_states = map(np.asarray, decoded)
        counts = self._slots.add(tokens, logprobs, self._version)
        self._step_seconds = (time.perf_counter() - start) / int(counts.max())
        self.work.sampled_tokens += int(counts.sum())
        self.work.slot_steps += int(counts.max()) * self._sizes.slots
        finished: list[tuple[int, Generation]] = []
        for slot, (number, request, _), generation in self._slots.end(stop_states):
            if request.conversation is not None:
                self._in_progress.discard(request.conversation)
            self._cached[slot] = (*request.prompt_tokens, *generation.token_ids[:-1])
            if records_experts(self._cache, self._source.config):
                experts = np.asarray(recorded_experts(self._cache, np.int32(slot)))
                generation = dataclasses.replace(generation, experts=experts[: len(self._cached[slot])])
            finished.append((number, generation))
        return finished


def _prefix(prompt: tuple[int, ...]) -> bytes:
    """Return the tokens that `prefill` processes, all but the last, as int32.

    Bytes keep their hash and compare as fast as memory, and the samples of a group have long equal prompts.
    """
    return np.fromiter(prompt[:-1], np.int32).tobytes()


def _common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return the number of leading tokens that are equal."""
    if second[: len(first)] == first:
        return len(first)
    return next(
        (index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(second)
    )


def _signature(model: LmHeadModel) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
