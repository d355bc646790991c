# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The policy terms, as configurations choose them. The maths is in `policy_terms.py`."""

import abc
import dataclasses
import math

import draccus
import jax.numpy as jnp
from jaxtyping import Array, Float

from marin_rl.objectives.policy_terms import (
    PolicyTerms,
    Sequences,
    cispo_terms,
    gspo_terms,
    importance_terms,
    ppo_clip_terms,
    reinforce_terms,
    rloo_sequence_terms,
)

__all__ = [
    "CispoLossConfig",
    "GspoLossConfig",
    "ImportanceLossConfig",
    "PolicyLossConfig",
    "PolicyTerms",
    "PpoClipLossConfig",
    "ReinforceLossConfig",
    "RlooSequenceLossConfig",
    "Sequences",
]


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses the policy term, by `type`."""

    @property
    @abc.abstractmethod
    def is_sequence_level(self) -> bool:
        """Whether it has one ratio per rollout, which cannot leave out some of its tokens."""

    @property
    @abc.abstractmethod
    def uses_ratio(self) -> bool:
        """Whether it corrects for a policy that has moved since it sampled."""

    @abc.abstractmethod
    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """The term of each token, and where clipping changed it.

        Args:
            logprobs: log π (nats) of each sampled token under the policy being trained, float32.
            policy_logprobs: log π_old of the same tokens, recorded when they were sampled.
            advantages: the advantage of each token.
            sequences: which tokens make up one rollout.
        """


@PolicyLossConfig.register_subclass("reinforce")
@dataclasses.dataclass(frozen=True)
class ReinforceLossConfig(PolicyLossConfig):
    """-A·log π: one on-policy update per batch; ignores who sampled."""

    @property
    def is_sequence_level(self) -> bool:
        """Never."""
        return False

    @property
    def uses_ratio(self) -> bool:
        """Never."""
        return False

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """See [`reinforce_terms`][marin_rl.objectives.policy_terms.reinforce_terms]."""
        return PolicyTerms(reinforce_terms(logprobs, advantages), jnp.zeros(logprobs.shape, bool))


@PolicyLossConfig.register_subclass("importance")
@dataclasses.dataclass(frozen=True)
class ImportanceLossConfig(PolicyLossConfig):
    """-A·r_t: corrects for a policy that has moved since it sampled, without a bound."""

    @property
    def is_sequence_level(self) -> bool:
        """Never."""
        return False

    @property
    def uses_ratio(self) -> bool:
        """Always."""
        return True

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """See [`importance_terms`][marin_rl.objectives.policy_terms.importance_terms]."""
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
        _check_bounds(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"policy_loss.dual_clip is {self.dual_clip}; it must be finite and > 1, or null for none")

    @property
    def is_sequence_level(self) -> bool:
        """Never."""
        return False

    @property
    def uses_ratio(self) -> bool:
        """Always."""
        return True

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """See [`ppo_clip_terms`][marin_rl.objectives.policy_terms.ppo_clip_terms]."""
        return ppo_clip_terms(
            logprobs, policy_logprobs, advantages, self.clip_low, self.clip_high, dual_clip=self.dual_clip
        )


@PolicyLossConfig.register_subclass("gspo")
@dataclasses.dataclass(frozen=True)
class GspoLossConfig(PolicyLossConfig):
    """One clipped ratio per rollout, the geometric mean over its tokens: bounds how far whole answers move."""

    clip_low: float = 3e-4
    """ε_low, in [0, 1): a rollout of negative advantage stops counting below s = 1 - ε_low."""
    clip_high: float = 4e-4
    """ε_high, >= 0: a rollout of positive advantage stops counting above s = 1 + ε_high."""

    def __post_init__(self) -> None:
        _check_bounds(self.clip_low, self.clip_high)

    @property
    def is_sequence_level(self) -> bool:
        """Always."""
        return True

    @property
    def uses_ratio(self) -> bool:
        """Always."""
        return True

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """See [`gspo_terms`][marin_rl.objectives.policy_terms.gspo_terms]."""
        return gspo_terms(logprobs, policy_logprobs, advantages, sequences, self.clip_low, self.clip_high)


@PolicyLossConfig.register_subclass("rloo_sequence")
@dataclasses.dataclass(frozen=True)
class RlooSequenceLossConfig(PolicyLossConfig):
    """One clipped ratio per rollout, the product over its tokens: exact for whole rollouts, and wide for long ones."""

    clip_low: float = 0.2
    """ε_low, in [0, 1): a rollout of negative advantage stops counting below s = 1 - ε_low."""
    clip_high: float = 0.2
    """ε_high, >= 0: a rollout of positive advantage stops counting above s = 1 + ε_high."""

    def __post_init__(self) -> None:
        _check_bounds(self.clip_low, self.clip_high)

    @property
    def is_sequence_level(self) -> bool:
        """Always."""
        return True

    @property
    def uses_ratio(self) -> bool:
        """Always."""
        return True

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """See [`rloo_sequence_terms`][marin_rl.objectives.policy_terms.rloo_sequence_terms]."""
        return rloo_sequence_terms(logprobs, policy_logprobs, advantages, sequences, self.clip_low, self.clip_high)


@PolicyLossConfig.register_subclass("cispo")
@dataclasses.dataclass(frozen=True)
class CispoLossConfig(PolicyLossConfig):
    """A bounded importance weight on -A·log π: no token stops counting, however far it moved."""

    clip_low: float = 1.0
    """ε_low, in [0, 1]: the weight of a token is at least 1 - ε_low; 1 is no bound."""
    clip_high: float = 0.2
    """ε_high, >= 0: the weight of a token is at most 1 + ε_high."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"policy_loss.clip_low is {self.clip_low}; it must be in [0, 1], where 1 is no bound")
        _check_clip_high(self.clip_high)

    @property
    def is_sequence_level(self) -> bool:
        """Never."""
        return False

    @property
    def uses_ratio(self) -> bool:
        """Always."""
        return True

    def per_token(
        self,
        logprobs: Float[Array, "*shape"],
        policy_logprobs: Float[Array, "*shape"],
        advantages: Float[Array, "*shape"],
        sequences: Sequences,
    ) -> PolicyTerms:
        """See [`cispo_terms`][marin_rl.objectives.policy_terms.cispo_terms]."""
        return cispo_terms(logprobs, policy_logprobs, advantages, self.clip_low, self.clip_high)


def _check_bounds(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low < 1:
        raise ValueError(f"policy_loss.clip_low is {clip_low}; it must be in [0, 1)")
    _check_clip_high(clip_high)


def _check_clip_high(clip_high: float) -> None:
    if not 0 <= clip_high < math.inf:
        raise ValueError(f"policy_loss.clip_high is {clip_high}; it must be finite and >= 0")
