# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The named-axis batches that the learner trains on."""

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
    """One pass of a batch of rollouts, `{batch, position}` throughout, aligned with the tokens.

    A row holds one sequence or several, one segment each. The loss of the whole batch is the plain sum over
    its microbatches of `Σ loss_weights · term(advantages, …)`: the denominators of the aggregation are inside
    `loss_weights`, counted over the whole batch on the host, so that no split into microbatches, rows,
    microbatches or devices can change them.
    """

    input_ids: NamedArray
    """`{batch, position}` int32 token ids; the padding token where `segment_ids` is 0."""
    loss_mask: NamedArray
    """`{batch, position}` bool, True on the tokens with loss."""
    segment_ids: NamedArray
    """`{batch, position}` int32, 0 on padding, then 1, 2, … along a row; attention stays within a segment."""
    position_ids: NamedArray
    """`{batch, position}` int32, position of each token within its segment: 0, 1, …; 0 on padding."""
    rollout_ids: NamedArray
    """`{batch, position}` int32, which rollout of this pass (0, 1, …) each token belongs to; -1 on padding."""
    loss_weights: NamedArray
    """`{batch, position}` float32, weight of each token in the loss; 0 off the loss mask."""
    importance_weights: NamedArray
    """`{batch, position}` float32, correction for a sampler that differs from the learner, 1 for none; 0 off the
    loss mask."""
    advantages: NamedArray
    """`{batch, position}` float32, advantage of each token; 0 off the loss mask."""
    policy_logprobs: NamedArray
    """`{batch, position}` float32, log-probs (nats) under the policy that sampled; 0 off the loss mask."""
    reference_logprobs: NamedArray
    """`{batch, position}` float32, log-probs under the frozen reference; 0 off the loss mask or without one."""
    values: NamedArray
    """`{batch, position}` float32, the critic's values before the update; 0 off the loss mask or without one."""
    returns: NamedArray
    """`{batch, position}` float32, what the critic should learn; 0 off the loss mask or without one."""

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
class PackedBatch:
    """A batch of rollouts in microbatches of one shape."""

    microbatches: tuple[RlExample, ...]
    """What the model runs, all of the same shape; at least one."""
    slots: tuple[tuple[Slot, ...], ...]
    """Where each sequence of each rollout stands in them."""
    layout: RowLayout
    """The shape of a microbatch."""
    positions: tuple[int, ...]
    """Row length of each rollout's own arrays."""
    num_loss_tokens: int
    """Tokens with loss."""

    def unpack(
        self, values: Sequence[Shaped[np.ndarray, "rows row_length"]]
    ) -> list[Shaped[np.ndarray, "_batch _position"]]:
        """Move values of tokens from the microbatches back to the rollouts.

        Args:
            values: one array `[rows, row_length]` a microbatch.

        Returns:
            One array `[batch, position]` a rollout, aligned with its own arrays; 0 on padding.

        Raises:
            ValueError: if there is not one array of a microbatch's shape for each microbatch.
        """
        shape = (self.layout.rows_per_microbatch, self.layout.row_length)
        if [array.shape for array in values] != [shape] * len(self.microbatches):
            raise ValueError(
                f"unpack got arrays of shapes {[array.shape for array in values]}; "
                f"this batch has {len(self.microbatches)} microbatches of shape {shape}"
            )
        return [self._unpack_rollout(values, own, size) for own, size in zip(self.slots, self.positions, strict=True)]

    @property
    def num_tokens(self) -> int:
        """Tokens, prompts included, padding not."""
        return sum(slot.length for own in self.slots for slot in own)

    @property
    def num_positions(self) -> int:
        """Positions that the model runs on, padding included: microbatches · rows · row length."""
        return len(self.microbatches) * self.layout.rows_per_microbatch * self.layout.row_length

    @property
    def efficiency(self) -> float:
        """Share of the positions that hold a token, in [0, 1]."""
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
    token_advantages_list: Sequence[TokenAdvantages],
    aggregation: AggregationConfig,
    layout: RowLayout,
    *,
    pad_token_id: int,
    importance_weights: Sequence[Float[np.ndarray, " _tokens"]] | None = None,
) -> PackedBatch:
    """Lay rollouts out in microbatches of a fixed shape.

    Without rollouts, or without any that has loss, all
    loss weights are 0; there is always at least one microbatch.

    Args:
        rollouts: in any order, of any row length.
        token_advantages_list: what each rollout's action tokens earned; "action tokens" are `array[loss_mask]`, row by
            row.
        aggregation: how token terms become one number; its denominators are counted here, over all microbatches.
        layout: shape of a microbatch, and whether sequences share rows.
        pad_token_id: fills what no sequence takes.
        importance_weights: per rollout, a weight for each action token; 1 where left out.

    Raises:
        ValueError: if a sequence is longer than a row, a rollout does not fit into one microbatch, or there is not one
            credit and one weight per action token; the message names the rollout.
    """
    ones = [np.ones(rollout.num_loss_tokens) for rollout in rollouts]
    per_action = {
        "advantages": [token_advantages.advantages for token_advantages in token_advantages_list],
        "returns": [token_advantages.value_targets for token_advantages in token_advantages_list],
        "importance_weights": ones if importance_weights is None else importance_weights,
    }
    for name, arrays in per_action.items():
        _check_per_action(name, arrays, rollouts)
    for name in ("policy_logprobs", "reference_logprobs", "values"):
        per_action[name] = [getattr(rollout, name)[rollout.loss_mask] for rollout in rollouts]
    slots = pack_sequences([rollout.lengths for rollout in rollouts], layout, [rollout.id for rollout in rollouts])
    places = _Places.of(slots, rollouts, layout)
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
    """Lay rollouts out for a model that only scores them: as `pack_batch`, with nothing earned.

    Args:
        rollouts: in any order, of any row length.
        layout: shape of a microbatch, and whether sequences share rows.
        pad_token_id: fills what no sequence takes.
    """
    nothing = [np.zeros(rollout.num_loss_tokens) for rollout in rollouts]
    token_advantages_list = [TokenAdvantages(zeros, zeros) for zeros in nothing]
    return pack_batch(rollouts, token_advantages_list, TokenMeanConfig(), layout, pad_token_id=pad_token_id)


