# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exact divergences between the predictive distributions of a policy and of a teacher, over the whole vocabulary.

With π = softmax(z) and the teacher's π_T:

| divergence | D | ∂D/∂z |
|---|---|---|
| forward | KL(π_T‖π) | π - π_T |
| reverse | KL(π‖π_T) | π · (log(π/π_T) - D) |
| jensen_shannon | α·KL(π_T‖M) + (1 - α)·KL(π‖M), with M = α·π_T + (1 - α)·π | (1 - α)·π · (log(π/M) - KL(π‖M)) |

Forward makes π cover all that the teacher may say, reverse makes it avoid what the teacher would not say.
"""

import enum

import jax.numpy as jnp
from jaxtyping import Array, Float


class Divergence(enum.StrEnum):
    """Divergence between policy and teacher."""

    FORWARD = "forward"
    """KL(π_T‖π)."""
    REVERSE = "reverse"
    """KL(π‖π_T), whose gradient on-policy distillation estimates from sampled tokens."""
    JENSEN_SHANNON = "jensen_shannon"
    """The generalized Jensen-Shannon divergence, at most log 2 = 0.69 nats."""


def divergence_terms(
    divergence: Divergence,
    logprobs: Float[Array, "*shape vocab"],
    teacher_logprobs: Float[Array, "*shape vocab"],
    mixture: float,
) -> tuple[Float[Array, "*shape vocab"], Float[Array, "*shape vocab"]]:
    """Compute the divergence of each token, as a sum over the vocabulary, and its gradient.

    Args:
        divergence: which one.
        logprobs: log π (nats) of every id, float32.
        teacher_logprobs: log π_T of every id.
        mixture: α, the teacher's share of M, in (0, 1); of Jensen-Shannon only.

    Returns:
        `terms` and `weights` with `D = Σ_v terms_v` and `∂D/∂z_v = weights_v - π_v · Σ_u weights_u`. Terms are exactly
        0 where both log-probabilities are equal.

    >>> teacher, policy = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 0.75]))
    >>> [round(float(divergence_terms(kind, policy, teacher, 0.5)[0].sum()), 4) for kind in Divergence]
    [0.1438, 0.1308, 0.0338]

    Source: Agarwal et al. 2024 (GKD), arXiv 2306.13649, equation 1; `generalized_jsd_loss` of TRL, whose `beta` is α.
    """
    probabilities, teacher_probabilities = jnp.exp(logprobs), jnp.exp(teacher_logprobs)
    ratios = logprobs - teacher_logprobs
    match divergence:
        case Divergence.FORWARD:
            return -teacher_probabilities * ratios, -teacher_probabilities
        case Divergence.REVERSE:
            terms = probabilities * ratios
            return terms, terms
        case Divergence.JENSEN_SHANNON:
            # log(π/M) and log(π_T/M), without overflow for any ratio.
            above = -jnp.log1p(mixture * jnp.expm1(-jnp.maximum(ratios, 0)))
            below = jnp.minimum(ratios, 0) - jnp.log1p((1 - mixture) * jnp.expm1(jnp.minimum(ratios, 0)))
            of_policy = jnp.where(ratios > 0, above, below)
            own = (1 - mixture) * probabilities * of_policy
            return own + mixture * teacher_probabilities * (of_policy - ratios), own
