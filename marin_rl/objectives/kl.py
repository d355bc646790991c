# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Estimators of KL(π‖π_ref) from sampled tokens, and where the penalty goes.

With `d = log π_ref - log π` of a sampled token, clamped to ±20:

| estimator | value | as a loss, its expected gradient is that of |
|---|---|---|
| k1 | `-d` | nothing: it has zero mean |
| k2 | `d²/2` | KL(π‖π_ref), the reverse KL |
| k3 | `exp(d) - 1 - d` | KL(π_ref‖π), the forward KL |
| k3_plus | `exp(d) - 1 - d` | KL(π‖π_ref), the reverse KL |

Source: Schulman 2020, "Approximating KL divergence".
"""

import abc
import dataclasses
import enum
import math

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from marin_rl.enum_fields import convert_enum_fields

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before they are used."""


def kl_k1(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The plain estimator, `k1 = log π - log π_ref`: unbiased, of either sign.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k1 per token, within ±20.

    >>> kl_k1(jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])).tolist()
    [0.5, -1.0, 0.0]
    """
    return jnp.clip(logprobs - reference_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k2(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Half the squared log-ratio, `k2 = d²/2`: never negative, its value biased, its gradient that of the reverse KL.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k2 per token.

    >>> kl_k2(jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])).tolist()
    [0.125, 0.5, 0.0]
    """
    return jnp.square(kl_k1(logprobs, reference_logprobs)) / 2


def kl_k3(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The low-variance estimator, `k3 = exp(d) - 1 - d`: unbiased, never negative, its gradient that of the forward KL.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k3 per token.

    >>> kl_k3(jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])).round(4).tolist()
    [0.10649999976158142, 0.7182999849319458, 0.0]
    """
    log_ratio = -kl_k1(logprobs, reference_logprobs)
    # expm1: exp(d) - 1 - d is all rounding where the policies are close, which is where training starts.
    return jnp.expm1(log_ratio) - log_ratio


def kl_k3_plus(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The value of k3 with the gradient of k2, `sg(k3) + k2 - sg(k2)`: unbiased, with the gradient of the reverse KL.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k3 per token, to the last bit; only its derivative differs (straight-through).

    >>> arguments = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])
    >>> kl_k3_plus(*arguments).tolist() == kl_k3(*arguments).tolist()
    True
    >>> jax.grad(lambda x: kl_k3_plus(x, arguments[1]).sum())(arguments[0]).tolist()
    [0.5, -1.0, 0.0]
    """
    value = kl_k3(logprobs, reference_logprobs)
    pull = kl_k2(logprobs, reference_logprobs)
    # The difference comes first: it is exactly 0, and the value of k3 is left as it is.
    return jax.lax.stop_gradient(value) + (pull - jax.lax.stop_gradient(pull))


class KlEstimator(enum.StrEnum):
    """A per-token estimator of the KL to the reference, for use in the loss."""

    K1 = "k1"
    """Log-ratio. Its gradient has zero mean: it adds noise and no pull."""
    K2 = "k2"
    """Half the squared log-ratio: the gradient of the reverse KL."""
    K3 = "k3"
    """exp(d) - 1 - d: the gradient of the forward KL."""
    K3_PLUS = "k3_plus"
    """The value of k3 with the gradient of k2."""


@dataclasses.dataclass(frozen=True)
class KlConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses where the penalty for leaving the reference goes, by `type`."""

    @property
    @abc.abstractmethod
    def coefficient(self) -> float:
        """β, the weight of the penalty; 0 where there is none."""

    @abc.abstractmethod
    def reward_penalty(self, kl: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        """What to subtract from the reward of each action token before the baseline, given its k1."""

    @abc.abstractmethod
    def loss_terms(
        self, logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """What to add to each token's policy term: β·k_t, or 0."""

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are used at all."""
        return self.coefficient > 0


@KlConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoKlConfig(KlConfig):
    """No penalty."""

    watch: bool = False
    """Whether the reference is loaded and scores each step's rollouts, so that `objective/kl` is logged and reference
    log-probabilities are stored. Costs one forward pass and the reference's weights; the loss is the same."""

    @property
    def needs_reference(self) -> bool:
        """`watch`."""
        return self.watch

    @property
    def coefficient(self) -> float:
        """Always 0."""
        return 0.0

    def reward_penalty(self, kl: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        """Always 0."""
        return np.zeros_like(kl)

    def loss_terms(
        self, logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Always 0."""
        return jnp.zeros_like(logprobs)


@KlConfig.register_subclass("in_reward")
@dataclasses.dataclass(frozen=True)
class RewardKlConfig(KlConfig):
    """R_i ← R_i - β Σ_t k1_t under the policy that sampled, before the baseline, with no gradient."""

    beta: float
    """Weight of the penalty: reward per nat of divergence, >= 0. At 0 no reference is needed."""

    def __post_init__(self) -> None:
        _check_beta(self.beta)

    @property
    def coefficient(self) -> float:
        """`beta`."""
        return self.beta

    def reward_penalty(self, kl: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        """β times k1."""
        return self.beta * kl

    def loss_terms(
        self, logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Always 0: the penalty is in the reward."""
        return jnp.zeros_like(logprobs)


@KlConfig.register_subclass("in_loss")
@dataclasses.dataclass(frozen=True)
class LossKlConfig(KlConfig):
    """+ β·k_t on every token, aggregated like the policy term."""

    beta: float
    """Weight of the penalty: loss per nat of divergence, >= 0. At 0 no reference is needed."""
    estimator: KlEstimator = KlEstimator.K2
    """The estimator: k1 | k2 | k3 | k3_plus. k2 and k3_plus are those whose gradient is that of the reverse KL."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        _check_beta(self.beta)

    @property
    def coefficient(self) -> float:
        """`beta`."""
        return self.beta

    def reward_penalty(self, kl: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        """Always 0: the penalty is in the loss."""
        return np.zeros_like(kl)

    def loss_terms(
        self, logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """β times the chosen estimator; 0 where β is 0, whatever the reference holds."""
        if not self.needs_reference:
            return jnp.zeros_like(logprobs)
        match self.estimator:
            case KlEstimator.K1:
                terms = kl_k1(logprobs, reference_logprobs)
            case KlEstimator.K2:
                terms = kl_k2(logprobs, reference_logprobs)
            case KlEstimator.K3:
                terms = kl_k3(logprobs, reference_logprobs)
            case KlEstimator.K3_PLUS:
                terms = kl_k3_plus(logprobs, reference_logprobs)
        return self.beta * terms


def _check_beta(beta: float) -> None:
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"kl.beta is {beta}; it must be finite and >= 0")
