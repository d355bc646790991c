# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How far the policy being trained is from the one that sampled: raw importance weights, summarised and corrected for.

Two halves. `LogRatioStatistics`, on the device, is for logging only: sums are kept instead of means, so that
statistics of microbatches, devices and steps merge exactly; variances and sample sizes are not means and cannot be
averaged. `OffPolicyCorrectionConfig`, on the host, turns `w_t = π_learner/π_sampler`, both with the weights that
sampled, into factors of the policy terms. They carry no gradient.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import draccus
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64

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


LogWeights = Sequence[Float[np.ndarray, " _tokens"]]
"""`log w` (nats) of the action tokens of each rollout."""
Weights = list[Float64[np.ndarray, " _tokens"]]
"""The factor of the policy term of each action token, per rollout."""


def tis_weights(log_weights: LogWeights, cap: float) -> Weights:
    """Truncated importance sampling, per token: `min(w_t, C)`.

    Args:
        log_weights: log w of the action tokens of each rollout.
        cap: C, above 0.

    Returns:
        The factors.

    >>> tis_weights([np.log(np.array([0.5, 1.0, 4.0]))], cap=2.0)[0].tolist()
    [0.5, 1.0, 2.0]

    Source: Ionides 2008, "Truncated importance sampling", equation 3, on every token.
    """
    return [np.minimum(_weights(own), cap) for own in log_weights]


def mask_weights(log_weights: LogWeights, cap: float) -> Weights:
    """Rollouts that the learner finds far likelier than the sampler did are left out: `1[exp(Σ_t log w_t) ≤ C]`.

    Args:
        log_weights: log w of the action tokens of each rollout.
        cap: C, above 0.

    Returns:
        The factors: 1 on all tokens of a rollout, or 0.

    >>> [own.tolist() for own in mask_weights([np.array([0.5, -0.5]), np.array([0.5, 0.5])], cap=2.0)]
    [[1.0, 1.0], [0.0, 0.0]]
    """
    # In logarithms: the product of a long rollout's weights overflows.
    return [np.full(own.shape, 1.0 if math.fsum(own) <= math.log(cap) else 0.0) for own in log_weights]


def icepop_weights(log_weights: LogWeights, low: float, high: float) -> Weights:
    """Weights within bounds, and nothing for the tokens outside: `w_t` if `lo ≤ w_t ≤ hi`, else 0.

    The denominators of the loss stay as they are: a token of weight 0 still counts.

    Args:
        log_weights: log w of the action tokens of each rollout.
        low: lo, in (0, 1].
        high: hi, at least 1.

    Returns:
        The factors.

    >>> icepop_weights([np.log(np.array([0.25, 0.5, 4.0, 8.0]))], low=0.5, high=5.0)[0].tolist()
    [0.0, 0.5, 4.0, 0.0]

    Source: Ling Team 2025 (IcePop), arXiv 2510.18855, section 3.
    """
    weights = [_weights(own) for own in log_weights]
    return [np.where((low <= own) & (own <= high), own, 0.0) for own in weights]


def log_weight_statistics(log_weights: LogWeights) -> LogRatioStatistics:
    """Summarise raw weights on the host, before any truncation, over all action tokens; summed in float64.

    Args:
        log_weights: log w of the action tokens of each rollout.

    Returns:
        The same statistics as `log_ratio_statistics`, of the same tokens.

    >>> statistics = log_weight_statistics([np.log(np.array([3.0])), np.log(np.array([1.0]))])
    >>> round(float(statistics.effective_sample_size), 4)
    0.8
    """
    difference = np.concatenate([np.zeros(0), *log_weights]).astype(np.float64)
    clamped = np.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess = np.expm1(clamped)
    sums = {
        "num_tokens": difference.size,
        "absolute": np.abs(difference).sum(),
        "maximum": np.abs(difference).max(initial=0.0),
        "half_square": np.square(difference).sum() / 2,
        "k3": (excess - clamped).sum(),
        "excess": excess.sum(),
        "squared_excess": np.square(excess).sum(),
    }
    return LogRatioStatistics(**{name: jnp.asarray(float(value)) for name, value in sums.items()})


