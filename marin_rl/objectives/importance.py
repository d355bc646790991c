# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Importance weights between the learner and the sampling policy: statistics and off-policy corrections.

The statistics are for logging only. They are sums instead of means, so that those of microbatches, devices and steps
merge exactly; variances and effective sample sizes cannot be averaged. The corrections compute, on the host, factors of
the policy terms from `w_t = π_learner/π_sampler`, both evaluated with the weights that sampled. The factors have no
gradient.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import draccus
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Le
from jaxtyping import Array, Bool, Float, Float64

from marin_rl.objectives.advantage_inputs import split
from marin_rl.objectives.kl import MAX_LOG_RATIO
from marin_rl.utils.settings.checks import ConfigSection

LogWeights = Float[np.ndarray, " tokens"]
"""`log w` (nats) of the action tokens of all rollouts."""
Weights = Float64[np.ndarray, " tokens"]
"""The factor of the policy term of each action token."""
Sum = Float[Array, ""] | Float[np.ndarray, ""] | np.floating | float
"""Scalar on the devices or on the host."""


class LogRatioStatistics(NamedTuple):
    """Sums over loss tokens of functions of `Δ = log π - log π_old`; a pytree of scalars.

    Weights are `w = exp(Δ)` with Δ clamped to ±20 and no other truncation. The sums are of `w - 1` instead of w, which
    avoids cancellation in the variance if the weights are close to 1.
    """

    num_tokens: Sum
    """Number of loss tokens, n."""
    absolute: Sum
    """Σ |Δ|, unclamped (nats)."""
    maximum: Sum
    """max |Δ|, unclamped (nats); 0 if there are no tokens."""
    half_square: Sum
    """Σ Δ²/2."""
    k3: Sum
    """Σ (w - 1 - Δ)."""
    excess: Sum
    """Σ (w - 1)."""
    squared_excess: Sum
    """Σ (w - 1)²."""
    ratio: Sum
    """Σ w; unlike `excess`, exact for w close to 0."""
    squared_ratio: Sum
    """Σ w²."""

    @property
    def mean_absolute(self) -> Sum:
        """Mean |Δ| (nats): the log-probability difference between sampler and learner."""
        return self.absolute / self._divisor

    @property
    def approximate_kl(self) -> Sum:
        """½·mean(Δ²), the `approxkl` of PPO in OpenAI's baselines (`ppo2`)."""
        return self.half_square / self._divisor

    @property
    def mean_k3(self) -> Sum:
        """Mean k3, an estimate of KL(π_old‖π) per token from tokens sampled by π_old; >= 0 up to rounding.

        Source: Schulman 2020, "Approximating KL divergence".
        """
        return self.k3 / self._divisor

    @property
    def mean_ratio(self) -> Sum:
        """Mean of w, close to 1 if the two policies are close; 1 if there are no tokens."""
        return 1 + self.excess / self._divisor

    @property
    def ratio_variance(self) -> Sum:
        """Population variance of w over tokens."""
        mean_excess = self.excess / self._divisor
        return np.maximum(self.squared_excess / self._divisor - np.square(mean_excess), 0)

    @property
    def effective_sample_size(self) -> Sum:
        """Effective sample size as a share of the tokens, `(Σw)²/(n·Σw²)`, in (0, 1]; 1 if there are no tokens.

        Source: Kong 1992, "A note on importance sampling using standardized weights"; Owen 2013, "Monte Carlo theory,
        methods and examples", section 9.3.
        """
        if self.num_tokens == 0:
            return 1.0
        return np.square(self.ratio) / (self._divisor * self.squared_ratio)

    @property
    def _divisor(self) -> Sum:
        return np.maximum(self.num_tokens, 1)


