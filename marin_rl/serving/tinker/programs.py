# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The compiled programs of the trainer: log-probs of any targets, the loss and its gradient, and the likeliest tokens.

Every loss is the same program. Microbatches have a few shapes, so that the number of programs is bounded whatever
clients send; `Programs.compiled` counts them.
"""

import dataclasses
import functools
import logging
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.packing import GroupRow
from marin_rl.learner.attention_kernel import AttentionKernel
from marin_rl.learner.attention_layers import context_shards
from marin_rl.learner.blocks import head_arrays, shards_of
from marin_rl.learner.critic import assemble
from marin_rl.learner.logprobs import LOGPROB_BLOCK_SIZE, blockwise_logprobs, blockwise_top_logprobs, policy_activations
from marin_rl.learner.placement import place
from marin_rl.learner.policy_spec import with_config
from marin_rl.learner.train_step import compiler_options
from marin_rl.models.lora import RANK, Adapter, merge_adapter
from marin_rl.serving.tinker.adam import TrainState, adam_step, gradient_norm, new_state
from marin_rl.serving.tinker.losses import LossSettings, token_terms
from marin_rl.serving.tinker.records import AdamParams
from marin_rl.serving.tinker.token_batch import TokenBatch
from marin_rl.utils.devices.setup import platform_of
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import shard

logger = logging.getLogger(__name__)


def target_logprobs(
    model: LmHeadModel, batch: TokenBatch, trains: Bool[Array, "batch position target"], block_size: int
) -> Float32[Array, "batch position target"]:
    """Compute the log-probs of the targets at temperature 1, 0 off `batch.scored`; the head runs once for every target.

    Args:
        model: the model, in compute precision.
        batch: tokens and targets.
        trains: targets whose log-probs have a gradient.
        block_size: positions whose logits are in memory at once.
    """
    Batch, Pos, Target = batch.targets.axes
    activations, lm_head = head_arrays(policy_activations(model, batch), model.get_lm_head(), (Batch, Pos))
    flat = (Batch.size, Pos.size * Target.size)

    def score(activations: Array, lm_head: Array, mask: Array) -> Array:
        logprobs, _ = blockwise_logprobs(
            activations,
            lm_head,
            batch.targets.array.reshape(flat),
            mask.reshape(flat),
            temperature=1.0,
            block_size=block_size,
            shards=shards_of(Batch),
            position_shards=context_shards(),
        )
        return logprobs.reshape(batch.targets.array.shape)

    if Target.size > 1:
        activations = jnp.repeat(activations, Target.size, axis=1)
    constant = score(*jax.lax.stop_gradient((activations, lm_head)), batch.scored.array & ~trains)
    return score(activations, lm_head, trains) + constant


class Programs:
    """The compiled programs of a model: one for each row length, number of targets, and purpose."""

    def __init__(self, trainer: TrainerConfig, kernel: AttentionKernel) -> None:
        """Compile nothing yet.

        Args:
            trainer: mesh, precision and sharding.
            kernel: attention kernel.
        """
        self._trainer, self._kernel = trainer, kernel
        self._block_size = LOGPROB_BLOCK_SIZE[platform_of(trainer)]
        self.compiled: set[tuple[str | int | GroupRow, ...]] = set()
        """Purpose, weights, rows, row length, targets of a position, and group of each program that has run."""
        compiled = functools.partial(
            cast(Any, hax.named_jit),
            axis_resources=trainer.parameter_axis_mapping,
            compiler_options=compiler_options(trainer.device_mesh),
        )
        # Trained weights are never donated: samplers keep them without a copy.
        self._add = compiled(self._add_gradient, donate_args=(False, True, False, False, False))
        self._score = compiled(self._compute_loss)
        self._top = compiled(self._find_top)
        donated = cast(Any, TrainState)(trained=False, mean=True, square=True, steps=True, gradient=True)
        self._step = compiled(adam_step, donate_args=(donated, False))
        self._norm = compiled(gradient_norm)
        self._new = compiled(new_state)
        self._merge = compiled(self._merge_weights)

    def new_state(self, trained: Any) -> TrainState:
        """Return the state before the first step; see `new_state`."""
        with self._trainer.use_device_mesh():
            return self._new(trained)

    def add_gradient(
        self, state: TrainState, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        """Add the gradient of a microbatch to a state; also return its log-probs and its loss.

        The sum of the former state is donated.
        """
        self._count("training", state.trained, batch)
        with self._trainer.use_device_mesh():
            total, logprobs, loss = self._add(state.trained, state.gradient, base, self._place(batch), settings)
        return dataclasses.replace(state, gradient=total), logprobs, loss

    def score(
        self, trained: Any, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[jax.Array, jax.Array]:
        """Return log-probs and loss of a microbatch."""
        self._count("scoring", trained, batch)
        with self._trainer.use_device_mesh():
            loss, logprobs = self._score(trained, base, self._place(batch), settings)
        return logprobs, loss

    def top(
        self, trained: Any, base: LmHeadModel | None, batch: TokenBatch, count: int
    ) -> tuple[Int32[Array, "batch position top"], Float32[Array, "batch position top"]]:
        """Return the `count` likeliest tokens at every position of a microbatch, and their log-probs."""
        self._count(f"the {count} likeliest tokens of", trained, batch)
        with self._trainer.use_device_mesh():
            return self._top(trained, base, self._place(batch), count)

    def step(self, state: TrainState, params: AdamParams) -> tuple[TrainState, dict[str, jax.Array]]:
        """Apply the sum of the gradients of a state, which is donated except for its weights; see `adam_step`."""
        with self._trainer.use_device_mesh():
            return self._step(state, params)

    def gradient_norm(self, state: TrainState) -> float:
        """Return the norm of the sum of the gradients; see `gradient_norm`."""
        with self._trainer.use_device_mesh():
            return float(self._norm(state.gradient))

    def merge(self, trained: Any, base: LmHeadModel | None) -> LmHeadModel:
        """Return the whole model of trained weights in compute precision; these weights themselves, if they are it."""
        with self._trainer.use_device_mesh():
            return self._trainer.mp.cast_to_compute(trained) if base is None else self._merge(trained, base)

    def _count(self, purpose: str, trained: Any, batch: TokenBatch) -> None:
        kind = "the base"
        if isinstance(trained, Adapter):
            kind = f"an adapter of rank {next(iter(trained.layers.values())).a.axis_size(RANK)}"
        elif trained is not None:
            kind = "all weights"
        sizes = (batch.targets.axis_size(name) for name in ("batch", "position", "target"))
        key = purpose, kind, *sizes, batch.group or "no shared prompts"
        if key not in self.compiled:
            number = len(self.compiled) + 1
            logger.info("compiling program %d: %s %s, %d rows of %d positions with %d targets, %s", number, *key)
            self.compiled.add(key)

    def _place(self, batch: TokenBatch) -> TokenBatch:
        return place(batch, self._trainer.device_mesh, self._trainer.compute_axis_mapping)

    def _merge_weights(self, trained: Any, base: LmHeadModel) -> LmHeadModel:
        cast_to_compute = self._trainer.mp.cast_to_compute
        return cast_to_compute(merge_adapter(assemble(cast_to_compute(trained), base)))

    def _add_gradient(
        self, trained: Any, total: Any, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[Any, jax.Array, jax.Array]:
        (loss, logprobs), gradient = eqx.filter_value_and_grad(self._compute_loss, has_aux=True)(
            trained, base, batch, settings
        )
        gradient = shard(gradient, self._trainer.parameter_axis_mapping)
        return jax.tree.map(lambda old, new: old + new.astype(jnp.float32), total, gradient), logprobs, loss

    def _compute_loss(
        self, trained: Any, base: LmHeadModel | None, batch: TokenBatch, settings: LossSettings
    ) -> tuple[jax.Array, jax.Array]:
        """Return the loss of a microbatch, and the log-probs of its targets."""
        with hax.axis_mapping(self._trainer.compute_axis_mapping):
            model = self._whole(trained, base, batch)
            # The penalty of `dro` has a gradient also where the advantage is 0.
            trains = batch.scored.array & ((batch.factors.array != 0) | (settings.beta != 0))
            logprobs = target_logprobs(model, batch, trains, self._block_size)
            terms = token_terms(settings, logprobs, batch.factors.array, batch.old_logprobs.array)
            return jnp.sum(jnp.where(batch.scored.array, terms, 0.0)), logprobs

    def _find_top(self, trained: Any, base: LmHeadModel | None, batch: TokenBatch, count: int) -> tuple[Array, Array]:
        with hax.axis_mapping(self._trainer.compute_axis_mapping):
            model, (Batch, Pos) = self._whole(trained, base, batch), batch.input_ids.axes
            return blockwise_top_logprobs(
                *head_arrays(policy_activations(model, batch), model.get_lm_head(), (Batch, Pos)),
                batch.scored.array[..., 0],
                count=count,
                block_size=self._block_size,
                shards=shards_of(Batch),
                position_shards=context_shards(),
            )

    def _whole(self, trained: Any, base: LmHeadModel | None, batch: TokenBatch) -> LmHeadModel:
        """Return the whole model in compute precision, with the attention kernel of the rows."""
        trained = self._trainer.mp.cast_to_compute(trained)
        model = trained if base is None else base
        config = self._kernel.configure(cast(LmConfig, model.config), batch.input_ids.axis_size("position"))
        # Parameters of an adapter have no attention kernel.
        whole = with_config(model, config, self._trainer)
        return whole if trained is None or base is None else assemble(trained, whole)
