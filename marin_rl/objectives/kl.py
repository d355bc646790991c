# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Estimators of KL(π‖π_ref) from sampled tokens, the placement of the KL penalty, and the exact divergence.

With `d = log π_ref - log π` of a sampled token, clamped to ±20:

| estimator | value | expected gradient if used as a loss |
|---|---|---|
| k1 | `-d` | zero |
| k2 | `d²/2` | KL(π‖π_ref), the reverse KL |
| k3 | `exp(d) - 1 - d` | KL(π_ref‖π), the forward KL |
| k3_plus | `exp(d) - 1 - d` | KL(π‖π_ref), the reverse KL |
"""

import dataclasses
import enum
from typing import Annotated

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Gt, Lt
from jaxtyping import Array, Float, Float64

from marin_rl.objectives.divergence import Divergence
from marin_rl.utils.settings.checks import ConfigSection

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 nats before use."""


def kl_k1(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute the log-ratio estimator, `k1 = log π - log π_ref`. Unbiased, may be negative.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k1 per token, within ±20.

    >>> kl_k1(jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])).tolist()
    [0.5, -1.0, 0.0]

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
    """
    return jnp.clip(logprobs - reference_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_k2(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute half the squared log-ratio, `k2 = d²/2`. Biased, non-negative; its gradient is that of the reverse KL.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k2 per token.

    >>> kl_k2(jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])).tolist()
    [0.125, 0.5, 0.0]

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return jnp.square(kl_k1(logprobs, reference_logprobs)) / 2


def kl_k3(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute the low-variance estimator, `k3 = exp(d) - 1 - d`. Unbiased; its gradient is that of the forward KL.

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k3 per token.

    >>> kl_k3(jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])).round(4).tolist()
    [0.10649999976158142, 0.7182999849319458, 0.0]

    Source: Schulman 2020, "Approximating KL divergence"; as a loss, Shao et al. 2024, arXiv 2402.03300, equation 4.
    """
    log_ratio = -kl_k1(logprobs, reference_logprobs)
    # expm1 avoids cancellation in exp(d) - 1 when the policies are close, as at the start of training.
    return jnp.expm1(log_ratio) - log_ratio


def kl_k3_plus(logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Compute the value of k3 with the gradient of k2, `sg(k3) + k2 - sg(k2)`.

    An unbiased estimate of the reverse KL whose gradient is that of the reverse KL (straight-through).

    Args:
        logprobs: log π (nats) of each sampled token, float32.
        reference_logprobs: log π_ref of the same tokens.

    Returns:
        k3 per token, bit for bit; only the derivative differs.

    >>> arguments = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.5, -1.0, -0.5])
    >>> kl_k3_plus(*arguments).tolist() == kl_k3(*arguments).tolist()
    True
    >>> jax.grad(lambda x: kl_k3_plus(x, arguments[1]).sum())(arguments[0]).tolist()
    [0.5, -1.0, 0.0]

    Source: the `k3+` of verl.
    """
    k3 = kl_k3(logprobs, reference_logprobs)
    k2 = kl_k2(logprobs, reference_logprobs)
    # The difference is evaluated first: it is exactly 0, so the value of k3 does not change.
    return jax.lax.stop_gradient(k3) + (k2 - jax.lax.stop_gradient(k2))


class KlEstimator(enum.StrEnum):
    """Per-token estimator of the KL to the reference, for use in the loss."""

    K1 = "k1"
    """Log-ratio. Its expected gradient is zero: it adds only noise."""
    K2 = "k2"
    """Half the squared log-ratio: the gradient of the reverse KL."""
    K3 = "k3"
    """exp(d) - 1 - d: the gradient of the forward KL."""
    K3_PLUS = "k3_plus"
    """The value of k3 with the gradient of k2."""


@dataclasses.dataclass(frozen=True)
class KlConfig(ConfigSection, draccus.ChoiceRegistry):
    """Placement of the KL penalty, selected by `type`."""

    beta = 0.0
    """β, the weight of the penalty; 0 without a penalty."""
    needs_teacher = False
    """Whether every update runs the model of the reference."""

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are used."""
        return self.beta > 0

    def reward_penalty(self, kl: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        """Compute the penalty subtracted from each action token's reward from its k1 under the sampling policy."""
        return np.zeros_like(kl)

    def loss_terms(
        self, logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Compute the KL term added to the policy term of each token; 0 by default.

        Args:
            logprobs: log π (nats) of each sampled token, float32.
            reference_logprobs: log π_ref of the same tokens.

        Returns:
            β·k_t per token.
        """
        return jnp.zeros_like(logprobs)


@KlConfig.register_subclass("none")
@dataclasses.dataclass(frozen=True)
class NoKlConfig(KlConfig):
    """No penalty."""

    watch: bool = False
    """Whether to load the reference and score the rollouts of each step, to log `objective/kl` and store the reference
    log-probabilities. Costs one forward pass and the memory of the reference weights; the loss does not change."""

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is loaded, for logging only."""
        return self.watch


@KlConfig.register_subclass("in_reward")
@dataclasses.dataclass(frozen=True)
class RewardKlConfig(KlConfig):
    """Penalty in the reward, before the baseline: `R_i ← R_i - β Σ_t k1_t` under the sampling policy, no gradient."""

    # field() makes it required; a plain annotation would take the default of the base class.
    beta: Annotated[float, Ge(0)] = dataclasses.field()  # pyrefly: ignore[bad-override]
    """Weight of the penalty, in reward per nat. With 0 no reference is needed."""

    def reward_penalty(self, kl: Float64[np.ndarray, " tokens"]) -> Float64[np.ndarray, " tokens"]:
        """Compute β·k1 of each action token."""
        return self.beta * kl


@KlConfig.register_subclass("in_loss")
@dataclasses.dataclass(frozen=True)
class LossKlConfig(KlConfig):
    """Penalty in the loss: β·k_t is added to the term of each token and aggregated like the policy term."""

    beta: Annotated[float, Ge(0)] = dataclasses.field()  # pyrefly: ignore[bad-override]
    """Weight of the penalty, in loss per nat. With 0 no reference is needed."""
    estimator: KlEstimator = KlEstimator.K2
    """The estimator: k1 | k2 | k3 | k3_plus. k2 and k3_plus have the gradient of the reverse KL."""

    def loss_terms(
        self, logprobs: Float[Array, "*shape"], reference_logprobs: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """Compute β times the estimator; 0 if β is 0, even if the reference log-probabilities are NaN."""
        if not self.needs_reference:
            return jnp.zeros_like(logprobs)
        estimators = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "k3_plus": kl_k3_plus}
        return self.beta * estimators[self.estimator](logprobs, reference_logprobs)


@KlConfig.register_subclass("exact")
@dataclasses.dataclass(frozen=True)
class ExactKlConfig(KlConfig):
    """A stream of the loss of its own: β times the mean over loss tokens of an exact divergence over the vocabulary.

    Every update runs the model of the reference, which must be local.
    """

    needs_teacher = True
    beta: Annotated[float, Gt(0)] = dataclasses.field()  # pyrefly: ignore[bad-override]
    """Weight of the stream, in loss per nat and token."""
    divergence: Divergence = Divergence.REVERSE
    """`forward`: KL(π_ref‖π), `reverse`: KL(π‖π_ref), or `jensen_shannon`."""
    mixture: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Share of the reference in the mixture of `jensen_shannon`: near 0 it is a small multiple of the forward KL, near
    1 of the reverse KL. The `beta` of TRL's `GKDTrainer`."""

    @property
    def needs_reference(self) -> bool:
        """No log-probabilities of the reference are used."""
        return False
