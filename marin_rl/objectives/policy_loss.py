# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy terms: the contribution of each sampled token to the loss, and their configs.

`r_t = exp(clamp(log π - log π_old, ±20))`, with π the policy being trained and π_old the sampling policy. All terms
are minimised: a positive advantage raises the probability of its token. There is one term per token; the loss weights
(`aggregation.py`) mask and average them.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le, Lt
from jaxtyping import Array, Bool, Float, Int

from marin_rl.objectives.kl import MAX_LOG_RATIO
from marin_rl.utils.settings.checks import ConfigSection

Bound = float | Float[Array, ""]
"""A bound of the ratio; traced, if values shall not compile other programs."""


class TokenBatch(NamedTuple):
    """Per-token inputs of a policy term, all of the same shape."""

    logprobs: Float[Array, "*shape"]
    """log π (nats) of each sampled token under the policy being trained, float32."""
    policy_logprobs: Float[Array, "*shape"]
    """log π_old of the same tokens, recorded at sampling."""
    advantages: Float[Array, "*shape"]
    """Advantage of each token."""
    loss_mask: Bool[Array, "*shape"]
    """True for loss tokens. Outside the mask the other arrays may have any value, including NaN."""
    rollout_ids: Int[Array, "*shape"]
    """Rollout of each token, in [0, size of the array); -1 for padding. A rollout may span several rows, and a row may
    contain several rollouts, but all tokens of a rollout are within the array."""


class PolicyTerms(NamedTuple):
    """Policy term and clipping flag of each token."""

    terms: Float[Array, "*shape"]
    """Terms to minimise, before weighting."""
    clipped: Bool[Array, "*shape"]
    """True if a bound on the ratio is active: the term is a constant or, in `cispo`, its weight is at a bound. The mean
    is the clip fraction."""


PolicyLoss = Callable[[TokenBatch], PolicyTerms]
"""Computes the policy term and clipping flag of each token."""


def unclipped(terms: Float[Array, "*shape"]) -> PolicyTerms:
    """Return the terms of a loss without bounds."""
    return PolicyTerms(terms, jnp.zeros(terms.shape, bool))


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig(ConfigSection, draccus.ChoiceRegistry, abc.ABC):
    """Policy term, selected by `type`."""

    is_sequence_level: ClassVar[bool] = False
    """Whether the term uses one ratio per rollout, so that the tokens of a rollout cannot be weighted separately."""
    uses_ratio: ClassVar[bool] = True
    """Whether the term corrects for policy updates since sampling, which allows several updates per step."""
    needs_advantage: ClassVar[bool] = True
    """Whether a token with the advantage 0 has no gradient, so that a batch of such tokens makes no update."""

    @abc.abstractmethod
    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """Compute the policy term and clipping flag of each token."""


