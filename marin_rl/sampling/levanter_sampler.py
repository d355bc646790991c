# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A sampler on levanter's inference engine, in the learner's process and on the learner's own arrays.

The engine is fast but has sharp edges: it answers short without an error when it is asked for too
much, gives clones of a long prompt a wrong cache, and cannot be used again after `reset` or after
an exception. [`LevanterSampler`][marin_rl.sampling.levanter_sampler.LevanterSampler] keeps every
call inside what works, and checks every answer all the same.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.engine_answer import EngineAnswer, Swap, read_answer
from marin_rl.sampling.paged_attention import with_batched_attention
from marin_rl.sampling.request_check import allowed_tokens
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.sampling.weight_poll import WeightPoll
from marin_rl.types import Generation, WeightVersion

# The engine writes a line with every slot's number at each call.
logging.getLogger("levanter.inference.engine").setLevel(logging.WARNING)


class _DecodeParams(NamedTuple):
    """What the engine reads of a `SeqDecodingParams`, without the cost of 512 equinox modules a call."""

    max_num_tokens: int
    stop_tokens: NamedArray | None
    temperature: float
    key: np.ndarray


class LevanterSampler:
    """Continues prompts with levanter's paged, batched inference engine.

    Generations are equal to the bit for equal requests, weights and `SamplingConfig`, whatever was
    sampled before. Call it inside the mesh and axis-mapping contexts that the model was made in.
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
    ) -> None:
        """Make the engine and its KV cache; nothing is compiled yet.

        Args:
            model: weights to start with. They are shared, not copied: after the learner donates
                them, call `update_weights` before the next `sample`.
            config: sizes.
            stop_token_ids: each of them alone ends a generation. May be empty.
            max_context: most tokens of prompt and answer together, at least 2.
            version: steps of training behind `model`.
            weight_poll: when newer weights may come while sequences are being decoded; None for never. Without newer
                weights, generations are the same.

        Raises:
            ValueError: if the sizes contradict one another.
        """
        if max_context < 2:
            raise ValueError(f"max_context is {max_context}; a prompt token and a new one need at least 2")
        stop_ids = sorted(set(stop_token_ids))
        vocab_size = model.Vocab.size
        if stop_ids and not 0 <= stop_ids[0] <= stop_ids[-1] < vocab_size:
            raise ValueError(f"stop_token_ids {stop_ids} are not all in the model's vocabulary of {vocab_size}")
        self._config = config
        self._prefill_tokens = config.prefill_tokens(max_context)
        self._max_context = max_context
        self._stop_ids = frozenset(stop_ids)
        self._stop_tokens = _stop_sequences(stop_ids)
        self._looks = weight_poll
        self._engine_config = _engine_config(config, max_context, len(stop_ids), weight_poll)
        self._model = _for_this_backend(model)
        self._version = version
        self._engine: InferenceEngine | None = self._build_engine()

    @property
    def version(self) -> WeightVersion:
        """Version of the weights that the next call samples from."""
        return self._version

    @property
    def batch_size(self) -> int:
        """Sequences that are decoded together."""
        return self._config.max_seqs

    def update_weights(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Sample from `model` from now on; nothing is copied and nothing is compiled.

        Called from a look, in the middle of sequences, it leaves their KV cache as the former weights made it, as
        PipelineRL does (Piché et al. 2025). The log-probabilities are those of the distribution that each token was
        really sampled from: of these weights over that cache.

        Args:
            model: same structure, shapes and dtypes as before.
            version: steps of training behind it.

        Raises:
            ValueError: if the model has another structure, or a shape or dtype differs.
        """
        model = _for_this_backend(model)
        if _signature(model) != _signature(self._model):
            raise ValueError(
                f"update_weights to version {version}: the model's structure, shapes or dtypes differ from those "
                "that the sampler was made with; make a new LevanterSampler for it"
            )
        self._model = model
        self._version = version
        if self._engine is not None:
            self._engine.model = model

    def sample(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Continue every prompt; the answers come in the order of the requests.

        Raises:
            PromptTooLongError: if a prompt leaves no room for a single new token; nothing was sampled.
            ValueError: if a request is malformed; nothing was sampled.
            SamplerError: if the engine returned an incomplete answer or a log-probability that is
                none (the weights may hold NaN).
        """
        allowed = [self._allowed_tokens(index, request) for index, request in enumerate(requests)]
        generations: list[Generation] = []
        for start, stop in self._chunks(requests):
            if self._looks is not None:
                self._looks.look()
            engine = self._engine or self._build_engine()
            # Whatever raises below, an interrupt included, may leave donated buffers, held slots or NaN in the
            # cache behind: the engine is then dropped, and the next call makes another (its programs stay compiled).
            self._engine = None
            answer = self._generate(engine, requests[start:stop], allowed[start:stop])
            generations += read_answer(answer, start, allowed[start:stop], self._stop_ids)
            self._engine = engine
        return generations

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
        """Spans of requests that the engine can take with one prefill and without queueing.

        The engine reads prompts once per call of its decode loop, and gives up on what is still
        queued after `max_seq_len` rounds. So nothing is ever left to its queue.
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
        # The engine takes slots from the end and gives them back in the order in which sequences end.
        # Request i always gets slot i, so that no earlier call can show in a result.
        engine.free_slots.sort(reverse=True)
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        keys = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
        first_version, swaps = self._version, list[Swap]()

        def look(iteration: int) -> None:
            before = self._version
            if self._looks is not None:
                self._looks.look()
            if self._version != before:
                engine.model = self._model
                lengths = [len(engine.results[index][0].token_list) for index in range(len(requests))]
                swaps.append(Swap(self._version, lengths))

        result = engine.generate(
            [
                Request(
                    prompt_tokens=list(request.prompt_tokens),
                    request_id=index,
                    # The engine counts the prompt among the tokens that it limits.
                    decode_params=cast(
                        SeqDecodingParams,
                        _DecodeParams(
                            max_num_tokens=len(request.prompt_tokens) + allowed[index],
                            stop_tokens=self._stop_tokens,
                            temperature=request.temperature,
                            key=keys[index],
                        ),
                    ),
                    # More than one would clone the prompt's cache, wrongly if it is longer than a page.
                    n_generations=1,
                )
                for index, request in enumerate(requests)
            ],
            step_callback=look,
        )
        return EngineAnswer(result, first_version, swaps)


def _stop_sequences(stop_ids: Sequence[int]) -> NamedArray | None:
    """One stop sequence of one token each: as one sequence, all would have to follow one another."""
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
        # Every slot can reach the full context; without a number the engine would ask the device for
        # its free memory, which a CPU does not tell.
        max_pages=config.max_seqs * pages_per_seq,
        max_seqs=config.max_seqs,
        max_tokens_per_round=config.max_seqs,
        max_queued_tokens=config.max_seqs,
        # All prompts of a call are read at once, and its first token comes with that ...
        max_seqs_in_prefill=config.max_seqs,
        max_prefill_size=config.prefill_tokens(max_context),
        # ... so that one call of the decode loop (which ends early when all have ended) does the rest, or as many as
        # it takes with looks in between.
        max_rounds=max_rounds if weight_poll is None else min(weight_poll.rounds, max_rounds),
        max_stop_seqs=num_stop_ids,
        max_stop_tokens=min(num_stop_ids, 1),
        compute_dtype=jnp.dtype(config.kv_cache_dtype),
    )


def _for_this_backend(model: LmHeadModel) -> LmHeadModel:
    """The model with attention that is fast here: on TPU levanter's own kernel."""
    return model if jax.default_backend() == "tpu" else with_batched_attention(model)


def _signature(model: LmHeadModel) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    return structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