class _Places(NamedTuple):
    """Where every token of a batch stands: arrays over all of them, rollout by rollout, sequence by sequence."""

    shape: tuple[int, int, int]
    """Passes, rows, positions."""
    place: Int64[np.ndarray, " tokens"]
    """Index into an array of that shape, flattened."""
    position: Int64[np.ndarray, " tokens"]
    """Position within the token's sequence."""
    segment: Int64[np.ndarray, " tokens"]
    """Segment id."""
    rollout: Int64[np.ndarray, " tokens"]
    """Index of the rollout in the batch."""
    loss: Bool[np.ndarray, " tokens"]
    """Whether it has loss."""

    @staticmethod
    def of(slots: Sequence[Sequence[Slot]], rollouts: Sequence[ProcessedRollout], layout: RowLayout) -> "_Places":
        table = [(rollout, *slot) for rollout, own in enumerate(slots) for slot in own]
        sequences = np.array(table, np.int64).reshape(len(table), 6)
        length = sequences[:, 5]
        rollout, microbatch_index, row, start, segment, _ = np.repeat(sequences, length, axis=0).T
        position = np.arange(rollout.size) - np.repeat(np.cumsum(length) - length, length)
        place = (microbatch_index * layout.rows_per_microbatch + row) * layout.row_length + start + position
        loss = _join([rollout.loss_mask[rollout.segment_ids != 0] for rollout in rollouts], np.bool_)
        shape = (count_microbatches(slots), layout.rows_per_microbatch, layout.row_length)
        return _Places(shape, place, position, segment, rollout, loss)

    def put_tokens(self, name: str, values: np.ndarray, *, padding: int = 0) -> np.ndarray:
        """One value per token, to all microbatches."""
        return self._put(name, values, self.place, padding)

    def put_actions(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """One value per action token of each rollout, to all microbatches."""
        return self._put(name, _join(arrays, np.float64), self.place[self.loss], 0)

    def loss_weights(self, aggregation: AggregationConfig) -> np.ndarray:
        """The weights of the whole batch, so that a rollout or a token counts once, whatever its pass."""
        mask = self.put_tokens("loss_mask", self.loss)
        owners = self.put_tokens("rollout_ids", self.rollout, padding=NO_ROLLOUT)
        rows = (-1, self.shape[2])
        return aggregation.loss_weights(mask.reshape(rows), owners.reshape(rows)).reshape(self.shape)

    def _put(self, name: str, values: np.ndarray, place: np.ndarray, padding: int) -> np.ndarray:
        array = np.full(self.shape, padding, PER_TOKEN_DTYPES[name])
        array.reshape(-1)[place] = values
        return array


def _number_within_microbatches(places: _Places) -> Int64[np.ndarray, " tokens"]:
    """The number of each token's rollout among those of its pass, counted from 0."""
    pairs = np.stack([places.place // (places.shape[1] * places.shape[2]), places.rollout])
    distinct, number = np.unique(pairs, axis=1, return_inverse=True)
    before = np.searchsorted(distinct[0], distinct[0])  # rollouts of earlier microbatches
    return number.reshape(-1) - before[number.reshape(-1)]


def _check_per_action(name: str, arrays: Sequence[np.ndarray], rollouts: Sequence[ProcessedRollout]) -> None:
    if len(arrays) != len(rollouts):
        raise ValueError(f"pack_batch got {len(rollouts)} rollouts but {name} for {len(arrays)}; each needs its own")
    for array, rollout in zip(arrays, rollouts, strict=True):
        if array.shape != (rollout.num_loss_tokens,):
            raise ValueError(
                f"rollout {rollout.id} has {rollout.num_loss_tokens} tokens with loss, "
                f"but its {name} have shape {array.shape}"
            )


def _join(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Concatenate, for no arrays too."""
    return np.concatenate([np.zeros(0, dtype), *arrays])
