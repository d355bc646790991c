# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Loss weights, which aggregate per-token terms into a scalar loss.

The denominators are computed on the host over the whole batch and stored in the batch as one weight per token. The
device then computes the plain sum `loss = Σ weights · terms`, so the gradient does not depend on the number of
microbatches, packing, padding or the mesh.

N is the number of rollouts with loss tokens, and T_i the number of loss tokens of rollout i, over all its sequences.
All loss tokens of a rollout have the same weight.
"""

import abc
import dataclasses
from typing import Annotated

import draccus
import numpy as np
from annotated_types import Ge
from jaxtyping import Float64, Integer

from marin_rl.utils.settings.checks import ConfigSection

TokenCounts = Integer[np.ndarray, " rollouts"]
"""Number of loss tokens of each rollout, T_i."""
RolloutWeights = Float64[np.ndarray, " rollouts"]
"""Weight in the loss of each loss token of a rollout; any number for a rollout without loss tokens."""


@dataclasses.dataclass(frozen=True)
class AggregationConfig(ConfigSection, draccus.ChoiceRegistry, abc.ABC):
    """Aggregation of per-token terms into a scalar loss, selected by `type`."""

    @abc.abstractmethod
    def loss_weights(self, token_counts: TokenCounts) -> RolloutWeights:
        """Compute the weight of each loss token of a rollout of the global batch: the loss is `Σ weights · terms`."""


def token_mean_weights(token_counts: TokenCounts) -> RolloutWeights:
    """Compute weights for the mean over all loss tokens, `w_i = 1/Σ_j T_j`. Long rollouts weigh more.

    >>> token_mean_weights(np.array([3, 1])).tolist()
    [0.25, 0.25]

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 12.
    """
    return np.full(token_counts.shape, 1.0 / max(token_counts.sum(), 1))


@AggregationConfig.register_subclass("token_mean")
@dataclasses.dataclass(frozen=True)
class TokenMeanConfig(AggregationConfig):
    """Mean over all loss tokens of the global batch."""

    def loss_weights(self, token_counts: TokenCounts) -> RolloutWeights:
        """See [`token_mean_weights`][marin_rl.objectives.aggregation.token_mean_weights]."""
        return token_mean_weights(token_counts)


def sequence_mean_weights(token_counts: TokenCounts) -> RolloutWeights:
    """Compute weights for the mean over rollouts of the token mean, `w_i = 1/(N·T_i)`. All rollouts weigh the same.

    >>> sequence_mean_weights(np.array([2, 1])).tolist()
    [0.25, 0.5]

    Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, equation 3.
    """
    return 1.0 / (np.maximum(token_counts, 1) * _num_rollouts(token_counts))


@AggregationConfig.register_subclass("sequence_mean")
@dataclasses.dataclass(frozen=True)
class SequenceMeanConfig(AggregationConfig):
    """Mean over rollouts of the token mean."""

    def loss_weights(self, token_counts: TokenCounts) -> RolloutWeights:
        """See [`sequence_mean_weights`][marin_rl.objectives.aggregation.sequence_mean_weights]."""
        return sequence_mean_weights(token_counts)


def sequence_sum_weights(token_counts: TokenCounts) -> RolloutWeights:
    """Compute weights for the mean over rollouts of the token sum, `w_i = 1/N`: the unbiased policy gradient.

    >>> sequence_sum_weights(np.array([2, 1])).tolist()
    [0.5, 0.5]

    Source: Ahmadian et al. 2024 (RLOO), arXiv 2402.14740, section 3.
    """
    return np.full(token_counts.shape, 1.0 / _num_rollouts(token_counts))


@AggregationConfig.register_subclass("sequence_sum")
@dataclasses.dataclass(frozen=True)
class SequenceSumConfig(AggregationConfig):
    """Mean over rollouts of the token sum: the unbiased gradient of the expected return."""

    def loss_weights(self, token_counts: TokenCounts) -> RolloutWeights:
        """See [`sequence_sum_weights`][marin_rl.objectives.aggregation.sequence_sum_weights]."""
        return sequence_sum_weights(token_counts)


def constant_weights(token_counts: TokenCounts, length: int) -> RolloutWeights:
    """Compute weights for the token sum divided by a constant length, `w_i = 1/(N·L)`.

    L is `length`, in tokens, at least 1.

    >>> constant_weights(np.array([2, 1]), length=4).tolist()
    [0.125, 0.125]

    Source: Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783, section 3.2.
    """
    return np.full(token_counts.shape, 1.0 / (_num_rollouts(token_counts) * length))


@AggregationConfig.register_subclass("constant")
@dataclasses.dataclass(frozen=True)
class ConstantConfig(AggregationConfig):
    """Mean over rollouts of the token sum divided by a constant length."""

    length: Annotated[int, Ge(1)]
    """L in tokens; usually `sampling.max_new_tokens`."""

    def loss_weights(self, token_counts: TokenCounts) -> RolloutWeights:
        """See [`constant_weights`][marin_rl.objectives.aggregation.constant_weights]."""
        return constant_weights(token_counts, self.length)


def _num_rollouts(token_counts: TokenCounts) -> int:
    """Return N, or 1 if there are no loss tokens."""
    return max(int(np.count_nonzero(token_counts)), 1)
