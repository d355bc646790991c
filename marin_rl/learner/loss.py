# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The training loss: a plain sum over tokens, with metrics."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.metrics import Metric, ReductionType
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.config import CriticConfig
from marin_rl.learner.critic import ActorCritic, assemble, policy_of
from marin_rl.learner.divergence import token_divergences
from marin_rl.learner.logprobs import (
    LOGPROB_BLOCK_SIZE,
    activations_and_routing,
    policy_activations,
    token_logprobs,
)
from marin_rl.learner.router_loss import load_range, router_loss
from marin_rl.learner.train_step import Frozen
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.objectives.importance import LogRatioStatistics, Sum, log_ratio_statistics
from marin_rl.objectives.kl import ExactKlConfig, KlConfig, NoKlConfig
from marin_rl.objectives.policy_loss import PolicyLoss, TokenBatch
from marin_rl.objectives.value_loss import value_loss_terms
from marin_rl.utils.levanter_line import metric

_LOG_RATIO = "log_ratio/"


@dataclasses.dataclass(frozen=True)
class RlLoss:
    """Loss of a microbatch: the sum of three streams, each with its own weights, and of a mixture's `router_loss`.

    ```
    L = rl + ce + ref_kl
    rl = Σ_{rows, t} w_t · [ c_t · term(log π_t, log π_old_t, A_t) + β · kl(log π_t, log π_ref_t)
                             + v · value(V_t, V_old_t, R_t) ]
    ce = λ · Σ_{rows, t} u_t · (-log π_t)
    ref_kl = β · Σ_{rows, t} v_t · D(π(·|t), π_T(·|t))
    ```

    `w`, `u` and `v` (`loss_weights`, `ce_weights` and `ref_kl_weights` of `RlExample`) already hold the denominators of
    the whole batch, so any split into microbatches or over a mesh gives the same gradient. `c`
    (`RlExample.importance_weights`) corrects for a sampler that differs from the learner, and is 1 without a
    correction. D is the divergence from a teacher over the vocabulary. A stream without weights in the batch is left
    out; supervised training is the stream `ce` alone.
    """

    policy_loss: PolicyLoss | None
    """The policy term; None without the stream `rl`."""
    kl: KlConfig = NoKlConfig()
    """Weight and estimator of the KL penalty to the reference."""
    temperature: float = 1.0
    """Sampling temperature; log-probabilities are computed at this temperature."""
    block_size: int = LOGPROB_BLOCK_SIZE["cpu"]
    """Tokens per device with logits in memory at the same time."""
    critic: CriticConfig | None = None
    """Configuration of the value loss; None without a critic."""
    ce_coefficient: float = 1.0
    """λ, the weight of the cross-entropy."""

    def __call__(
        self, model: Any, batch: RlExample, frozen: Frozen | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Compute a microbatch's part of the loss, and metrics with their reductions.

        `model` has the trained weights in compute precision, `frozen` the base of trained adapters and the teacher of
        the stream `ref_kl`.
        """
        model = assemble(model, None if frozen is None else frozen.base)
        policy_model = policy_of(model)
        trunk, _, routing = activations_and_routing(policy_model, batch)
        logprobs, entropies = token_logprobs(
            trunk, policy_model.get_lm_head(), batch, temperature=self.temperature, block_size=self.block_size
        )
        total, metrics = jnp.zeros(()), {}
        if self.policy_loss is not None:
            total, metrics = self._rl(self.policy_loss, model, batch, trunk, logprobs, entropies)
        if batch.ce_weights is not None:
            ce_part = -jnp.sum(batch.ce_weights.array * logprobs.rearrange(batch.input_ids.axes).array)
            total = total + self.ce_coefficient * ce_part
            metrics["loss/ce_avg"] = _sum(ce_part)
        if batch.ref_kl_weights is not None:
            assert frozen is not None
            assert frozen.teacher is not None
            ref_kl_part = self._ref_kl((trunk, policy_model.get_lm_head()), frozen.teacher, batch)
            total = total + self.kl.beta * ref_kl_part
            metrics["loss/ref_kl_avg"] = _sum(ref_kl_part)
        if routing is not None:
            router_part, of_router = router_loss(policy_model.config, routing)
            total, metrics = total + router_part, metrics | of_router
        return total, metrics

    def _ref_kl(self, policy: tuple[NamedArray, NamedArray], teacher: LmHeadModel, batch: RlExample) -> jax.Array:
        kl, weights = self.kl, batch.ref_kl_weights
        assert isinstance(kl, ExactKlConfig)
        assert weights is not None
        divergences = token_divergences(
            policy,
            (policy_activations(teacher, batch.for_other_model()), teacher.get_lm_head()),
            weights != 0,
            divergence=kl.divergence,
            mixture=kl.mixture,
            temperature=self.temperature,
            block_size=self.block_size,
        )
        return jnp.sum(weights.array * divergences.rearrange(batch.input_ids.axes).array)

    def _rl(
        self,
        policy_loss: PolicyLoss,
        model: Any,
        batch: RlExample,
        trunk: NamedArray,
        logprobs: NamedArray,
        entropies: NamedArray,
    ) -> tuple[jax.Array, dict[str, Metric]]:
        axes = batch.input_ids.axes
        mask, weights = batch.loss_mask.array, batch.loss_weights.array
        learner, policy = logprobs.rearrange(axes).array, batch.policy_logprobs.array
        if batch.ce_weights is not None:
            learner = jnp.where(mask, learner, 0)
        terms, clipped = policy_loss(TokenBatch(learner, policy, batch.advantages.array, mask, batch.rollout_ids.array))
        policy_part = jnp.sum(weights * batch.importance_weights.array * terms)
        kl_part = jnp.sum(weights * self.kl.loss_terms(learner, batch.reference_logprobs.array))
        metrics = {
            "loss/policy_avg": _sum(policy_part),
            "loss/kl_avg": _sum(kl_part),
            "policy/clipfrac_avg": _mean(clipped, mask),
            "policy/entropy_avg": _mean(entropies.rearrange(axes).array, mask),
            "policy/neg_logprob": _mean(-learner, mask),
        }
        ratios = log_ratio_statistics(jax.lax.stop_gradient(learner) - policy, mask)
        for name, value in ratios._asdict().items():
            reduction = ReductionType.MAX if name == "maximum" else ReductionType.SUM
            metrics[_LOG_RATIO + name] = metric(value, reduction)
        total = policy_part + kl_part
        if self.critic is not None and isinstance(model, ActorCritic):
            values = model.values(batch, trunk).array
            terms, clipped = value_loss_terms(values, batch.values.array, batch.returns.array, self.critic.clip)
            value_part = jnp.sum(weights * terms)
            total = total + self.critic.coefficient * value_part
            metrics |= {"loss/value_avg": _sum(value_part), "val/clipfrac_avg": _mean(clipped, mask)}
        return total, metrics


TOKEN_MEAN = TokenMeanConfig()
"""Aggregation of `cross_entropy_loss`: the mean over tokens."""


def cross_entropy_loss(block_size: int) -> RlLoss:
    """Return the loss of supervised training: the stream `ce` alone, at temperature 1.

    At most `block_size` tokens per device have logits in memory at the same time.
    """
    return RlLoss(None, block_size=block_size)


def loss_metrics(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Compute the published metrics of a step from those of [`RlLoss`][marin_rl.learner.loss.RlLoss].

    `updates` are in the order of the step. Losses are averaged over updates, all other metrics over all tokens.
    `objective/entropy` comes from the first update alone, which uses the weights before the step; the metrics of
    log-ratios need the stream `rl`.
    """
    # The parts of the loss add up over the microbatches of an update, and are averaged over the updates of a step.
    published = {
        name: sum(_fold([update[name]]) for update in updates) / len(updates)
        if name.startswith("loss/")
        else _fold([update[name] for update in updates])
        for name in updates[0]
        if not name.startswith(_LOG_RATIO)
    }
    if "policy/entropy_avg" in updates[0]:
        ratios = _log_ratios(updates)
        published |= {
            "objective/entropy": _fold([updates[0]["policy/entropy_avg"]]),
            "policy/approxkl_avg": ratios.approximate_kl,
            "val/ratio": ratios.mean_ratio,
            "val/ratio_var": ratios.ratio_variance,
        }
    values = {name: float(value) for name, value in published.items()}
    return values | load_range(values)


def first_log_ratios(updates: Sequence[Mapping[str, Metric]]) -> LogRatioStatistics:
    """Return the log-ratios of a step's first update, the only one that uses the weights before the step."""
    return _log_ratios(updates[:1])


def _log_ratios(updates: Sequence[Mapping[str, Metric]]) -> LogRatioStatistics:
    fields = LogRatioStatistics._fields
    return LogRatioStatistics(*(_fold([update[_LOG_RATIO + name] for update in updates]) for name in fields))


def _fold(metrics: Sequence[Metric]) -> Sum:
    """Merge the values of a metric in several updates, with numpy: jax would compile each operation."""
    values = [np.asarray(metric._value) for metric in metrics]
    match metrics[0].reduction:
        case ReductionType.MEAN:
            count = sum(np.asarray(metric._count) for metric in metrics)
            return sum(values) / count if count > 0 else 0.0
        case ReductionType.SUM:
            return sum(values)
        case ReductionType.MAX:
            return max(values)
        case ReductionType.MIN:
            return min(values)
        case ReductionType.LAST:
            return values[-1]


def _mean(values: jax.Array, mask: jax.Array) -> Metric:
    return Metric(_value=jnp.sum(jnp.where(mask, values, 0)), _count=jnp.sum(mask), reduction=ReductionType.MEAN)


def _sum(value: jax.Array) -> Metric:
    return metric(value, ReductionType.SUM)
