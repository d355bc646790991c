# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy terms: what each sampled token contributes to the loss.

`r_t = exp(clamp(log π - log π_old, ±20))`, with π the policy being trained and π_old the one that
sampled. Every term is to be minimised: a positive advantage raises the probability of its token.
There is one term per token; masking and averaging is the work of the loss weights (`aggregation.py`).
Two of the terms have one ratio per rollout: they are told which tokens make one up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marin_rl.objectives.kl import MAX_LOG_RATIO


class Sequences(NamedTuple):
    """Which tokens make up one rollout, for terms with a ratio per rollout."""

    loss_mask: Bool[Array, "*shape"]
    """True on the tokens that carry loss."""
    rollout_ids: Int[Array, "*shape"]
    """The rollout of each token, in [0, size of the array); -1 off any. A rollout may take several rows, and a row hold
    several rollouts, but all of a rollout lies within the array."""


class PolicyTerms(NamedTuple):
    """The policy term of each token, and where clipping changed it."""

    terms: Float[Array, "*shape"]
    """To be minimised, before weighting."""
    clipped: Bool[Array, "*shape"]
    """True where the bounds on the ratio hold: the term is a constant there, or, in `cispo`, its weight is at a bound.
    Its mean is the clip fraction."""


def policy_ratio(logprobs: Float[Array, "*shape"], policy_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The importance ratio `r_t = exp(clamp(log π - log π_old, ±20))`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.

    Returns:
        r per token, between exp(-20) and exp(20).

    >>> policy_ratio(jnp.array([0.0, -99.0]), jnp.array([0.0, -0.5])).round(3).tolist()
    [1.0, 0.0]
    """
    return _exp(logprobs - policy_logprobs)


def reinforce_terms(logprobs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The score-function term, `-A·log π`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        advantages: the advantage of each token.

    Returns:
        The term per token.

    >>> reinforce_terms(jnp.array([-0.5, -2.0]), jnp.array([1.0, -1.0])).tolist()
    [0.5, -2.0]

    Source: Williams 1992.
    """
    return -advantages * logprobs


def importance_terms(
    logprobs: Float[Array, "*shape"], policy_logprobs: Float[Array, "*shape"], advantages: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The importance-weighted term, `-A·r_t`. Its gradient is that of `reinforce` where π = π_old.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        advantages: the advantage of each token.

    Returns:
        The term per token.

    >>> importance_terms(jnp.array([-0.5]), jnp.array([-0.5]), jnp.array([2.0])).tolist()
    [-2.0]

    Source: Schulman et al. 2017, arXiv 1707.06347, equation 6.
    """
    return -advantages * policy_ratio(logprobs, policy_logprobs)


def ppo_clip_terms(
    logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """The clipped term, `max(-A·r, -A·clip(r, 1 - ε_low, 1 + ε_high))`.

    With a dual clip c, tokens of negative advantage get `min(that, -c·A)`.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        advantages: the advantage of each token.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, not negative.
        dual_clip: c, greater than 1; None for no dual clip.

    Returns:
        The terms, and where either clip holds.

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


def sequence_log_ratios(
    logprobs: Float[Array, "*shape"], policy_logprobs: Float[Array, "*shape"], sequences: Sequences
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The log-ratio of the rollout of each token, `Σ_t (log π - log π_old)`, and its number of loss tokens T.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        sequences: which tokens make up one rollout.

    Returns:
        The unclamped sum and T on each loss token; 0 and 1 elsewhere.

    >>> mask, ids = jnp.array([[True, True, False], [True, True, False]]), jnp.array([[0, 1, 1], [1, 1, -1]])
    >>> sums, lengths = sequence_log_ratios(jnp.full((2, 3), -0.5), jnp.full((2, 3), -1.0), Sequences(mask, ids))
    >>> sums.tolist(), lengths.tolist()
    ([[0.5, 1.5, 0.0], [1.5, 1.5, 0.0]], [[1.0, 3.0, 1.0], [3.0, 3.0, 1.0]])
    """
    mask, ids = sequences
    # What stands off the mask may be anything. It adds 0 to a sum, and its own result is overwritten, so that it does
    # not matter which rollout it names, if any.
    difference = jnp.where(mask, logprobs, 0) - jnp.where(mask, policy_logprobs, 0)

    def of_rollout(values: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        return jax.ops.segment_sum(values.reshape(-1), ids.reshape(-1), num_segments=ids.size)[ids]

    lengths = jnp.where(mask, of_rollout(mask.astype(difference.dtype)), 1)
    return jnp.where(mask, of_rollout(difference), 0), lengths


def gspo_terms(
    logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    sequences: Sequences,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """The clipped term of a rollout's ratio per token, `max(-A·s, -A·clip(s, 1 - ε_low, 1 + ε_high))`.

    `s = exp(clamp(mean_t(log π - log π_old), ±20))`, over the loss tokens of the rollout, so that the gradient runs
    through every one of them.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        advantages: the advantage of each token.
        sequences: which tokens make up one rollout.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, not negative.

    Returns:
        The whole term on each of a rollout's tokens, so that a mean over tokens is the term itself; 0 off the mask.

    >>> pair = Sequences(jnp.array([True, True]), jnp.array([0, 0]))
    >>> gspo_terms(jnp.array([0.0, -1.0]), jnp.array([-1.0, 0.0]), jnp.ones(2), pair, 0.2, 0.2).terms.tolist()
    [-1.0, -1.0]

    Source: Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7.
    """
    total, lengths = sequence_log_ratios(logprobs, policy_logprobs, sequences)
    return _on_mask(_clipped_terms(_exp(total / lengths), advantages, clip_low, clip_high), sequences)


def rloo_sequence_terms(
    logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    sequences: Sequences,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """Each token's share of the clipped term of a rollout's ratio, `max(-A·s, -A·clip(s, 1 - ε_low, 1 + ε_high))/T`.

    `s = exp(clamp(Σ_t(log π - log π_old), ±20))`, over the T loss tokens of the rollout; nothing normalises the
    length of the exponent.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        advantages: the advantage of each token.
        sequences: which tokens make up one rollout.
        clip_low: ε_low, in [0, 1).
        clip_high: ε_high, not negative.

    Returns:
        Shares that add up to the term of the rollout, so that `sequence_sum` gives its mean over rollouts; 0 off the
        mask.

    >>> pair = Sequences(jnp.array([True, True]), jnp.array([0, 0]))
    >>> rloo_sequence_terms(jnp.array([0.0, -1.0]), jnp.array([-1.0, 0.0]), jnp.ones(2), pair, 0.2, 0.2).terms.tolist()
    [-0.5, -0.5]

    Source: Ahmadian et al. 2024, arXiv 2402.14740, with the clipped ratio of TRL's `RLOOTrainer`.
    """
    total, lengths = sequence_log_ratios(logprobs, policy_logprobs, sequences)
    terms, clipped = _clipped_terms(_exp(total), advantages, clip_low, clip_high)
    return _on_mask(PolicyTerms(terms / lengths, clipped), sequences)


def cispo_terms(
    logprobs: Float[Array, "*shape"],
    policy_logprobs: Float[Array, "*shape"],
    advantages: Float[Array, "*shape"],
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """The score-function term with a bounded weight, `-sg(clip(r_t, 1 - ε_low, 1 + ε_high))·A·log π`.

    No gradient flows through the weight, and none is lost to clipping: every token keeps counting.

    Args:
        logprobs: log π (nats) of each sampled token under the policy being trained, float32.
        policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
        advantages: the advantage of each token.
        clip_low: ε_low, in [0, 1]; 1 is no lower bound.
        clip_high: ε_high, not negative.

    Returns:
        The terms, and where the weight is at a bound.

    >>> cispo_terms(jnp.array([-0.5]), jnp.array([-1.5]), jnp.array([2.0]), 0.2, 0.5).terms.tolist()
    [1.5]

    Source: MiniMax 2025 (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.
    """
    ratio = policy_ratio(logprobs, policy_logprobs)
    weights = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return PolicyTerms(weights * reinforce_terms(logprobs, advantages), weights != ratio)


def _exp(log_ratios: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.exp(jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _on_mask(terms: PolicyTerms, sequences: Sequences) -> PolicyTerms:
    # Off the mask the ratio is 1, which no bound holds; only the advantage may be anything there.
    return PolicyTerms(jnp.where(sequences.loss_mask, terms.terms, 0), terms.clipped)


def _clipped_terms(
    ratio: Float[Array, "*shape"], advantages: Float[Array, "*shape"], clip_low: float, clip_high: float
) -> PolicyTerms:
    """max(-A·r, -A·clip(r)), and where the second is larger."""
    unclipped = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = bounded > unclipped
    # Selected rather than maximum(): at the tie r = 1, where every on-policy step is, the gradient is
    # the unclipped one by construction and not by the convention for ties.
    return PolicyTerms(jnp.where(clipped, bounded, unclipped), clipped)
