# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How far the policy being trained is from the one that sampled: raw importance weights, summarised.

For logging only. The sums are kept instead of the means, so that statistics of microbatches, devices
and steps merge exactly; variances and sample sizes are not means and cannot be averaged.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marin_rl.objectives.kl import MAX_LOG_RATIO


class LogRatioStatistics(NamedTuple):
    """Sums over loss tokens of functions of `Δ = log π - log π_old`; a pytree of scalars.

    Weights are `w = exp(Δ)` with Δ clamped to ±20 and nothing else truncated. `w - 1` is summed
    rather than w, which keeps the variance of weights near 1 from drowning in rounding.
    """

    num_tokens: Float[Array, ""]
    """Number of loss tokens, n."""
    absolute: Float[Array, ""]
    """Σ |Δ|, unclamped (nats)."""
    maximum: Float[Array, ""]
    """max |Δ|, unclamped (nats); 0 where there are no tokens."""
    half_square: Float[Array, ""]
    """Σ Δ²/2."""
    k3: Float[Array, ""]
    """Σ (w - 1 - Δ)."""
    excess: Float[Array, ""]
    """Σ (w - 1)."""
    squared_excess: Float[Array, ""]
    """Σ (w - 1)²."""

    def merge(self, other: "LogRatioStatistics") -> "LogRatioStatistics":
        """The statistics of both sets of tokens together."""
        return LogRatioStatistics(
            num_tokens=self.num_tokens + other.num_tokens,
            absolute=self.absolute + other.absolute,
            maximum=jnp.maximum(self.maximum, other.maximum),
            half_square=self.half_square + other.half_square,
            k3=self.k3 + other.k3,
            excess=self.excess + other.excess,
            squared_excess=self.squared_excess + other.squared_excess,
        )

    @property
    def mean_absolute(self) -> Float[Array, ""]:
        """Mean |Δ| (nats): the log-prob difference between sampler and learner."""
        return self.absolute / self._divisor

    @property
    def approximate_kl(self) -> Float[Array, ""]:
        """½·mean(Δ²), the `approxkl` of PPO."""
        return self.half_square / self._divisor

    @property
    def mean_k3(self) -> Float[Array, ""]:
        """Mean k3: estimates KL(π_old‖π) per token, from tokens that π_old sampled; >= 0 up to rounding."""
        return self.k3 / self._divisor

    @property
    def mean_ratio(self) -> Float[Array, ""]:
        """Mean of w; near 1 while the two policies are near each other. 1 where there are no tokens."""
        return 1 + self.excess / self._divisor

    @property
    def ratio_variance(self) -> Float[Array, ""]:
        """Population variance of w over tokens."""
        mean_excess = self.excess / self._divisor
        return jnp.maximum(self.squared_excess / self._divisor - jnp.square(mean_excess), 0)

    @property
    def effective_sample_size(self) -> Float[Array, ""]:
        """`(Σw)²/(n·Σw²)`, in (0, 1]: the share of tokens that the weighted batch is worth."""
        return jnp.square(self.mean_ratio) / (jnp.square(self.mean_ratio) + self.ratio_variance)

    @property
    def _divisor(self) -> Float[Array, ""]:
        return jnp.maximum(self.num_tokens, 1)


def log_ratio_statistics(
    logprobs: Float[Array, "*shape"], policy_logprobs: Float[Array, "*shape"], loss_mask: Bool[Array, "*shape"]
) -> LogRatioStatistics:
    """Summarise the raw importance weights of a batch. No gradient is meant to flow through it.

    Args:
        logprobs: log π (nats) of each sampled token under the learner's weights, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        loss_mask: True on the tokens that count.

    Returns:
        Sums over the loss tokens; means, variance and effective sample size are its properties.

    >>> weights = jnp.array([3.0, 1.0, 9.0])
    >>> statistics = log_ratio_statistics(jnp.log(weights), jnp.zeros(3), jnp.array([True, True, False]))
    >>> round(float(statistics.effective_sample_size), 4)
    0.8
    """
    # Padding may hold anything; it is zeroed before exp, so that no infinity meets a zero weight.
    difference = jnp.where(loss_mask, logprobs - policy_logprobs, 0)
    clamped = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = jnp.expm1(clamped)
    return LogRatioStatistics(
        num_tokens=jnp.sum(loss_mask, dtype=difference.dtype),
        absolute=jnp.sum(jnp.abs(difference)),
        maximum=jnp.max(jnp.abs(difference), initial=0),
        half_square=jnp.sum(jnp.square(difference)) / 2,
        k3=jnp.sum(excess - clamped),
        excess=jnp.sum(excess),
        squared_excess=jnp.sum(jnp.square(excess)),
    )