def log_ratio_statistics(
    log_ratios: Float[Array | np.ndarray, "*shape"], loss_mask: Bool[Array | np.ndarray, "*shape"]
) -> LogRatioStatistics:
    """Summarise the raw importance weights of a batch.

    Args:
        log_ratios: Δ = log π - log π_old (nats) of each sampled token; may have any value outside the mask. jax arrays,
            passed through `stop_gradient`, are summed on the device in their own dtype, numpy arrays on the host.
        loss_mask: True for loss tokens.

    Returns:
        Sums over the loss tokens; mean, variance and effective sample size are properties of the result.

    >>> log_ratios = jnp.log(jnp.array([3.0, 1.0, 9.0]))
    >>> statistics = log_ratio_statistics(log_ratios, jnp.array([True, True, False]))
    >>> round(float(statistics.effective_sample_size), 4)
    0.8
    """
    xp = np if isinstance(log_ratios, np.ndarray) else jnp
    # Values outside the mask are zeroed before exp, because 0 times infinity is NaN.
    difference = xp.where(loss_mask, log_ratios, 0)
    clamped = xp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = xp.expm1(clamped)
    ratios = xp.where(loss_mask, xp.exp(clamped), 0)
    return LogRatioStatistics(
        num_tokens=xp.sum(loss_mask, dtype=difference.dtype),
        absolute=xp.sum(xp.abs(difference)),
        maximum=xp.max(xp.abs(difference), initial=0),
        half_square=xp.sum(xp.square(difference)) / 2,
        k3=xp.sum(excess - clamped),
        excess=xp.sum(excess),
        squared_excess=xp.sum(xp.square(excess)),
        ratio=xp.sum(ratios),
        squared_ratio=xp.sum(xp.square(ratios)),
    )


def log_weight_statistics(log_weights: LogWeights) -> LogRatioStatistics:
    """Apply `log_ratio_statistics` to the raw weights of all action tokens, on the host in float64.

    >>> statistics = log_weight_statistics(np.log(np.array([3.0, 1.0])))
    >>> round(float(statistics.effective_sample_size), 4)
    0.8
    """
    return log_ratio_statistics(log_weights.astype(np.float64), np.ones(log_weights.shape, bool))


