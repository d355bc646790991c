# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The named-axis batch that the learner trains on."""

import dataclasses
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from marin_rl.batching.alignment import to_predictors
from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.objectives.aggregation import AggregationConfig

PER_TOKEN_DTYPES = {
    "input_ids": jnp.int32,
    "loss_mask": jnp.bool_,
    "segment_ids": jnp.int32,
    "loss_weights": jnp.float32,
    "advantages": jnp.float32,
    "policy_logprobs": jnp.float32,
    "reference_logprobs": jnp.float32,
}


class RlExample(eqx.Module):
    """A global batch of rollouts, `{batch, position}` throughout, aligned with the tokens.

    The loss is the plain sum `Σ loss_weights · term(advantages, …)`: the denominators of the
    aggregation are inside `loss_weights`, counted over the whole global batch on the host, so that no
    split into microbatches or devices can change them.
    """

    input_ids: NamedArray
    """`{batch, position}` int32 token ids."""
    loss_mask: NamedArray
    """`{batch, position}` bool, True on the tokens with loss."""
    segment_ids: NamedArray
    """`{batch, position}` int32, 0 on padding; attention stays within a segment."""
    loss_weights: NamedArray
    """`{batch, position}` float32, weight of each token in the loss; 0 off the loss mask."""
    advantages: NamedArray
    """`{batch, position}` float32, advantage of each token; 0 off the loss mask."""
    policy_logprobs: NamedArray
    """`{batch, position}` float32, log-probs (nats) under the policy that sampled; 0 off the loss mask."""
    reference_logprobs: NamedArray
    """`{batch, position}` float32, log-probs under the frozen reference; 0 off the loss mask or without one."""

    def __check_init__(self) -> None:
        leaves = [getattr(self, name) for name in PER_TOKEN_DTYPES]
        if not all(isinstance(leaf, NamedArray) for leaf in leaves):
            return  # a transformed tree, whose leaves stand for something else
        axes = self.input_ids.axes
        for name, leaf in zip(PER_TOKEN_DTYPES, leaves, strict=True):
            if leaf.axes != axes:
                raise ValueError(f"RlExample: {name} has axes {leaf.axes}, input_ids has {axes}")

    def to_lm_example(self) -> LmExample:
        """The batch as levanter's language models take it: loss mask at the predicting positions."""
        return LmExample(
            tokens=self.input_ids,
            loss_mask=to_predictors(self.loss_mask.astype(jnp.int32)),
            attn_mask=self.attention_mask,
        )

    @property
    def attention_mask(self) -> AttentionMask:
        """Causal attention within each segment."""
        return AttentionMask.causal().with_segment_ids(self.segment_ids)


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The fixed shape that every batch of a run is laid out in, so that a run compiles once."""

    rows: int
    """Sequences in a batch; rows that no rollout needs are padding."""
    positions: int
    """Tokens in a row."""


def make_batch(
    rollouts: Sequence[ProcessedRollout],
    advantages: Sequence[float],
    aggregation: AggregationConfig,
    shape: BatchShape,
) -> RlExample:
    """Stack rollouts into one batch of a fixed shape.

    Args:
        rollouts: each with one row per sequence, all `shape.positions` long.
        advantages: one per rollout, spread over all its loss tokens.
        aggregation: how token terms become one number; its denominators are counted here.
        shape: rows and positions of the batch; missing rows are filled with padding.

    Raises:
        ValueError: if the rollouts need more rows than there are, a row has another length, or there is not
            one advantage per rollout.
    """
    if len(advantages) != len(rollouts):
        raise ValueError(f"make_batch got {len(rollouts)} rollouts but {len(advantages)} advantages; each needs one")
    rows = sum(rollout.input_ids.shape[0] for rollout in rollouts)
    if rows > shape.rows:
        raise ValueError(
            f"{len(rollouts)} rollouts need {rows} rows, the batch has {shape.rows}; "
            "some rollouts split into several sequences because the chat template rewrote their history"
        )
    arrays = {name: np.zeros((shape.rows, shape.positions), dtype) for name, dtype in PER_TOKEN_DTYPES.items()}
    rollout_ids = np.full((shape.rows, shape.positions), -1, np.int32)
    start = 0
    for index, (rollout, advantage) in enumerate(zip(rollouts, advantages, strict=True)):
        if rollout.input_ids.shape[1] != shape.positions:
            raise ValueError(
                f"rollout {rollout.id} has rows of {rollout.input_ids.shape[1]} positions, "
                f"the batch has {shape.positions}"
            )
        span = slice(start, start + rollout.input_ids.shape[0])
        for name in ("input_ids", "loss_mask", "segment_ids", "policy_logprobs", "reference_logprobs"):
            arrays[name][span] = getattr(rollout, name)
        arrays["advantages"][span] = np.where(rollout.loss_mask, np.float32(advantage), np.float32(0))
        rollout_ids[span] = np.where(rollout.loss_mask, index, -1)
        start = span.stop
    arrays["loss_weights"] = aggregation.loss_weights(arrays["loss_mask"], rollout_ids)
    Batch, Pos = Axis("batch", shape.rows), Axis("position", shape.positions)
    return RlExample(**{name: hax.named(array, (Batch, Pos)) for name, array in arrays.items()})
