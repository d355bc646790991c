# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Named-axis training batches of the learner."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Bool, Float, Int64, Shaped
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from marin_rl.batching.alignment import to_predictors
from marin_rl.batching.packing import RowLayout, Slot, count_microbatches, pack_sequences
from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.objectives.advantage_inputs import TokenAdvantages
from marin_rl.objectives.aggregation import NO_ROLLOUT, AggregationConfig, TokenMeanConfig

PER_TOKEN_DTYPES = {
    "input_ids": jnp.int32,
    "loss_mask": jnp.bool_,
    "segment_ids": jnp.int32,
    "position_ids": jnp.int32,
    "rollout_ids": jnp.int32,
    "loss_weights": jnp.float32,
    "importance_weights": jnp.float32,
    "advantages": jnp.float32,
    "policy_logprobs": jnp.float32,
    "reference_logprobs": jnp.float32,
    "values": jnp.float32,
    "returns": jnp.float32,
}


class RlExample(eqx.Module):
    """One microbatch of rollouts. All arrays are `{batch, position}` and aligned with tokens.

    A row contains one or several sequences, one segment each. The loss of the whole batch is the plain sum over its
    microbatches of `Σ loss_weights · term(advantages, …)`. The denominators of the aggregation are in `loss_weights`
    and are computed on the host over the whole batch, so the loss does not depend on the split into microbatches, rows
    or devices.
    """

    input_ids: NamedArray
    """`{batch, position}` int32 token ids; the padding token if `segment_ids` is 0."""
    loss_mask: NamedArray
    """`{batch, position}` bool, True for loss tokens."""
    segment_ids: NamedArray
    """`{batch, position}` int32, 0 for padding, then 1, 2, … along a row; attention is restricted to a segment."""
    position_ids: NamedArray
    """`{batch, position}` int32, position of each token within its segment: 0, 1, …; 0 for padding."""
    rollout_ids: NamedArray
    """`{batch, position}` int32, index of each token's rollout in this microbatch (0, 1, …); -1 for padding."""
    loss_weights: NamedArray
    """`{batch, position}` float32, weight of each token in the loss; 0 outside the loss mask."""
    importance_weights: NamedArray
    """`{batch, position}` float32, off-policy correction of each token, 1 without a correction; 0 outside the loss
    mask."""
    advantages: NamedArray
    """`{batch, position}` float32, advantage of each token; 0 outside the loss mask."""
    policy_logprobs: NamedArray
    """`{batch, position}` float32, log-probs (nats) under the sampling policy; 0 outside the loss mask."""
    reference_logprobs: NamedArray
    """`{batch, position}` float32, log-probs (nats) under the frozen reference; 0 outside the loss mask or without
    a reference."""
    values: NamedArray
    """`{batch, position}` float32, the critic's values before the update; 0 outside the loss mask or without a
    critic."""
    returns: NamedArray
    """`{batch, position}` float32, regression targets of the critic; 0 outside the loss mask or without a critic."""

    def __check_init__(self) -> None:
        leaves = [getattr(self, name) for name in PER_TOKEN_DTYPES]
        if not all(isinstance(leaf, NamedArray) for leaf in leaves):
            return  # a transformed tree with other leaves, as inside jax.tree.map
        axes = self.input_ids.axes
        for name, leaf in zip(PER_TOKEN_DTYPES, leaves, strict=True):
            if leaf.axes != axes:
                raise ValueError(f"RlExample: {name} has axes {leaf.axes}, input_ids has {axes}")

    def to_lm_example(self) -> LmExample:
        """Convert to levanter's `LmExample`, with the loss mask at the predicting positions."""
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
class PackedBatch:
    """A batch of rollouts as microbatches of one shape."""

    microbatches: tuple[RlExample, ...]
    """The microbatches, all of the same shape; at least one."""
    slots: tuple[tuple[Slot, ...], ...]
    """Per rollout, the slot of each sequence."""
    layout: RowLayout
    """Shape of a microbatch."""
    positions: tuple[int, ...]
    """Per rollout, the row length of its `ProcessedRollout`."""
    num_loss_tokens: int
    """Number of loss tokens."""

    def unpack(
        self, values: Sequence[Shaped[np.ndarray, "rows row_length"]]
    ) -> list[Shaped[np.ndarray, "_batch _position"]]:
        """Gather per-token values from the microbatches into one array per rollout.

        Args:
            values: per microbatch, an array `[rows, row_length]`.

        Returns:
            Per rollout, an array `[batch, position]` with the shape of its `ProcessedRollout`; 0 for padding.

        Raises:
            ValueError: if the number or the shape of the arrays differs from that of the microbatches.
        """
        shape = (self.layout.rows_per_microbatch, self.layout.row_length)
        if [array.shape for array in values] != [shape] * len(self.microbatches):
            raise ValueError(
                f"unpack got arrays of shapes {[array.shape for array in values]}; "
                f"this batch has {len(self.microbatches)} microbatches of shape {shape}"
            )
        pairs = zip(self.slots, self.positions, strict=True)
        return [self._unpack_rollout(values, slots, positions) for slots, positions in pairs]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including prompts, without padding."""
        return sum(slot.length for slots in self.slots for slot in slots)

    @property
    def num_positions(self) -> int:
        """Number of positions including padding: microbatches · rows · row length."""
        return len(self.microbatches) * self.layout.rows_per_microbatch * self.layout.row_length

    @property
    def efficiency(self) -> float:
        """Share of positions that are tokens, in [0, 1]."""
        return self.num_tokens / self.num_positions

    def _unpack_rollout(self, values: Sequence[np.ndarray], slots: Sequence[Slot], positions: int) -> np.ndarray:
        unpacked = np.zeros((len(slots), positions), values[0].dtype)
        for row, slot in enumerate(slots):
            unpacked[row, : slot.length] = values[slot.microbatch_index][
                slot.row, slot.start : slot.start + slot.length
            ]
        return unpacked


def pack_batch(
    rollouts: Sequence[ProcessedRollout],
    advantages: Sequence[TokenAdvantages],
    aggregation: AggregationConfig,
    layout: RowLayout,
    *,
    pad_token_id: int,
    importance_weights: Sequence[Float[np.ndarray, " _tokens"]] | None = None,
) -> PackedBatch:
    """Pack rollouts into microbatches of a fixed shape.

    There is always at least one microbatch. All loss weights are 0 if there are no loss tokens.

    Args:
        rollouts: the rollouts, in any order and of any row length.
        advantages: per rollout, the advantages and value targets of its action tokens, which are `array[loss_mask]`,
            row by row.
        aggregation: aggregation of token terms; its denominators are computed here over all microbatches.
        layout: shape of a microbatch, and whether sequences share rows.
        pad_token_id: token id of the padding.
        importance_weights: per rollout, the weight of each action token; 1 by default.

    Returns:
        The microbatches, and the slot of each sequence.

    Raises:
        ValueError: if a sequence is longer than a row, a rollout does not fit into one microbatch, or a rollout does
            not have one advantage and one weight per action token; the message names the rollout.
    """
    ones = [np.ones(rollout.num_loss_tokens) for rollout in rollouts]
    per_action = {
        "advantages": [tokens.advantages for tokens in advantages],
        "returns": [tokens.value_targets for tokens in advantages],
        "importance_weights": ones if importance_weights is None else importance_weights,
    }
    for name, arrays in per_action.items():
        _check_per_action(name, arrays, rollouts)
    for name in ("policy_logprobs", "reference_logprobs", "values"):
        per_action[name] = [getattr(rollout, name)[rollout.loss_mask] for rollout in rollouts]
    slots = pack_sequences([rollout.lengths for rollout in rollouts], layout, [rollout.id for rollout in rollouts])
    places = _TokenPlaces.from_slots(slots, rollouts, layout)
    token_ids = _join([rollout.input_ids[rollout.segment_ids != 0] for rollout in rollouts], np.int32)
    arrays = {
        "input_ids": places.put_tokens("input_ids", token_ids, padding=pad_token_id),
        "loss_mask": places.put_tokens("loss_mask", places.loss),
        "segment_ids": places.put_tokens("segment_ids", places.segment),
        "position_ids": places.put_tokens("position_ids", places.position),
        "rollout_ids": places.put_tokens("rollout_ids", _number_within_microbatches(places), padding=NO_ROLLOUT),
        "loss_weights": places.loss_weights(aggregation),
        **{name: places.put_actions(name, values) for name, values in per_action.items()},
    }
    axes = (Axis("batch", layout.rows_per_microbatch), Axis("position", layout.row_length))
    microbatches = tuple(
        RlExample(**{name: hax.named(array[index], axes) for name, array in arrays.items()})
        for index in range(count_microbatches(slots))
    )
    positions = tuple(rollout.input_ids.shape[1] for rollout in rollouts)
    return PackedBatch(microbatches, slots, layout, positions, int(places.loss.sum()))


def pack_to_score(rollouts: Sequence[ProcessedRollout], layout: RowLayout, *, pad_token_id: int) -> PackedBatch:
    """Pack rollouts for scoring: like `pack_batch`, with zero advantages.

    Args:
        rollouts: the rollouts, in any order and of any row length.
        layout: shape of a microbatch, and whether sequences share rows.
        pad_token_id: token id of the padding.

    Returns:
        The microbatches, and the slot of each sequence.
    """
    zeros = [np.zeros(rollout.num_loss_tokens) for rollout in rollouts]
    advantages = [TokenAdvantages(array, array) for array in zeros]
    return pack_batch(rollouts, advantages, TokenMeanConfig(), layout, pad_token_id=pad_token_id)


class _TokenPlaces(NamedTuple):
    """Location of every token of a batch. The arrays run over all tokens, by rollout and then by sequence."""

    shape: tuple[int, int, int]
    """Microbatches, rows, positions."""
    place: Int64[np.ndarray, " tokens"]
    """Index into a flattened array of that shape."""
    position: Int64[np.ndarray, " tokens"]
    """Position within the token's sequence."""
    segment: Int64[np.ndarray, " tokens"]
    """Segment id."""
    rollout: Int64[np.ndarray, " tokens"]
    """Index of the rollout in the batch."""
    loss: Bool[np.ndarray, " tokens"]
    """Whether the token is a loss token."""

    @staticmethod
    def from_slots(
        slots: Sequence[Sequence[Slot]], rollouts: Sequence[ProcessedRollout], layout: RowLayout
    ) -> "_TokenPlaces":
        table = [(rollout, *slot) for rollout, sequences in enumerate(slots) for slot in sequences]
        sequences = np.array(table, np.int64).reshape(len(table), 6)
        length = sequences[:, 5]
        rollout, microbatch_index, row, start, segment, _ = np.repeat(sequences, length, axis=0).T
        position = np.arange(rollout.size) - np.repeat(np.cumsum(length) - length, length)
        place = (microbatch_index * layout.rows_per_microbatch + row) * layout.row_length + start + position
        loss = _join([rollout.loss_mask[rollout.segment_ids != 0] for rollout in rollouts], np.bool_)
        shape = (count_microbatches(slots), layout.rows_per_microbatch, layout.row_length)
        return _TokenPlaces(shape, place, position, segment, rollout, loss)

    def put_tokens(self, name: str, values: np.ndarray, *, padding: int = 0) -> np.ndarray:
        """Scatter one value per token into the microbatches."""
        return self._put(name, values, self.place, padding)

    def put_actions(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Scatter one value per action token of each rollout into the microbatches."""
        return self._put(name, _join(arrays, np.float64), self.place[self.loss], 0)

    def loss_weights(self, aggregation: AggregationConfig) -> np.ndarray:
        """Compute the loss weights over the whole batch, independent of the split into microbatches."""
        mask = self.put_tokens("loss_mask", self.loss)
        rollout_ids = self.put_tokens("rollout_ids", self.rollout, padding=NO_ROLLOUT)
        rows = (-1, self.shape[2])
        return aggregation.loss_weights(mask.reshape(rows), rollout_ids.reshape(rows)).reshape(self.shape)

    def _put(self, name: str, values: np.ndarray, place: np.ndarray, padding: int) -> np.ndarray:
        array = np.full(self.shape, padding, PER_TOKEN_DTYPES[name])
        array.reshape(-1)[place] = values
        return array


def _number_within_microbatches(places: _TokenPlaces) -> Int64[np.ndarray, " tokens"]:
    """Number the rollouts of each microbatch from 0, and return the number of each token's rollout."""
    pairs = np.stack([places.place // (places.shape[1] * places.shape[2]), places.rollout])
    distinct, number = np.unique(pairs, axis=1, return_inverse=True)
    before = np.searchsorted(distinct[0], distinct[0])  # rollouts of earlier microbatches
    return number.reshape(-1) - before[number.reshape(-1)]


def _check_per_action(name: str, arrays: Sequence[np.ndarray], rollouts: Sequence[ProcessedRollout]) -> None:
    if len(arrays) != len(rollouts):
        raise ValueError(
            f"pack_batch got {len(rollouts)} rollouts but {name} for {len(arrays)}; pass one array per rollout"
        )
    for array, rollout in zip(arrays, rollouts, strict=True):
        if array.shape != (rollout.num_loss_tokens,):
            raise ValueError(
                f"rollout {rollout.id} has {rollout.num_loss_tokens} loss tokens, "
                f"but its {name} have shape {array.shape}"
            )


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Concatenate arrays; also works for an empty list."""
    return np.concatenate([np.zeros(0, dtype), *arrays])
