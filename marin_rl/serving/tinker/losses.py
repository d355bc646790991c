# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The losses of the Tinker API: plain sums over tokens, with a target, a factor and old log-probs for each token.

With `l = log π(target)`, `q` the old log-prob, `A` the advantage, and `r = exp(l - q)`:

| loss | term of a token | settings and their defaults |
|---|---|---|
| `cross_entropy` | `-w l` | |
| `importance_sampling` | `-r A` | |
| `ppo` | `-min(r A, clip(r, low, high) A)` | `clip_low_threshold` 0.8, `clip_high_threshold` 1.2 |
| `cispo` | `-stop(clip(r, low, high)) l A` | `clip_low_threshold` 0, `clip_high_threshold` 4 |
| `dro` | `-(l A - beta (l - q)² / 2)` | `beta`, without a default |

`l - q` is limited to ±20 in a ratio, as in all policy terms (`marin_rl.objectives.policy_loss`).

Source: the documentation of the Tinker SDK, "Loss functions".
"""

from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.attention_kernel import AttentionKernel
from marin_rl.batching.target_example import TargetExample
from marin_rl.learner.attention_layers import context_shards
from marin_rl.learner.blocks import head_arrays, shards_of
from marin_rl.learner.logprobs import blockwise_logprobs, blockwise_top_logprobs, policy_activations
from marin_rl.learner.policy_spec import with_config
from marin_rl.learner.train_step import Frozen
from marin_rl.models.lora import with_adapter
from marin_rl.objectives.policy_loss import cispo_terms, importance_terms, ppo_clip_terms, reinforce_terms
from marin_rl.serving.tinker.records import CLIP, LOSSES, ForwardBackward


class LossSettings(NamedTuple):
    """A loss and its settings, as arguments of a compiled program."""

    number: Any
    """Index of the loss in `LOSSES`."""
    low: Any
    high: Any
    beta: Any


def read_settings(request: ForwardBackward) -> LossSettings:
    """Return the loss of a request, as checked by `forward_backward_of`."""
    values = {**LOSSES[request.loss_fn].settings, **request.config}
    low, high, beta = (np.float32(values.get(name, 0.0)) for name in (*CLIP, "beta"))
    return LossSettings(np.int32(list(LOSSES).index(request.loss_fn)), low, high, beta)


class TargetLoss(eqx.Module):
    """The loss of a microbatch, which reports the log-probs of its targets; a `Loss` of the learner."""

    settings: LossSettings
    """The loss."""
    kernel: AttentionKernel = eqx.field(static=True)
    """Attention kernel."""
    block_size: int = eqx.field(static=True)
    """Positions whose logits are in memory at once."""

    def __call__(
        self, trained: Any, batch: TargetExample, frozen: Frozen | None = None
    ) -> tuple[Float32[Array, ""], tuple[Float32[Array, "batch position target"]]]:
        """Return the loss, and the log-probs at temperature 1, 0 off the loss mask."""
        model, mask = whole_model(trained, batch, frozen, self.kernel), batch.loss_mask.array
        # The penalty of `dro` has a gradient also where the advantage is 0.
        trains = mask & ((batch.advantages.array != 0) | (self.settings.beta != 0))
        logprobs = target_logprobs(model, batch, trains, self.block_size)
        terms = token_terms(self.settings, logprobs, batch.advantages.array, batch.policy_logprobs.array)
        return jnp.sum(jnp.where(mask, terms, 0.0)), (logprobs,)


class TopTokens(eqx.Module):
    """Reports the likeliest tokens at every position of a microbatch, and their log-probs; without a loss."""

    count: int = eqx.field(static=True)
    """Number of tokens."""
    kernel: AttentionKernel = eqx.field(static=True)
    """Attention kernel."""
    block_size: int = eqx.field(static=True)
    """As in `TargetLoss`."""

    def __call__(
        self, trained: Any, batch: TargetExample, frozen: Frozen | None = None
    ) -> tuple[Float32[Array, ""], tuple[Int32[Array, "batch position top"], Float32[Array, "batch position top"]]]:
        """Return 0, and ids and log-probs."""
        model, (Batch, Pos) = whole_model(trained, batch, frozen, self.kernel), batch.input_ids.axes
        return jnp.zeros(()), blockwise_top_logprobs(
            *head_arrays(policy_activations(model, batch), model.get_lm_head(), (Batch, Pos)),
            batch.loss_mask.array[..., 0],
            count=self.count,
            block_size=self.block_size,
            shards=shards_of(Batch),
            position_shards=context_shards(),
        )


def whole_model(trained: Any, batch: TargetExample, frozen: Frozen | None, kernel: AttentionKernel) -> LmHeadModel:
    """Return the model of trained weights, with the attention kernel of the rows."""
    base = cast(Any, trained if frozen is None else frozen.base)
    # Parameters of an adapter have no attention kernel.
    model = with_config(base, kernel.configure(base.config, batch.input_ids.axis_size("position")))
    return model if frozen is None else with_adapter(model, trained)


def target_logprobs(
    model: LmHeadModel, batch: TargetExample, trains: Bool[Array, "batch position target"], block_size: int
) -> Float32[Array, "batch position target"]:
    """Compute the log-probs of the targets at temperature 1, 0 off the loss mask; the head runs once for every target.

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
    constant = score(*jax.lax.stop_gradient((activations, lm_head)), batch.loss_mask.array & ~trains)
    return score(activations, lm_head, trains) + constant


def token_terms(
    settings: LossSettings,
    logprobs: Float32[Array, "*shape"],
    factors: Float32[Array, "*shape"],
    old: Float32[Array, "*shape"],
) -> Float32[Array, "*shape"]:
    """Compute the term of every token.

    `settings` are traced, so that all losses are one program. `factors` are weights `w` or advantages `A`; `logprobs`
    are `l` of the targets, `old` are `q`, or 0 without them.
    """
    tokens = (logprobs, old, factors)

    def cross_entropy() -> Array:
        return reinforce_terms(logprobs, factors)

    def importance_sampling() -> Array:
        return importance_terms(*tokens)

    def ppo() -> Array:
        return ppo_clip_terms(*tokens, 1 - settings.low, settings.high - 1).terms

    def cispo() -> Array:
        return cispo_terms(*tokens, 1 - settings.low, settings.high - 1).terms

    def dro() -> Array:
        return reinforce_terms(logprobs, factors) + settings.beta / 2 * jnp.square(logprobs - old)

    return jax.lax.switch(settings.number, (cross_entropy, importance_sampling, ppo, cispo, dro))
