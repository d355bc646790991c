# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The device loss: a plain sum over tokens, and what it measures on the way."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from levanter.metrics import Metric, ReductionType
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.logprobs import token_logprobs
from marin_rl.objectives.importance import LogRatioStatistics, log_ratio_statistics
from marin_rl.objectives.kl import KlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig

_LOG_RATIO = "log_ratio/"


@dataclasses.dataclass(frozen=True)
class RlLoss:
    """A loss function as levanter's `Trainer` takes it.

    ```
    L = Σ_{rows, t} w_t · [ term(log π_t, log π_old_t, A_t) + β · kl(log π_t, log π_ref_t) ]
    ```

    `w` (`RlExample.loss_weights`) already holds the denominators of the whole global batch, so any
    split into microbatches or over a mesh gives the same gradient.
    """

    policy_loss: PolicyLossConfig
    """The policy term."""
    kl: KlConfig
    """Whether, and how, the distance to the reference is part of the loss."""
    temperature: float
    """The sampling temperature; log-probabilities are taken at it."""
    block_size: int
    """Positions whose logits exist at the same time."""
    num_microbatches: int
    """Levanter averages over microbatches; multiplying by their number makes that a sum again."""

    def __call__(
        self, model: LmHeadModel, batch: RlExample, *, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Loss and metrics of one (micro)batch.

        Args:
            model: the policy, in compute precision.
            batch: the rows of this microbatch.
            key: unused; the forward pass is deterministic, as the sampler's is.

        Returns:
            The loss, scaled for the average over microbatches, and metrics that carry their own reduction.
        """
        logprobs, entropies = token_logprobs(model, batch, temperature=self.temperature, block_size=self.block_size)
        axes = batch.input_ids.axes
        mask, weights = batch.loss_mask.array, batch.loss_weights.array
        learner = logprobs.rearrange(axes).array
        policy = batch.policy_logprobs.array
        terms, clipped = self.policy_loss.per_token(learner, policy, batch.advantages.array)
        policy_part = jnp.sum(weights * terms)
        kl_part = jnp.sum(weights * self.kl.loss_terms(learner, batch.reference_logprobs.array))
        metrics = {
            "loss/policy_avg": _sum(policy_part),
            "loss/kl_avg": _sum(kl_part),
            "policy/clipfrac_avg": _mean(clipped, mask),
            "policy/entropy_avg": _mean(entropies.rearrange(axes).array, mask),
            "policy/neg_logprob": _mean(-learner, mask),
        }
        statistics = log_ratio_statistics(jax.lax.stop_gradient(learner), policy, mask)
        for name, value in statistics._asdict().items():
            reduction = ReductionType.MAX if name == "maximum" else ReductionType.SUM
            metrics[_LOG_RATIO + name] = Metric.from_value(value, reduction)
        return (policy_part + kl_part) * self.num_microbatches, metrics


def loss_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an update under their published names, from what [`RlLoss`][marin_rl.learner.loss.RlLoss] summed.

    Args:
        measured: one value per metric, already reduced over microbatches and devices.
    """
    sums = {name.removeprefix(_LOG_RATIO): value for name, value in measured.items() if name.startswith(_LOG_RATIO)}
    ratios = LogRatioStatistics(**{name: jnp.float32(value) for name, value in sums.items()})
    return {
        **{name: value for name, value in measured.items() if not name.startswith(_LOG_RATIO)},
        "objective/entropy": measured["policy/entropy_avg"],
        "policy/approxkl_avg": float(ratios.approximate_kl),
        "val/ratio": float(ratios.mean_ratio),
        "val/ratio_var": float(ratios.ratio_variance),
        "mismatch/logprob_difference_mean": float(ratios.mean_absolute),
        "mismatch/logprob_difference_max": float(ratios.maximum),
        "mismatch/k3": float(ratios.mean_k3),
        "mismatch/effective_sample_size": float(ratios.effective_sample_size),
    }


def _mean(values: jax.Array, mask: jax.Array) -> Metric:
    return Metric(_value=jnp.sum(jnp.where(mask, values, 0)), _count=jnp.sum(mask), reduction=ReductionType.MEAN)


def _sum(value: jax.Array) -> Metric:
    return Metric.from_value(value, ReductionType.SUM)
