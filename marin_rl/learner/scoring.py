# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Log-probabilities and values of rollouts under given weights, without a gradient."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Shaped
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import RlExample, pack_batch
from marin_rl.batching.rollout_batch import NO_TURN, RolloutBatch, make_batch
from marin_rl.batching.row_sizes import TOKENS_PER_MICROBATCH
from marin_rl.batching.rows import Rows
from marin_rl.learner.critic import ActorCritic, policy_of
from marin_rl.learner.logprobs import (
    LOGPROB_BLOCK_SIZE,
    activations_and_routing,
    entropy,
    is_most_likely,
    token_logprobs,
)
from marin_rl.learner.placement import place_batch, placed_shape, stack_microbatches, take_microbatch
from marin_rl.learner.policy_spec import with_config
from marin_rl.learner.train_step import compiler_options
from marin_rl.models.lora import merge_adapter
from marin_rl.models.mixture import TOP_EXPERTS, mixture_shape
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import own_rows, platform_of
from marin_rl.utils.devices.trainer_config import TrainerConfig

SequenceScorer = Callable[[LmHeadModel, Sequence[tuple[int, ...]]], list[list[float]]]
"""Computes the log-probs of the tokens of each sequence after the first."""


class Scores(NamedTuple):
    """Log-probabilities and values of the tokens of a batch under some weights."""

    logprobs: Float32[np.ndarray, " tokens"]
    """Log-probabilities (nats) of the tokens, 0 off the loss mask."""
    values: Float32[np.ndarray, " tokens"]
    """The critic's values, 0 off the loss mask and without a critic."""
    is_most_likely: Bool[np.ndarray, " tokens"] | None = None
    """Whether the token is the most likely one, False off the loss mask; None unless the scorer computes it."""
    experts: Shaped[np.ndarray, "tokens layers top"] | None = None
    """The experts that a mixture chose for each token; None unless the scorer returns them."""


