# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler on levanter's inference engine, in the learner's process and on the learner's arrays.

The engine has undocumented limits: it returns short generations without an error if a call exceeds its sizes, gives
clones of a long prompt a wrong cache, and cannot be reused after `reset` or after an exception.
[`LevanterSampler`][marin_rl.sampling.levanter_sampler.LevanterSampler] keeps every call within these limits, and
validates every output.
"""

import contextlib
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.inference.engine import GenerationResult, InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.paged_attention import with_batched_attention
from marin_rl.sampling.sampler import LOGPROB_ROUNDING, SampleRequest, SamplerError, WeightPoll, allowed_tokens
from marin_rl.types import Generation, StopReason, WeightVersion

# The engine logs the ids of all slots at each call.
logging.getLogger("levanter.inference.engine").setLevel(logging.WARNING)


class Swap(NamedTuple):
    """An update of the weights during decoding."""

    version: WeightVersion
    lengths: list[int]
    """Length of each sequence, in tokens, at the time of the update."""


class EngineAnswer(NamedTuple):
    """Output of one call of the engine."""

    result: GenerationResult
    first_version: WeightVersion
    """Version of the weights that processed the prompts and sampled every first token."""
    swaps: Sequence[Swap]
    """Weight updates in order."""

    def last_version(self, index: int) -> WeightVersion:
        """Return the version of the weights that sampled the last token of a sequence."""
        length = len(self.result.tokens[index])
        versions = [swap.version for swap in self.swaps if swap.lengths[index] < length]
        return versions[-1] if versions else self.first_version


class _DecodeParams(NamedTuple):
    """The fields of `SeqDecodingParams` that the engine reads, without creating 512 equinox modules per call."""

    max_num_tokens: int
    stop_tokens: NamedArray | None
    temperature: float
    key: np.ndarray


class LevanterSampler:
    """Continues prompts with levanter's paged, batched inference engine.

    Equal requests, weights and `SamplingConfig` give bit-identical generations, independent of earlier calls. Without
    a `trainer`, call it within the mesh and axis-mapping contexts in which the model was created.
    """

    def __init__(
        self,
        model: LmHeadModel,
        *,
        config: SamplingConfig,
        stop_token_ids: Sequence[int],
        max_context: int,
        version: WeightVersion = 0,
        weight_poll: WeightPoll | None = None,
        trainer: TrainerConfig | None = None,
    ) -> None:
        """Create the engine and its KV cache, without compiling.

        Args:
            model: initial weights. They are shared, not copied: after the learner donates them, call `update_weights`
                before the next `sample`.
            config: sizes of the engine.
            stop_token_ids: tokens that end a generation. May be empty.
            max_context: maximum number of prompt and new tokens of a sequence, at least 2.
            version: number of training steps that produced `model`.
            weight_poll: polls for newer weights during decoding; None disables polling. Polling without newer weights
                does not change generations.
            trainer: mesh, axis mapping and compute precision; None uses the caller's contexts and `model`'s precision.

        Raises:
            ValueError: if the sizes are inconsistent.
        """
        if max_context < 2:
            raise ValueError(f"max_context is {max_context}; it must be at least 2, one prompt token and one new token")
        stop_ids = sorted(set(stop_token_ids))
        vocab_size = model.Vocab.size
        if stop_ids and not 0 <= stop_ids[0] <= stop_ids[-1] < vocab_size:
            raise ValueError(f"stop_token_ids {stop_ids} are not all in the model's vocabulary of {vocab_size}")
        self._config = config
        self._prefill_tokens = config.prefill_tokens(max_context)
        self._max_context = max_context
        self._stop_ids = frozenset(stop_ids)
        self._stop_tokens = _stop_sequences(stop_ids)
        self._weight_poll = weight_poll
        self._engine_config = _engine_config(config, max_context, len(stop_ids), weight_poll)
        self._trainer = trainer
        self._version = version
        with self._on_mesh():
            self._model = self._prepare(model)
            self._engine: InferenceEngine | None = self._build_engine()

    @property
    def version(self) -> WeightVersion:
        """Version of the weights that the next call uses."""
        return self._version

    @property
    def batch_size(self) -> int:
        """Number of sequences that are decoded together."""
        return self._config.max_seqs

    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Replace the weights, without copying or compiling.

        If the weight poll calls this during decoding, the KV cache keeps the entries of the former weights, as in
        PipelineRL (Piché et al. 2025). The recorded log-probabilities are those of the distribution that each token
        was sampled from: the new weights over that cache.

        Args:
            model: same structure, shapes and dtypes as before.
            version: number of training steps that produced it.

        Raises:
            ValueError: if the structure, a shape or a dtype differs.
        """
        model = self._prepare(model)
        if _signature(model) != _signature(self._model):
            raise ValueError(
                f"update_weights to version {version}: the model's structure, shapes or dtypes differ from those "
                "of the sampler's; create a new LevanterSampler for it"
            )
        self._model = model
        self._version = version
        if self._engine is not None:
            self._engine.model = model

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt; generations are in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a new token; nothing was sampled.
            ValueError: if a request is malformed; nothing was sampled.
            SamplerError: if the engine returned an incomplete generation or an invalid log-probability (the weights
                may contain NaN).
        """
        with self._on_mesh():
            return self._sample(requests)

    def _sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        allowed = [self._allowed_tokens(index, request) for index, request in enumerate(requests)]
        generations: list[Generation] = []
        for start, stop in self._chunks(requests):
            if self._weight_poll is not None:
                self._weight_poll.poll()
            engine = self._engine or self._build_engine()
            # An exception below, including KeyboardInterrupt, may leave donated buffers, occupied slots or NaN in the
            # cache. The engine is then dropped, and the next call creates a new one (compiled programs are reused).
            self._engine = None
            answer = self._generate(engine, requests[start:stop], allowed[start:stop])
            generations += read_answer(answer, start, allowed[start:stop], self._stop_ids)
            self._engine = engine
        return generations

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        """Enter the trainer's mesh and axis mapping, if any."""
        if self._trainer is None:
            yield
            return
        with self._trainer.use_device_mesh(), hax.axis_mapping(self._trainer.compute_axis_mapping):
            yield

    def _prepare(self, model: LmHeadModel) -> LmHeadModel:
        """Cast to compute precision and, except on TPU, use batched attention; TPU has levanter's kernel."""
        if self._trainer is not None:
            model = self._trainer.mp.cast_to_compute(model)
        return model if jax.default_backend() == "tpu" else with_batched_attention(model)

    def _build_engine(self) -> InferenceEngine:
        return InferenceEngine.from_model_with_config(self._model, tokenizer=None, config=self._engine_config)

    def _allowed_tokens(self, index: int, request: SampleRequest) -> int:
        return allowed_tokens(
            index,
            request,
            max_context=self._max_context,
            vocab_size=self._model.Vocab.size,
            max_new_tokens=self._config.max_new_tokens,
        )

    def _chunks(self, requests: Sequence[SampleRequest]) -> Iterator[tuple[int, int]]:
        """Yield spans of requests that fit one prefill without queueing.

        The engine processes prompts once per call of its decode loop, and drops requests that are still queued after
        `max_seq_len` rounds. So its queue must stay empty.
        """
        start, tokens = 0, 0
        for index, request in enumerate(requests):
            length = len(request.prompt_tokens)
            if index - start == self._config.max_seqs or tokens + length > self._prefill_tokens:
                yield start, index
                start, tokens = index, 0
            tokens += length
        if requests:
            yield start, len(requests)

    def _generate(
        self, engine: InferenceEngine, requests: Sequence[SampleRequest], allowed: Sequence[int]
    ) -> EngineAnswer:
        # The engine takes slots from the end of the list and returns them in the order in which sequences end.
        # Sorting gives request i always slot i, so that earlier calls cannot affect a result.
        engine.free_slots.sort(reverse=True)
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        keys = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
        first_version, swaps = self._version, list[Swap]()

        def poll_weights(iteration: int) -> None:
            before = self._version
            if self._weight_poll is not None:
                self._weight_poll.poll()
            if self._version != before:
                engine.model = self._model
                lengths = [len(engine.results[index][0].token_list) for index in range(len(requests))]
                swaps.append(Swap(self._version, lengths))

        result = engine.generate(
            [
                Request(
                    prompt_tokens=list(request.prompt_tokens),
                    request_id=index,
                    # The engine's limit includes the prompt.
                    decode_params=cast(
                        SeqDecodingParams,
                        _DecodeParams(
                            max_num_tokens=len(request.prompt_tokens) + allowed[index],
                            stop_tokens=self._stop_tokens,
                            temperature=request.temperature,
                            key=keys[index],
                        ),
                    ),
                    # With more than one, the engine clones the prompt's cache, incorrectly for prompts over a page.
                    n_generations=1,
                )
                for index, request in enumerate(requests)
            ],
            step_callback=poll_weights,
        )
        return EngineAnswer(result, first_version, swaps)