def mismatch_metrics(statistics: LogRatioStatistics, log_weights: LogWeights | None = None) -> dict[str, float]:
    """Compute the `mismatch/*` metrics, the divergence between the learner and the sampling policy.

    Args:
        statistics: statistics of the raw importance weights under the parameters before the step: those of the first
            update of the step, or `log_weight_statistics` if there is a correction.
        log_weights: log w of the action tokens, if a correction uses them; adds `mismatch/weight_max`.
    """
    metrics = {
        "mismatch/logprob_difference_mean": float(statistics.mean_absolute),
        "mismatch/logprob_difference_max": float(statistics.maximum),
        "mismatch/k3": float(statistics.mean_k3),
        "mismatch/weight_mean": float(statistics.mean_ratio),
        "mismatch/effective_sample_size": float(statistics.effective_sample_size),
    }
    if log_weights is not None and log_weights.size:
        metrics["mismatch/weight_max"] = math.exp(np.clip(log_weights.max(), -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return metrics


@dataclasses.dataclass(frozen=True)
class OffPolicyCorrectionConfig(ConfigSection, draccus.ChoiceRegistry, abc.ABC):
    """Correction for differences between sampler and learner probabilities, selected by `type`."""

    is_token_level: ClassVar[bool] = False
    """Whether the tokens of one rollout can have different weights."""
    needs_sampling_logprobs: ClassVar[bool] = True
    """Whether the learner scores the rollouts before the first update of a step."""

    @abc.abstractmethod
    def weights(self, log_weights: LogWeights, lengths: Sequence[int]) -> Weights:
        """Compute the factor of the policy term of each action token.

        Args:
            log_weights: `log w_t = log π_learner - log π_sampler` of the action tokens of all rollouts, both with the
                weights that sampled.
            lengths: number of action tokens of each rollout.
        """


@OffPolicyCorrectionConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoCorrectionConfig(OffPolicyCorrectionConfig):
    """No correction: ratios are relative to the sampler's recorded log-probabilities."""

    needs_sampling_logprobs: ClassVar[bool] = False

    def weights(self, log_weights: LogWeights, lengths: Sequence[int]) -> Weights:
        """Return 1 for every action token."""
        return np.ones(log_weights.shape)


def tis_weights(log_weights: LogWeights, cap: float) -> Weights:
    """Compute token-level truncated importance weights, `min(w_t, C)`. C is `cap`, above 0.

    >>> tis_weights(np.log(np.array([0.5, 1.0, 4.0])), cap=2.0).tolist()
    [0.5, 1.0, 2.0]

    Source: Ionides 2008, "Truncated importance sampling", equation 3, on every token.
    """
    return np.minimum(_weights(log_weights), cap)


@OffPolicyCorrectionConfig.register_subclass("tis")
@dataclasses.dataclass(frozen=True)
class TisConfig(OffPolicyCorrectionConfig):
    """Truncated importance weight min(w, C) on every token."""

    is_token_level: ClassVar[bool] = True

    cap: Annotated[float, Gt(0)] = 2.0
    """C: the largest weight of a token."""

    def weights(self, log_weights: LogWeights, lengths: Sequence[int]) -> Weights:
        """See [`tis_weights`][marin_rl.objectives.importance.tis_weights]."""
        return tis_weights(log_weights, self.cap)


def mask_weights(log_weights: LogWeights, lengths: Sequence[int], cap: float) -> Weights:
    """Mask rollouts that are much more probable under the learner than under the sampler, `1[exp(Σ_t log w_t) ≤ C]`.

    C is `cap`, above 0. `lengths` are the numbers of action tokens of each rollout.

    Returns:
        1 for all tokens of a rollout, or 0 for all.

    >>> mask_weights(np.array([0.5, -0.5, 0.5, 0.5]), [2, 2], cap=2.0).tolist()
    [1.0, 1.0, 0.0, 0.0]

    Source: sequence-level masked importance sampling; Liu et al. 2025, "When speed kills stability: demystifying RL
    collapse from the training-inference mismatch".
    """
    # The sum of logarithms avoids overflow of the product of a long rollout's weights.
    sums = np.array([math.fsum(of_rollout.tolist()) for of_rollout in split(log_weights, lengths)])
    return np.repeat((sums <= math.log(cap)).astype(np.float64), lengths)


@OffPolicyCorrectionConfig.register_subclass("mask")
@dataclasses.dataclass(frozen=True)
class MaskMismatchConfig(OffPolicyCorrectionConfig):
    """Masks whole rollouts with a weight above C."""

    cap: Annotated[float, Gt(0)] = 2.0
    """C: rollouts with a larger product of weights are masked."""

    def weights(self, log_weights: LogWeights, lengths: Sequence[int]) -> Weights:
        """See [`mask_weights`][marin_rl.objectives.importance.mask_weights]."""
        return mask_weights(log_weights, lengths, self.cap)


def icepop_weights(log_weights: LogWeights, low: float, high: float) -> Weights:
    """Keep token weights within bounds and mask all other tokens: `w_t` if `lo ≤ w_t ≤ hi`, else 0.

    The denominators of the loss do not change: a token of weight 0 is still counted. `lo` is in (0, 1], and `hi` at
    least 1.

    >>> icepop_weights(np.log(np.array([0.25, 0.5, 4.0, 8.0])), low=0.5, high=5.0).tolist()
    [0.0, 0.5, 4.0, 0.0]

    Source: Ling Team 2025 (IcePop), arXiv 2510.18855, section 3.
    """
    weights = _weights(log_weights)
    return np.where((low <= weights) & (weights <= high), weights, 0.0)


@OffPolicyCorrectionConfig.register_subclass("icepop")
@dataclasses.dataclass(frozen=True)
class IcepopConfig(OffPolicyCorrectionConfig):
    """Weight w on every token within bounds, 0 on all others."""

    is_token_level: ClassVar[bool] = True

    low: Annotated[float, Gt(0), Le(1)] = 0.5
    """lo: tokens with a smaller weight are masked."""
    high: Annotated[float, Ge(1)] = 5.0
    """hi: tokens with a larger weight are masked."""

    def weights(self, log_weights: LogWeights, lengths: Sequence[int]) -> Weights:
        """See [`icepop_weights`][marin_rl.objectives.importance.icepop_weights]."""
        return icepop_weights(log_weights, self.low, self.high)


def _weights(log_weights: LogWeights) -> Weights:
    return np.exp(np.clip(log_weights.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))
