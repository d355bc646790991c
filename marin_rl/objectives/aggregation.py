# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Loss weights, which aggregate per-token terms into a scalar loss.

The denominators are computed on the host over the whole batch and stored in the batch as one weight per token. The
device then computes the plain sum `loss = Σ weights · terms`, so the gradient does not depend on the number of
microbatches, packing, padding or the mesh.

N is the number of rollouts with loss tokens, and T_i the number of loss tokens of rollout i. Rollouts are identified by
id, not by row. A ValueError gives row and position of a loss token without a rollout.
"""

import abc
import dataclasses

import draccus
import numpy as np
from jaxtyping import Bool, Float32, Float64, Integer

NO_ROLLOUT = -1
"""Rollout id of padding tokens."""

LossMask = Bool[np.ndarray, "rows positions"]
"""True for loss tokens."""
RolloutIds = Integer[np.ndarray, "rows positions"]
"""Rollout of each token; -1 for padding."""
LossWeights = Float32[np.ndarray, "rows positions"]
"""Weight of each token in the loss; 0 outside the loss mask."""


@dataclasses.dataclass(frozen=True)
class AggregationConfig(draccus.ChoiceRegistry, abc.ABC):
    """Aggregation of per-token terms into a scalar loss, selected by `type`."""

    @abc.abstractmethod
    def loss_weights(self, loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
        """Compute the weight of each token of the global batch, so that the loss is `Σ weights · terms`.

        Args:
            loss_mask: True for loss tokens.
            rollout_ids: rollout of each token; -1 for padding.

        Returns:
            Weight of each token; 0 outside the loss mask.
        """


def token_mean_weights(loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
    """Compute weights for the mean over all loss tokens, `w_t = 1/Σ_i T_i`. Long rollouts weigh more.

    Args:
        loss_mask: True for loss tokens.
        rollout_ids: rollout of each token; -1 for padding.

    Returns:
        Weight of each token; 0 outside the loss mask.

    >>> mask = np.array([[True, True, True, False], [True, False, False, False]])
    >>> token_mean_weights(mask, np.array([[0] * 4, [1] * 4])).tolist()
    [[0.25, 0.25, 0.25, 0.0], [0.25, 0.0, 0.0, 0.0]]

    Source: Yu et al. 2025 (DAPO), arXiv 2503.14476, equation 12.
    """
    tokens, _ = _count(loss_mask, rollout_ids)
    return _scatter(np.full(tokens.shape, 1.0 / max(tokens.size, 1)), loss_mask)


@AggregationConfig.register_subclass("token_mean")
@dataclasses.dataclass(frozen=True)
class TokenMeanConfig(AggregationConfig):
    """Mean over all loss tokens of the global batch."""

    def loss_weights(self, loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
        """See [`token_mean_weights`][marin_rl.objectives.aggregation.token_mean_weights]."""
        return token_mean_weights(loss_mask, rollout_ids)


def sequence_mean_weights(loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
    """Compute weights for the mean over rollouts of the token mean, `w_t = 1/(N·T_i)`. All rollouts weigh the same.

    Args:
        loss_mask: True for loss tokens.
        rollout_ids: rollout of each token; -1 for padding.

    Returns:
        Weight of each token; 0 outside the loss mask.

    >>> mask = np.array([[True, True, False, False], [True, False, False, False]])
    >>> sequence_mean_weights(mask, np.array([[0] * 4, [1] * 4])).tolist()
    [[0.25, 0.25, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]]

    Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, equation 3.
    """
    tokens, rollouts = _count(loss_mask, rollout_ids)
    return _scatter(1.0 / (tokens * max(rollouts, 1)), loss_mask)


@AggregationConfig.register_subclass("sequence_mean")
@dataclasses.dataclass(frozen=True)
class SequenceMeanConfig(AggregationConfig):
    """Mean over rollouts of the token mean."""

    def loss_weights(self, loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
        """See [`sequence_mean_weights`][marin_rl.objectives.aggregation.sequence_mean_weights]."""
        return sequence_mean_weights(loss_mask, rollout_ids)


def sequence_sum_weights(loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
    """Compute weights for the mean over rollouts of the token sum, `w_t = 1/N`: the unbiased policy gradient.

    Args:
        loss_mask: True for loss tokens.
        rollout_ids: rollout of each token; -1 for padding.

    Returns:
        Weight of each token; 0 outside the loss mask.

    >>> mask = np.array([[True, True, False, False], [True, False, False, False]])
    >>> sequence_sum_weights(mask, np.array([[0] * 4, [1] * 4])).tolist()
    [[0.5, 0.5, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]]

    Source: Ahmadian et al. 2024 (RLOO), arXiv 2402.14740, section 3.
    """
    tokens, rollouts = _count(loss_mask, rollout_ids)
    return _scatter(np.full(tokens.shape, 1.0 / max(rollouts, 1)), loss_mask)


@AggregationConfig.register_subclass("sequence_sum")
@dataclasses.dataclass(frozen=True)
class SequenceSumConfig(AggregationConfig):
    """Mean over rollouts of the token sum: the unbiased gradient of the expected return."""

    def loss_weights(self, loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
        """See [`sequence_sum_weights`][marin_rl.objectives.aggregation.sequence_sum_weights]."""
        return sequence_sum_weights(loss_mask, rollout_ids)


def constant_weights(loss_mask: LossMask, rollout_ids: RolloutIds, length: int) -> LossWeights:
    """Compute weights for the token sum divided by a constant length, `w_t = 1/(N·L)`.

    Args:
        loss_mask: True for loss tokens.
        rollout_ids: rollout of each token; -1 for padding.
        length: L, in tokens; at least 1.

    Returns:
        Weight of each token; 0 outside the loss mask.

    >>> mask = np.array([[True, True, False, False], [True, False, False, False]])
    >>> constant_weights(mask, np.array([[0] * 4, [1] * 4]), length=4).tolist()
    [[0.125, 0.125, 0.0, 0.0], [0.125, 0.0, 0.0, 0.0]]

    Source: Liu et al. 2025 (Dr. GRPO), arXiv 2503.20783, section 3.2.
    """
    tokens, rollouts = _count(loss_mask, rollout_ids)
    return _scatter(np.full(tokens.shape, 1.0 / (max(rollouts, 1) * length)), loss_mask)


@AggregationConfig.register_subclass("constant")
@dataclasses.dataclass(frozen=True)
class ConstantConfig(AggregationConfig):
    """Mean over rollouts of the token sum divided by a constant length."""

    length: int
    """L in tokens, at least 1; usually `sampling.max_new_tokens`."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"aggregation.length is {self.length}; it must be at least 1 token")

    def loss_weights(self, loss_mask: LossMask, rollout_ids: RolloutIds) -> LossWeights:
        """See [`constant_weights`][marin_rl.objectives.aggregation.constant_weights]."""
        return constant_weights(loss_mask, rollout_ids, self.length)


def _count(loss_mask: LossMask, rollout_ids: RolloutIds) -> tuple[Integer[np.ndarray, " loss_tokens"], int]:
    """Count T_i for the rollout i of each loss token, and N."""
    if loss_mask.shape != rollout_ids.shape:
        raise ValueError(f"loss_mask has shape {loss_mask.shape} but rollout_ids has shape {rollout_ids.shape}")
    invalid = np.argwhere(loss_mask & (rollout_ids < 0))
    if invalid.size:
        row, position = invalid[0].tolist()
        raise ValueError(
            f"the loss token at row {row}, position {position} has rollout id {rollout_ids[row, position]}; "
            "the rollout id of a loss token must be at least 0"
        )
    rollouts = rollout_ids[loss_mask]
    lengths = np.bincount(rollouts)
    return lengths[rollouts], int(np.count_nonzero(lengths))


def _scatter(weights: Float64[np.ndarray, " loss_tokens"], loss_mask: LossMask) -> LossWeights:
    scattered = np.zeros(loss_mask.shape, np.float32)
    scattered[loss_mask] = weights
    return scattered