def mismatch_metrics(statistics: LogRatioStatistics, log_weights: LogWeights = ()) -> dict[str, float]:
    """How far the learner is from the policy that sampled, under the names in which it is logged.

    Nothing else computes `mismatch/*`: without a correction the statistics are those that the first update of a step
    measured, with one those of the host.

    Args:
        statistics: of the raw importance weights under the parameters from before the step.
        log_weights: log w of the action tokens of each rollout, if a correction uses them; adds `mismatch/weight_max`.
    """
    largest = max((float(own.max()) for own in log_weights if own.size), default=None)
    return {
        "mismatch/logprob_difference_mean": float(statistics.mean_absolute),
        "mismatch/logprob_difference_max": float(statistics.maximum),
        "mismatch/k3": float(statistics.mean_k3),
        "mismatch/weight_mean": float(statistics.mean_ratio),
        "mismatch/effective_sample_size": float(statistics.effective_sample_size),
        **(
            {}
            if largest is None
            else {"mismatch/weight_max": math.exp(max(-MAX_LOG_RATIO, min(largest, MAX_LOG_RATIO)))}
        ),
    }


@dataclasses.dataclass(frozen=True)
class OffPolicyCorrectionConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses the correction for a sampler whose probabilities differ from the learner's, by `type`."""

    @property
    @abc.abstractmethod
    def is_token_level(self) -> bool:
        """Whether single tokens of a rollout get weights of their own."""

    @property
    @abc.abstractmethod
    def needs_sampling_logprobs(self) -> bool:
        """Whether the learner has to score the rollouts before it is updated."""

    @abc.abstractmethod
    def weights(self, log_weights: LogWeights) -> Weights:
        """The factor of the policy term of each action token.

        Args:
            log_weights: `log w_t = log π_learner - log π_sampler` of the action tokens of each rollout, both with the
                weights that sampled.
        """


@OffPolicyCorrectionConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoCorrectionConfig(OffPolicyCorrectionConfig):
    """No correction: ratios start from what the sampler recorded."""

    @property
    def is_token_level(self) -> bool:
        """Never."""
        return False

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Never."""
        return False

    def weights(self, log_weights: LogWeights) -> Weights:
        """Always 1."""
        return [np.ones(own.shape) for own in log_weights]


@OffPolicyCorrectionConfig.register_subclass("tis")
@dataclasses.dataclass(frozen=True)
class TisConfig(OffPolicyCorrectionConfig):
    """min(w, C) on every token."""

    cap: float = 2.0
    """C, finite and above 0: no token weighs more."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    @property
    def is_token_level(self) -> bool:
        """Always."""
        return True

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Always."""
        return True

    def weights(self, log_weights: LogWeights) -> Weights:
        """See [`tis_weights`][marin_rl.objectives.importance.tis_weights]."""
        return tis_weights(log_weights, self.cap)


@OffPolicyCorrectionConfig.register_subclass("mask")
@dataclasses.dataclass(frozen=True)
class MaskMismatchConfig(OffPolicyCorrectionConfig):
    """Drops whole rollouts, whose weight is above C."""

    cap: float = 2.0
    """C, finite and above 0: a rollout whose weights multiply to more is left out."""

    def __post_init__(self) -> None:
        _check_cap(self.cap)

    @property
    def is_token_level(self) -> bool:
        """Never."""
        return False

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Always."""
        return True

    def weights(self, log_weights: LogWeights) -> Weights:
        """See [`mask_weights`][marin_rl.objectives.importance.mask_weights]."""
        return mask_weights(log_weights, self.cap)


@OffPolicyCorrectionConfig.register_subclass("icepop")
@dataclasses.dataclass(frozen=True)
class IcepopConfig(OffPolicyCorrectionConfig):
    """w on every token within bounds, 0 on the others."""

    low: float = 0.5
    """lo, in (0, 1]: a token of less weight is left out."""
    high: float = 5.0
    """hi, finite and >= 1: a token of more weight is left out."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1:
            raise ValueError(f"off_policy_correction.low is {self.low}; it must be in (0, 1]")
        if not 1 <= self.high < math.inf:
            raise ValueError(f"off_policy_correction.high is {self.high}; it must be finite and >= 1")

    @property
    def is_token_level(self) -> bool:
        """Always."""
        return True

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Always."""
        return True

    def weights(self, log_weights: LogWeights) -> Weights:
        """See [`icepop_weights`][marin_rl.objectives.importance.icepop_weights]."""
        return icepop_weights(log_weights, self.low, self.high)


def _weights(log_weights: Float[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
    return np.exp(np.clip(log_weights.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _check_cap(cap: float) -> None:
    if not 0 < cap < math.inf:
        raise ValueError(f"off_policy_correction.cap is {cap}; it must be finite and above 0")
