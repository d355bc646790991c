# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""On-policy distillation: an advantage per token from the log-probabilities of a teacher."""

import dataclasses
from typing import Annotated

import numpy as np
from annotated_types import Gt
from jaxtyping import Float, Float64

from marin_rl.objectives.kl import MAX_LOG_RATIO
from marin_rl.utils.settings.checks import ConfigSection


@dataclasses.dataclass(frozen=True)
class DistillationConfig(ConfigSection):
    """On-policy distillation from the policy of `reference`, the teacher."""

    coefficient: Annotated[float, Gt(0)] = 1.0
    """Weight of the teacher's advantage, in units of advantage per nat."""
    alone: bool = False
    """Whether the advantages of the task are replaced instead of added to; rewards are then only measured."""


def distillation_advantages(
    policy_logprobs: Float[np.ndarray, " tokens"],
    teacher_logprobs: Float[np.ndarray, " tokens"],
    coefficient: float,
) -> Float64[np.ndarray, " tokens"]:
    """Compute the advantage of each sampled token under a teacher, `A_t = -c · (log π_old_t - log π_T_t)`.

    With the policy term `-A_t · log π_t`, the expected gradient on replies of π is that of
    `c · Σ_t KL(π(·|s_t) ‖ π_T(·|s_t))` at the sampled states s_t, which are not differentiated. The log-ratio is
    clamped to ±20 nats. `coefficient` c is above 0; log-probabilities are in nats.

    Returns:
        A_t: positive for tokens that the teacher prefers. Exactly 0 if both log-probabilities are equal.

    >>> distillation_advantages(np.array([-1.0, -2.0, -0.5]), np.array([-1.5, -1.0, -0.5]), 2.0).tolist()
    [-1.0, 2.0, 0.0]

    Source: Agarwal et al. 2024, arXiv 2306.13649 (on-policy data); Gu et al. 2024 (MiniLLM), arXiv 2306.08543 (reverse
    KL as a reward); Lu 2025, "On-Policy Distillation", Thinking Machines Lab.
    """
    difference = teacher_logprobs.astype(np.float64) - policy_logprobs.astype(np.float64)
    return coefficient * difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
