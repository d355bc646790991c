# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One rollout as padded arrays."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

from marin_rl.batching.rollout_batch import NO_TURN, TOKEN_ARRAYS, RolloutBatch, batch_rollouts, make_batch
from marin_rl.types import Rollout

_ARRAYS = ("input_ids", "loss_mask", "policy_logprobs", "reference_logprobs", "turn_ids", "values")


@dataclasses.dataclass(frozen=True)
class ProcessedRollout:
    """Arrays of one rollout, with one row per sequence, padded to a common length.

    Most rollouts are one sequence. If the chat template rewrites the history, a rollout has several sequences and is
    still counted as one rollout. Entry `t` of every array belongs to token `t`. A run trains on
    [`RolloutBatch`][marin_rl.batching.rollout_batch.RolloutBatch], which holds the tokens of many rollouts without
    padding, and can hold the chosen experts.
    """

    source: str
    """Name of the environment."""
    id: str
    """Id of the rollout."""
    input_ids: Int32[np.ndarray, "batch position"]
    """Token ids; the tokenizer's padding token if `segment_ids` is 0."""
    loss_mask: Bool[np.ndarray, "batch position"]
    """True for the sampled tokens (for supervised text, the target tokens)."""
    segment_ids: Int32[np.ndarray, "batch position"]
    """1 for tokens, 0 for padding."""
    policy_logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities (nats) under the sampling policy; 0 outside the loss mask."""
    reference_logprobs: Float32[np.ndarray, "batch position"]
    """Log-probabilities (nats) under the frozen reference; 0 outside the loss mask and until scored."""
    turn_ids: Int32[np.ndarray, "batch position"]
    """Turn (0, 1, …) of each sampled token; -1 outside the loss mask."""
    values: Float32[np.ndarray, "batch position"]
    """The critic's value of each sampled token's state; 0 outside the loss mask and until scored."""

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        for name in (*_ARRAYS, "segment_ids"):
            array, dtype = getattr(self, name), TOKEN_ARRAYS.get(name, np.int32)
            if array.ndim != 2 or array.shape != shape:
                raise ValueError(f"rollout {self.id}: {name} has shape {array.shape}, input_ids has {shape}")
            if array.dtype != dtype:
                raise ValueError(f"rollout {self.id}: {name} is {array.dtype}, expected {np.dtype(dtype)}")
        segments = self.segment_ids
        if not np.isin(segments, (0, 1)).all() or (segments[:, :-1] < segments[:, 1:]).any():
            raise ValueError(
                f"rollout {self.id}: segment_ids must be 1 for the tokens of a row and 0 for the padding after"
            )
        if (self.loss_mask > segments).any():
            raise ValueError(f"rollout {self.id}: loss_mask includes padding")
        sampled = self.turn_ids[self.loss_mask]
        if (sampled[:-1] > sampled[1:]).any():
            raise ValueError(f"rollout {self.id}: turn_ids must not decrease")
        self.to_batch()  # checks the values

    def to_batch(self) -> RolloutBatch:
        """Return the tokens without padding, as a batch of one rollout."""
        tokens = self.segment_ids == 1
        arrays = {name: getattr(self, name)[tokens] for name in _ARRAYS}
        return make_batch([self.id], [tokens.sum(axis=1).tolist()], **arrays)


def process_rollout(rollout: Rollout, *, length: int, pad_token_id: int) -> ProcessedRollout:
    """Convert a sampled rollout to arrays with exactly the sampled tokens.

    A failed rollout keeps its finished turns. There is one row of `length` positions per sequence. Reference
    log-probabilities and values are 0.

    Raises:
        ValueError: if a sequence is longer than `length`; the message gives the rollout and both lengths.
    """
    batch = batch_rollouts([rollout], max_length=length)
    is_token = np.arange(length) < np.diff(batch.sequence_offsets)[:, None]

    def padded(name: str) -> np.ndarray:
        padding = {"input_ids": pad_token_id, "turn_ids": NO_TURN}.get(name, 0)
        array = np.full(is_token.shape, padding, TOKEN_ARRAYS[name])
        array[is_token] = getattr(batch, name)
        return array

    arrays: dict[str, Any] = {name: padded(name) for name in _ARRAYS}
    return ProcessedRollout(
        source=rollout.task.environment, id=rollout.id, segment_ids=is_token.astype(np.int32), **arrays
    )