class Scorer:
    """Computes log-probabilities and values of rollouts, in microbatches of one shape.

    Used for the frozen reference, for the policy's log-probabilities before an update, and for the critic's values.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        layout: RowLayout,
        *,
        pad_token_id: int,
        temperature: float = 1.0,
        block_size: int = LOGPROB_BLOCK_SIZE["cpu"],
        capacity: int = 1,
        accuracy: bool = False,
        experts: bool = False,
    ):
        """Build the program that scores a batch.

        Args:
            trainer: mesh, precision and sharding.
            layout: shape of a microbatch.
            pad_token_id: token id of padding.
            temperature: divides the logits, above 0.
            block_size: as for [`token_logprobs`][marin_rl.learner.logprobs.token_logprobs].
            capacity: microbatches that the program has room for, as for
                [`Learner`][marin_rl.learner.train_step.Learner].
            accuracy: whether to compute `Scores.is_most_likely`, whose mean is the token accuracy.
            experts: whether to return the chosen experts of a mixture.
        """
        self._trainer = trainer
        self._layout = layout
        self._pad_token_id = pad_token_id
        self._capacity = capacity
        self._accuracy, self._experts = accuracy, experts

        def score(model: LmHeadModel | ActorCritic, batch: RlExample) -> tuple[jax.Array, ...]:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                model = trainer.mp.cast_to_compute(model)
                policy = policy_of(model)
                trunk, chosen, _ = activations_and_routing(policy, batch)
                logprobs, statistics = token_logprobs(
                    trunk,
                    policy.get_lm_head(),
                    batch,
                    temperature=temperature,
                    block_size=block_size,
                    statistic=is_most_likely if accuracy else entropy,
                )
                values = model.values(batch, trunk) if isinstance(model, ActorCritic) else hax.zeros_like(logprobs)
            scored = (logprobs, values, statistics) if accuracy else (logprobs, values)
            arrays = [values.rearrange(batch.input_ids.axes).array for values in scored]
            if experts:
                assert chosen is not None
                arrays.append(chosen.rearrange((*batch.input_ids.axes, "layer", TOP_EXPERTS)).array)
            return tuple(arrays)

        def score_microbatches(
            model: LmHeadModel | ActorCritic, batch: RlExample, count: jax.Array
        ) -> tuple[jax.Array, ...]:
            def add(index: jax.Array, scored: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                parts = score(model, take_microbatch(batch, index))
                return tuple(array.at[index].set(part) for array, part in zip(scored, parts, strict=True))

            shape = batch.input_ids.array.shape
            zeros = [jnp.zeros(shape, jnp.float32)] * (3 if accuracy else 2)
            if experts:
                mixture = mixture_shape(policy_of(model).config)
                assert mixture is not None
                zeros.append(jnp.zeros((*shape, mixture.layers, mixture.per_token), mixture.dtype))
            return jax.lax.fori_loop(0, count, add, tuple(zeros))

        self._function = score_microbatches
        self._score = cast(Any, hax.named_jit)(
            score_microbatches,
            axis_resources=trainer.parameter_axis_mapping,
            compiler_options=compiler_options(trainer.device_mesh),
        )

    def lower(self, model: LmHeadModel | ActorCritic, microbatches: Sequence[RlExample]) -> jax.stages.Lowered:
        """Lower the program without compiling it, for analysis of its memory and cost.

        Args:
            model: arrays, or shapes and shardings as from `placement.placed_shape`.
            microbatches: the batch; only its shapes are used.
        """
        mesh, mapping = self._trainer.device_mesh, self._trainer.compute_axis_mapping
        batch = placed_shape(stack_microbatches(microbatches, self._capacity), mesh, mapping)
        with self._trainer.use_device_mesh():
            # named_jit takes no shapes.
            arrays, rest = eqx.partition(model, lambda leaf: isinstance(leaf, jax.Array | jax.ShapeDtypeStruct))
            program = jax.jit(
                lambda arrays, *inputs: self._function(eqx.combine(arrays, rest), *inputs),
                compiler_options=compiler_options(self._trainer.device_mesh),
            )
            return program.lower(arrays, batch, np.int32(len(microbatches)))

    def score(self, model: LmHeadModel | ActorCritic, batch: RolloutBatch) -> Scores:
        """Compute log-probabilities and values of every token on the loss mask.

        Args:
            model: the weights; unchanged.
            batch: any number of rollouts.

        Returns:
            Arrays over the tokens of the batch.
        """
        packed = pack_batch(
            batch, TokenMeanConfig(), self._layout, pad_token_id=self._pad_token_id, own_rows=own_rows(self._trainer)
        )
        with self._trainer.use_device_mesh():
            stacked, count = stack_microbatches(packed.microbatches, self._capacity), len(packed.microbatches)
            placed = place_batch(stacked, self._trainer, packed.layout.rows_per_microbatch)
            scored = self._score(model, placed, jnp.int32(count))
        logprobs, values, *rest = (packed.unpack(multihost.fetch(array)[:count]) for array in scored)
        # Rounding may lift the log-probability of a near-certain token above 0.
        return Scores(
            np.minimum(logprobs, 0.0),
            values,
            rest[0] > 0 if self._accuracy else None,
            rest[-1] if self._experts else None,
        )


def sequence_scorer(
    architecture: LmConfig,
    trainer: TrainerConfig,
    max_length: int,
    *,
    pad_token_id: int,
    temperature: float,
    block_size: int,
    tokens: int,
) -> SequenceScorer:
    """Return a function that computes the log-probs of the tokens of each sequence after the first.

    Args:
        architecture: that of the models, which have no adapter.
        trainer: mesh, precision and sharding.
        max_length: maximum number of tokens of a sequence.
        pad_token_id: as for [`Scorer`][marin_rl.learner.scoring.Scorer], like `temperature` and `block_size`.
        temperature: divides the logits.
        block_size: tokens whose logits are in memory at once.
        tokens: number of tokens of a microbatch on each device, at least.
    """
    rows = Rows.of(architecture, trainer)
    layout = rows.of_scores(max_length, tokens)
    scorer = Scorer(
        trainer, layout, pad_token_id=pad_token_id, temperature=temperature, block_size=block_size, capacity=8
    )

    def score(model: LmHeadModel, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        sizes = [*map(len, sequences)]
        turn_ids = np.zeros(sum(sizes), np.int32)
        turn_ids[np.cumsum([0, *sizes[:-1]])] = NO_TURN
        input_ids = np.array([*itertools.chain.from_iterable(sequences)], np.int32)
        names = [*map(str, range(len(sizes)))]
        batch = make_batch(names, [[size] for size in sizes], input_ids=input_ids, turn_ids=turn_ids)
        model = with_config(model, rows.kernel.configure(model.config, layout.row_length))
        return [part.tolist() for part in batch.actions(scorer.score(model, batch).logprobs)]

    return score


def prompt_scorer(
    model: LmHeadModel, trainer: TrainerConfig, max_context: int, pad_token_id: int
) -> Callable[[Sequence[tuple[int, ...]]], list[list[float]]]:
    """Return a function that computes the log-probs of the tokens of each prompt after the first, at temperature 1.

    Args:
        model: the weights.
        trainer: mesh, precision and sharding.
        max_context: maximum number of tokens of a prompt.
        pad_token_id: token id of padding.
    """
    platform = platform_of(trainer)
    score = sequence_scorer(
        model.config,
        trainer,
        max_context,
        pad_token_id=pad_token_id,
        temperature=1.0,
        block_size=LOGPROB_BLOCK_SIZE[platform],
        tokens=TOKENS_PER_MICROBATCH[platform],
    )
    return functools.partial(score, merge_adapter(model))
