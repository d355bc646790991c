# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loss of preference pairs (DPO), with metrics."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from levanter.metrics import Metric, ReductionType

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.critic import assemble
from marin_rl.learner.logprobs import activations_and_routing, token_logprobs
from marin_rl.learner.router_loss import router_loss
from marin_rl.learner.train_step import Frozen
from marin_rl.objectives.aggregation import SequenceMeanConfig
from marin_rl.objectives.preference import PreferenceLossConfig, pair_sums, preference_metrics

PAIR_MEAN = SequenceMeanConfig()
"""Aggregation of the loss: the mean over the answers of all pairs."""


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """Loss function of pairs for [`Learner`][marin_rl.learner.train_step.Learner].

    ```
    L = Σ_i W_i · ℓ(m_i)       m_i = Σ_{t in pair i} s_t · (log π_t - log π_ref,t)
    ```

    A pair is a rollout of a chosen and a rejected answer in one microbatch. `s` (`RlExample.advantages`) is 1 on chosen
    tokens and -1 on rejected ones, or these divided by the number of tokens of the answer. The weights of a pair's
    tokens (`RlExample.loss_weights`) sum to W, 1/N for N pairs in the whole batch, so any split into microbatches or
    over a mesh gives the same gradient.
    """

    config: PreferenceLossConfig
    """The loss of a pair."""
    block_size: int
    """Tokens per device with logits in memory at the same time."""

    def __call__(
        self, model: Any, batch: RlExample, frozen: Frozen | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Compute a microbatch's part of the loss, and metrics with their reductions, all means over pairs.

        The microbatch has all tokens of each of its pairs. `model` has the trained weights in compute precision,
        `frozen` the base of trained adapters.
        """
        model = assemble(model, None if frozen is None else frozen.base)
        trunk, _, routing = activations_and_routing(model, batch)
        logprobs, _ = token_logprobs(trunk, model.get_lm_head(), batch, temperature=1.0, block_size=self.block_size)
        pairs = pair_sums(
            logprobs.rearrange(batch.input_ids.axes).array,
            batch.reference_logprobs.array,
            batch.advantages.array,
            batch.loss_weights.array,
            batch.rollout_ids.array,
        )
        values = preference_metrics(pairs, self.config)
        total = jnp.sum(pairs.weights)
        metrics = {
            name: Metric(jnp.sum(pairs.weights * value), total, reduction=ReductionType.MEAN)
            for name, value in values.items()
        }
        loss = jnp.sum(pairs.weights * values["loss/dpo"])
        if routing is not None:
            router_part, of_router = router_loss(model.config, routing)
            loss, metrics = loss + router_part, metrics | of_router
        return loss, metrics
