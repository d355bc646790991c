# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy terms: what each sampled token contributes to the loss.

`r_t = exp(clamp(log π - log π_old, ±20))`, with π the policy being trained and π_old the one that
sampled. Every term is to be minimised: a positive advantage raises the probability of its token.
Terms are elementwise; masking and averaging is the work of the loss weights (`aggregation.py`).
"""

import abc
import dataclasses
from typing import NamedTuple

import draccus
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marin_rl.objectives.kl import MAX_LOG_RATIO


class PolicyTerms(NamedTuple):
    """The policy term of each token, and where clipping took its gradient away."""

    terms: Float[Array, "*shape"]
    """To be minimised, before weighting."""
    clipped: Bool[Array, "*shape"]
    """True where the term is a constant because of clipping; its weighted mean is the clip fraction."""


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
    return jnp.exp(jnp.clip(logprobs - policy_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))


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
    ratio = policy_ratio(logprobs, policy_logprobs)
    unclipped = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = bounded > unclipped
    # Selected rather than maximum(): at the tie r = 1, where every on-policy step is, the gradient is
    # the unclipped one by construction and not by the convention for ties.
    terms = jnp.where(clipped, bounded, unclipped)
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (terms > ceiling)
        terms = jnp.where(over, ceiling, terms)
        clipped = clipped | over
    return PolicyTerms(terms, clipped)


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses the policy term, by `type`."""

    @abc.abstractmethod
    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
    ) -> PolicyTerms:
        """The term of each token, and where clipping took its gradient away; arguments as `ppo_clip_terms`."""


@PolicyLossConfig.register_subclass("reinforce")
@dataclasses.dataclass(frozen=True)
class ReinforceLossConfig(PolicyLossConfig):
    """-A·log π: one on-policy update per batch; ignores who sampled."""

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
    ) -> PolicyTerms:
        """See [`reinforce_terms`][marin_rl.objectives.policy_loss.reinforce_terms]."""
        return PolicyTerms(reinforce_terms(logprobs, advantages), jnp.zeros(logprobs.shape, bool))


@PolicyLossConfig.register_subclass("importance")
@dataclasses.dataclass(frozen=True)
class ImportanceLossConfig(PolicyLossConfig):
    """-A·r_t: corrects for a policy that has moved since it sampled, without a bound."""

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
    ) -> PolicyTerms:
        """See [`importance_terms`][marin_rl.objectives.policy_loss.importance_terms]."""
        terms = importance_terms(logprobs, policy_logprobs, advantages)
        return PolicyTerms(terms, jnp.zeros(logprobs.shape, bool))


@PolicyLossConfig.register_subclass("ppo_clip")
@dataclasses.dataclass(frozen=True)
class PpoClipLossConfig(PolicyLossConfig):
    """The clipped ratio of PPO: bounds how far one batch can move a token's probability."""

    clip_low: float = 0.2
    """ε_low, in [0, 1): a token of negative advantage stops counting below r = 1 - ε_low."""
    clip_high: float = 0.2
    """ε_high, >= 0: a token of positive advantage stops counting above r = 1 + ε_high."""
    dual_clip: float | None = None
    """c > 1: a token of negative advantage stops counting above r = c; null for no such bound."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"policy_loss.clip_low is {self.clip_low}; it must be in [0, 1)")
        if not 0 <= self.clip_high < float("inf"):
            raise ValueError(f"policy_loss.clip_high is {self.clip_high}; it must be finite and >= 0")
        if self.dual_clip is not None and not 1 < self.dual_clip < float("inf"):
            raise ValueError(f"policy_loss.dual_clip is {self.dual_clip}; it must be finite and > 1, or null for none")

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
    ) -> PolicyTerms:
        """See [`ppo_clip_terms`][marin_rl.objectives.policy_loss.ppo_clip_terms]."""
        return ppo_clip_terms(
            logprobs, policy_logprobs, advantages, self.clip_low, self.clip_high, dual_clip=self.dual_clip
        )