def policy_ratio(logprobs: Float[Array, "*shape"], policy_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute the importance ratio, `r_t = exp(clamp(log π - log π_old, ±20))`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded at sampling.

    Returns:
        r per token, between exp(-20) and exp(20).

    >>> policy_ratio(jnp.array([0.0, -99.0]), jnp.array([0.0, -0.5])).round(3).tolist()
    [1.0, 0.0]

    Source: Schulman et al. 2017, arXiv 1707.06347, section 3.
    """
    return _exp(logprobs - policy_logprobs)


def reinforce_terms(logprobs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute the score-function term, `-A·log π`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        advantages: advantage of each token.

    Returns:
        The term per token.

    >>> reinforce_terms(jnp.array([-0.5, -2.0]), jnp.array([1.0, -1.0])).tolist()
    [0.5, -2.0]

    Source: Williams 1992.
    """
    return -advantages * logprobs


@PolicyLossConfig.register_subclass("reinforce")
@dataclasses.dataclass(frozen=True)
class ReinforceLossConfig(PolicyLossConfig):
    """Score-function term -A·log π, for one on-policy update per batch; ignores the sampling policy."""

    uses_ratio: ClassVar[bool] = False

    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """See [`reinforce_terms`][marin_rl.objectives.policy_loss.reinforce_terms]."""
        return unclipped(reinforce_terms(tokens.logprobs, tokens.advantages))


def importance_terms(
    logprobs: Float[Array, "*shape"], policy_logprobs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Compute the importance-weighted term, `-A·r_t`. Its gradient equals that of `reinforce` if π = π_old.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded at sampling.
        advantages: advantage of each token.

    Returns:
        The term per token.

    >>> importance_terms(jnp.array([-0.5]), jnp.array([-0.5]), jnp.array([2.0])).tolist()
    [-2.0]

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 6.
    """
    return -advantages * policy_ratio(logprobs, policy_logprobs)


@PolicyLossConfig.register_subclass("importance")
@dataclasses.dataclass(frozen=True)
class ImportanceLossConfig(PolicyLossConfig):
    """Importance-weighted term -A·r_t: corrects for policy updates since sampling, without a bound."""

    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """See [`importance_terms`][marin_rl.objectives.policy_loss.importance_terms]."""
        return unclipped(importance_terms(tokens.logprobs, tokens.policy_logprobs, tokens.advantages))


def ppo_clip_terms(
    logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    clip_low: Bound,
    clip_high: Bound,
    dual_clip: Annotated[float, Gt(1)] | None = None,
) -> PolicyTerms:
    """Compute the clipped term, `max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high))`.

    With a dual clip c, tokens of negative advantage get the minimum of this term and `-c·A`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded at sampling.
        advantages: advantage of each token.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, not negative.
        dual_clip: c, greater than 1; None for no dual clip.

    Returns:
        The terms, and whether either clip is active.

    >>> ppo_clip_terms(jnp.array([0.5, 0.5]), jnp.array([0.0, 0.0]), jnp.array([1.0, -1.0]), 0.2, 0.2).clipped.tolist()
    [True, False]

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 7; Ye et al. 2020, arXiv 1912.09729, equation 5 (dual
    clip); Yu et al. 2025, arXiv 2503.14476, equation 10 (ε_low ≠ ε_high).
    """
    terms, clipped = _clipped_terms(policy_ratio(logprobs, policy_logprobs), advantages, clip_low, clip_high)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (terms > ceiling)
        terms = jnp.where(over, ceiling, terms)
        clipped = clipped | over
    return PolicyTerms(terms, clipped)


@PolicyLossConfig.register_subclass("ppo_clip")
@dataclasses.dataclass(frozen=True)
class PpoClipLossConfig(PolicyLossConfig):
    """The clipped ratio of PPO: limits the change of a token's probability per batch."""

    clip_low: Annotated[float, Ge(0), Lt(1)] = 0.2
    """ε_low: a token of negative advantage has no gradient below r = 1 - ε_low."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """ε_high: a token of positive advantage has no gradient above r = 1 + ε_high."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """c: a token of negative advantage has no gradient above r = c; null for no such bound."""

    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """See [`ppo_clip_terms`][marin_rl.objectives.policy_loss.ppo_clip_terms]."""
        logprobs, policy_logprobs, advantages, _, _ = tokens
        return ppo_clip_terms(logprobs, policy_logprobs, advantages, self.clip_low, self.clip_high, self.dual_clip)


def sequence_log_ratios(tokens: TokenBatch) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Compute the log-ratio of each token's rollout, `Σ_t (log π - log π_old)`, and its number of loss tokens T.

    Args:
        tokens: the tokens of whole rollouts; advantages are not used.

    Returns:
        The unclamped sum and T for each loss token; 0 and 1 elsewhere.

    >>> mask, ids = jnp.array([[True, True, False], [True, True, False]]), jnp.array([[0, 1, 1], [1, 1, -1]])
    >>> logprobs, policy_logprobs = jnp.full((2, 3), -0.5), jnp.full((2, 3), -1.0)
    >>> sums, lengths = sequence_log_ratios(TokenBatch(logprobs, policy_logprobs, jnp.ones((2, 3)), mask, ids))
    >>> sums.tolist(), lengths.tolist()
    ([[0.5, 1.5, 0.0], [1.5, 1.5, 0.0]], [[1.0, 3.0, 1.0], [3.0, 3.0, 1.0]])

    Source: Zheng et al. 2025, arXiv 2507.18071, equation 7 (times T).
    """
    logprobs, policy_logprobs, _, mask, ids = tokens
    # Values outside the mask may be anything, including NaN: they are replaced by 0 in the sums and their own results
    # are overwritten, so their rollout ids do not matter.
    difference = jnp.where(mask, logprobs, 0) - jnp.where(mask, policy_logprobs, 0)

    def rollout_sum(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jax.ops.segment_sum(values.reshape(-1), ids.reshape(-1), num_segments=ids.size)[ids]

    lengths = jnp.where(mask, rollout_sum(mask.astype(difference.dtype)), 1)
    return jnp.where(mask, rollout_sum(difference), 0), lengths


def gspo_terms(tokens: TokenBatch, clip_low: float, clip_high: float) -> PolicyTerms:
    """Compute the clipped term of a length-normalised rollout ratio, `max(-A·s, -A·clip(s, 1 - ε_low, 1 + ε_high))`.

    `s = exp(clamp(mean_t(log π - log π_old), ±20))`, with the mean and its gradient over the loss tokens of a rollout.

    Args:
        tokens: the tokens of whole rollouts.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, not negative.

    Returns:
        The full term at each token of a rollout, so that a mean over its tokens is the term; 0 outside the mask.

    >>> tokens = TokenBatch(
    ...     jnp.array([0.0, -1.0]), jnp.array([-1.0, 0.0]), jnp.ones(2), jnp.array([True, True]), jnp.array([0, 0])
    ... )
    >>> gspo_terms(tokens, 0.2, 0.2).terms.tolist()
    [-1.0, -1.0]

    Source: Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7.
    """
    total, lengths = sequence_log_ratios(tokens)
    return _zero_outside_mask(_clipped_terms(_exp(total / lengths), tokens.advantages, clip_low, clip_high), tokens)


@PolicyLossConfig.register_subclass("gspo")
@dataclasses.dataclass(frozen=True)
class GspoLossConfig(PolicyLossConfig):
    """One clipped ratio per rollout, the geometric mean over its tokens: limits the change of whole answers."""

    is_sequence_level: ClassVar[bool] = True

    clip_low: Annotated[float, Ge(0), Lt(1)] = 3e-4
    """ε_low: a rollout of negative advantage has no gradient below s = 1 - ε_low."""
    clip_high: Annotated[float, Ge(0)] = 4e-4
    """ε_high: a rollout of positive advantage has no gradient above s = 1 + ε_high."""

    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """See [`gspo_terms`][marin_rl.objectives.policy_loss.gspo_terms]."""
        return gspo_terms(tokens, self.clip_low, self.clip_high)


def rloo_sequence_terms(tokens: TokenBatch, clip_low: float, clip_high: float) -> PolicyTerms:
    """Compute each token's share of the clipped term of a rollout ratio.

    The share is `max(-A·s, -A·clip(s, 1 - ε_low, 1 + ε_high))/T` with `s = exp(clamp(Σ_t(log π - log π_old), ±20))`,
    summed over the T loss tokens of the rollout.

    Args:
        tokens: the tokens of whole rollouts.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, not negative.

    Returns:
        Shares that sum to the term of the rollout, for use with `sequence_sum`; 0 outside the mask.

    >>> tokens = TokenBatch(
    ...     jnp.array([0.0, -1.0]), jnp.array([-1.0, 0.0]), jnp.ones(2), jnp.array([True, True]), jnp.array([0, 0])
    ... )
    >>> rloo_sequence_terms(tokens, 0.2, 0.2).terms.tolist()
    [-0.5, -0.5]

    Source: Ahmadian et al. 2024, arXiv 2402.14740, with the clipped ratio of TRL's `RLOOTrainer`.
    """
    total, lengths = sequence_log_ratios(tokens)
    terms, clipped = _clipped_terms(_exp(total), tokens.advantages, clip_low, clip_high)
    return _zero_outside_mask(PolicyTerms(terms / lengths, clipped), tokens)


@PolicyLossConfig.register_subclass("rloo_sequence")
@dataclasses.dataclass(frozen=True)
class RlooSequenceLossConfig(PolicyLossConfig):
    """One clipped ratio per rollout, the product over its tokens: exact for whole rollouts, high variance if long."""

    is_sequence_level: ClassVar[bool] = True

    clip_low: Annotated[float, Ge(0), Lt(1)] = 0.2
    """ε_low: a rollout of negative advantage has no gradient below s = 1 - ε_low."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """ε_high: a rollout of positive advantage has no gradient above s = 1 + ε_high."""

    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """See [`rloo_sequence_terms`][marin_rl.objectives.policy_loss.rloo_sequence_terms]."""
        return rloo_sequence_terms(tokens, self.clip_low, self.clip_high)


def cispo_terms(
    logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    clip_low: Bound,
    clip_high: Bound,
) -> PolicyTerms:
    """Compute the score-function term with a bounded weight, `-sg(clip(r_t, 1 - ε_low, 1 + ε_high))·A·log π`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded at sampling.
        advantages: advantage of each token.
        clip_low: ε_low, in [0, 1]; 1 means no lower bound.
        clip_high: ε_high, not negative.

    Returns:
        The terms, and whether the weight is at a bound.

    >>> cispo_terms(jnp.array([-0.5]), jnp.array([-1.5]), jnp.array([2.0]), 0.2, 0.5).terms.tolist()
    [1.5]

    Source: MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = policy_ratio(logprobs, policy_logprobs)
    weights = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return PolicyTerms(weights * reinforce_terms(logprobs, advantages), weights != ratio)


@PolicyLossConfig.register_subclass("cispo")
@dataclasses.dataclass(frozen=True)
class CispoLossConfig(PolicyLossConfig):
    """A bounded importance weight on -A·log π: clipping removes no token's gradient."""

    clip_low: Annotated[float, Ge(0), Le(1)] = 1.0
    """ε_low: the weight of a token is at least 1 - ε_low; 1 means no bound."""
    clip_high: Annotated[float, Ge(0)] = 0.2
    """ε_high: the weight of a token is at most 1 + ε_high."""

    def per_token(self, tokens: TokenBatch) -> PolicyTerms:
        """See [`cispo_terms`][marin_rl.objectives.policy_loss.cispo_terms]."""
        logprobs, policy_logprobs, advantages, _, _ = tokens
        return cispo_terms(logprobs, policy_logprobs, advantages, self.clip_low, self.clip_high)


def _exp(log_ratios: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _zero_outside_mask(terms: PolicyTerms, tokens: TokenBatch) -> PolicyTerms:
    # Outside the mask the ratio is 1, which is never clipped, but the advantage may have any value.
    return PolicyTerms(jnp.where(tokens.loss_mask, terms.terms, 0), terms.clipped)


def _clipped_terms(
    ratio: Float[Array, "*shape"], advantages: Float[Array, "*shape"], clip_low: Bound, clip_high: Bound
) -> PolicyTerms:
    """Compute max(-A·r, -A·clip(r)), and whether the clipped value is larger."""
    unclipped = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = bounded > unclipped
    # where() rather than maximum(): at the tie r = 1, as in every on-policy step, the gradient is the
    # unclipped one by construction instead of by the convention for ties.
    return PolicyTerms(jnp.where(clipped, bounded, unclipped), clipped)