def read_answer(
    answer: EngineAnswer, first: int, allowed: Sequence[int], stop_ids: Collection[int]
) -> list[Generation]:
    """Convert the engine's output to generations, and validate them.

    Args:
        answer: output of the engine.
        first: index of its first request among all requests, for error messages.
        allowed: maximum number of new tokens of each sequence.
        stop_ids: tokens that end a sequence.

    Raises:
        SamplerError: if a sequence is incomplete, or a log-probability is not finite or above 0.
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
                f"request {first + offset}: the engine returned {len(tokens)} tokens without a final stop token, "
                f"of {allowed[offset]} allowed; it dropped or cut the request"
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
    valid = flat <= LOGPROB_ROUNDING
    valid &= flat > -np.inf
    if valid.all():
        return
    owners = np.repeat(np.arange(len(logprobs)), [len(values) for values in logprobs])
    invalid = int(np.argmin(valid))
    raise SamplerError(
        f"request {first + int(owners[invalid])}: the engine returned log-probability {flat[invalid]}; it must be "
        "finite and at most 0. Check the weights for NaN"
    )


def _stop_sequences(stop_ids: Sequence[int]) -> NamedArray | None:
    """Return stop sequences of one token each; a single sequence would require all tokens in a row."""
    if not stop_ids:
        return None
    return NamedArray(
        cast(jax.Array, np.asarray(stop_ids, dtype=np.int32)[:, None]),
        (hax.Axis("stop_seq", len(stop_ids)), hax.Axis("position", 1)),
    )


def _engine_config(
    config: SamplingConfig, max_context: int, num_stop_ids: int, weight_poll: WeightPoll | None
) -> InferenceEngineConfig:
    pages_per_seq = -(-max_context // config.page_size)
    max_rounds = max(min(config.max_new_tokens, max_context - 1) - 1, 1)
    return InferenceEngineConfig(
        max_seq_len=max_context,
        page_size=config.page_size,
        # Every slot can hold the full context. Without an explicit number the engine queries the device's free memory,
        # which is not available on CPU.
        max_pages=config.max_seqs * pages_per_seq,
        max_seqs=config.max_seqs,
        max_tokens_per_round=config.max_seqs,
        max_queued_tokens=config.max_seqs,
        # All prompts of a call are processed in one prefill, which also samples the first token ...
        max_seqs_in_prefill=config.max_seqs,
        max_prefill_size=config.prefill_tokens(max_context),
        # ... so that one call of the decode loop (which ends early when all sequences have ended) does the rest, or
        # as many decode steps as fit between two weight polls.
        max_rounds=max_rounds if weight_poll is None else min(weight_poll.decode_steps, max_rounds),
        max_stop_seqs=num_stop_ids,
        max_stop_tokens=min(num_stop_ids, 1),
        compute_dtype=jnp.dtype(config.kv_cache_dtype),
    )


def _signature(model: LmHeadModel) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
