# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Named-axis training batches of the learner.

Every per-token array of marin_rl is aligned with its token: entry `t` of `loss_mask`, `policy_logprobs` or `advantages`
belongs to `input_ids[t]`. A causal language model predicts token `t` at position `t - 1`. Only `to_tokens` and
`to_predictors` shift arrays between the two.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Float, Int64, Shaped
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from marin_rl.batching.packing import GroupRow, Prompt, RowLayout, Slot, choose_layout, count_microbatches
from marin_rl.batching.places import find_places, join
from marin_rl.batching.processed_rollout import ProcessedRollout, join_arrays
from marin_rl.levanter_line import lm_example
from marin_rl.objectives.advantage_inputs import TokenAdvantages
from marin_rl.objectives.aggregation import NO_ROLLOUT, AggregationConfig, TokenMeanConfig

OwnRows = Callable[[int], Int64[np.ndarray, " own"]]
"""Returns the rows that this process feeds, ascending, of a microbatch with a number of rows."""

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


def to_predictors(per_token: NamedArray) -> NamedArray:
    """Shift `{..., position}` values from each token to the position that predicts it, for `input_ids` the targets.

    `out[t] = per_token[t + 1]`; the last position predicts no token and gets 0.
    """
    Pos = per_token.resolve_axis("position")
    moved = hax.roll(per_token, -1, Pos)
    return hax.where(hax.arange(Pos) == Pos.size - 1, hax.zeros((), dtype=per_token.dtype), moved)


def to_tokens(per_predictor: NamedArray) -> NamedArray:
    """Shift `{..., position}` values from each predicting position to the token it predicts.

    `out[t] = per_predictor[t - 1]`; token 0 has no predicting position and gets 0.
    """
    Pos = per_predictor.resolve_axis("position")
    moved = hax.roll(per_predictor, 1, Pos)
    return hax.where(hax.arange(Pos) == 0, hax.zeros((), dtype=per_predictor.dtype), moved)


class SharedPromptMask(AttentionMask):
    """Causal attention within each segment, and of each answer to the prompt of its row.

    `marin_rl.learner.group_attention` computes it without the pairs that it excludes. The attention of GPT-2 calls
    `materialize` for a whole row or for blocks of it, or reads `segment_ids` only and would ignore the prompts;
    `AttentionKernel.supports_shared_prompts` excludes that.
    """

    prompt_segment_ids: NamedArray = eqx.field(kw_only=True)
    """As in [`RlExample`][marin_rl.batching.rl_example.RlExample]."""
    position_ids: NamedArray = eqx.field(kw_only=True)
    """As in [`RlExample`][marin_rl.batching.rl_example.RlExample]; not all models pass them to their attention."""
    group: GroupRow = eqx.field(static=True, kw_only=True)
    """Parts of a row."""

    def materialize(
        self, QPos: Axis, KPos: Axis, q_slice: hax.dslice | None = None, k_slice: hax.dslice | None = None
    ) -> NamedArray:
        """Return the mask of some queries and keys: `k <= q` and (`segment_k = segment_q` or `= prompt_q`)."""
        if self.sliding_window is not None:
            raise NotImplementedError(
                "only marin_rl.learner.group_attention computes windows in rows with shared prompts"
            )
        assert self.segment_ids is not None
        segments, _ = self.segment_ids
        own = AttentionMask.causal().with_segment_ids(segments)
        prompt = AttentionMask.causal().with_segment_ids(self.prompt_segment_ids, segments)
        in_segment, in_prompt = (mask.materialize(QPos, KPos, q_slice, k_slice) for mask in (own, prompt))
        assert in_segment is not None
        assert in_prompt is not None
        return in_segment | in_prompt

    def with_sliding_window(self, sliding_window: int | None) -> "SharedPromptMask":
        """Return this mask with a window, which counts positions in a sequence and not in the row."""
        return dataclasses.replace(self, sliding_window=sliding_window)


class RlExample(eqx.Module):
    """One microbatch of rollouts. All arrays are `{batch, position}` and aligned with tokens.

    A row contains one or several sequences, one segment each. If sequences share a prompt, it is a segment of its own,
    before theirs, which start with a copy of the prompt's last token: every token is predicted by the position before
    it. The loss of the whole batch is the plain sum over its microbatches of
    `Σ loss_weights · term(advantages, …)`; the denominators are in `loss_weights`.
    """

    input_ids: NamedArray
    """int32 token ids; the padding token if `segment_ids` is 0."""
    loss_mask: NamedArray
    """bool, True for loss tokens."""
    segment_ids: NamedArray
    """int32, 0 for padding, then 1, 2, … along a row; attention is restricted to a segment and its prompt."""
    position_ids: NamedArray
    """int32, position of each token within its sequence: 0, 1, …; 0 for padding."""
    rollout_ids: NamedArray
    """int32, index of each token's rollout in this microbatch (0, 1, …); -1 for padding and shared prompts."""
    loss_weights: NamedArray
    """float32, weight of each token in the loss; 0 outside the loss mask."""
    importance_weights: NamedArray
    """float32, off-policy correction of each token, 1 without a correction; 0 outside the loss mask."""
    advantages: NamedArray
    """float32, advantage of each token; 0 outside the loss mask."""
    policy_logprobs: NamedArray
    """float32, log-probs (nats) under the sampling policy; 0 outside the loss mask."""
    reference_logprobs: NamedArray
    """float32, log-probs (nats) under the frozen reference; 0 outside the loss mask or without a reference."""
    values: NamedArray
    """float32, the critic's values before the update; 0 outside the loss mask or without a critic."""
    returns: NamedArray
    """float32, regression targets of the critic; 0 outside the loss mask or without a critic."""
    prompt_segment_ids: NamedArray | None = None
    """int32, segment of the shared prompt of each token's sequence, or the token's own segment; 0 for padding. None
    for rows without shared prompts."""
    group: GroupRow | None = eqx.field(static=True, default=None)
    """Parts of a row whose sequences share their prompt; None for rows without shared prompts."""

    def __check_init__(self) -> None:
        leaves = self.arrays()
        if not all(isinstance(leaf, NamedArray) for leaf in leaves.values()):
            return  # a transformed tree with other leaves, as inside jax.tree.map
        axes = self.input_ids.axes
        for name, leaf in leaves.items():
            if leaf.axes != axes:
                raise ValueError(f"RlExample: {name} has axes {leaf.axes}, input_ids has {axes}")

    def arrays(self) -> dict[str, NamedArray]:
        """Return the arrays by name."""
        # `getattr` of an `eqx.Module` takes long.
        return {name: array for name, array in vars(self).items() if name != "group" and array is not None}

    def to_lm_example(self) -> LmExample:
        """Convert to levanter's `LmExample`, with the loss mask at the predicting positions."""
        return lm_example(self.input_ids, to_predictors(self.loss_mask.astype(jnp.int32)), self.attention_mask)

    def to_inputs(self, per_token: NamedArray) -> NamedArray:
        """Keep the positions that the model computes: not the last token of the part of each answer."""
        if self.group is None:
            return per_token
        (first, answers, length), Pos = self.group, per_token.resolve_axis("position")
        prompts, rest = per_token["position", :first], per_token["position", first:]
        parts = rest.unflatten_axis("position", (Axis("answer", answers), Axis("position", self.group.answer_tokens)))
        kept = parts["position", :length].flatten_axes(("answer", "position"), "position")
        return hax.concatenate(Pos.name, [prompts, kept])

    def from_inputs(self, per_input: NamedArray) -> NamedArray:
        """Align results of the model with the tokens; those of the tokens that it does not compute are 0."""
        if self.group is None:
            return per_input
        (first, answers, length), Pos = self.group, per_input.resolve_axis("position")
        prompts, rest = per_input["position", :first], per_input["position", first:]
        parts = rest.unflatten_axis("position", (Axis("answer", answers), Axis("position", length)))
        padded = hax.pad(parts, {"position": (0, 1)}, constant_values=0)
        return hax.concatenate(Pos.name, [prompts, padded.flatten_axes(("answer", "position"), "position")])

    @property
    def attention_mask(self) -> AttentionMask:
        """Causal attention of the positions that the model computes, within each segment and to its prompt."""
        if self.prompt_segment_ids is None or self.group is None:
            return AttentionMask.causal().with_segment_ids(self.segment_ids)
        segments = self.to_inputs(self.segment_ids)
        return SharedPromptMask(
            is_causal=True,
            segment_ids=(segments, segments),
            prompt_segment_ids=self.to_inputs(self.prompt_segment_ids),
            position_ids=self.to_inputs(self.position_ids),
            group=self.group,
        )


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
        self, values: Sequence[Shaped[np.ndarray, "rows tokens_per_row"]]
    ) -> list[Shaped[np.ndarray, "_batch _position"]]:
        """Gather per-token values from the microbatches into one array per rollout.

        Args:
            values: per microbatch, an array `[rows, tokens_per_row]`.

        Returns:
            Per rollout, an array `[batch, position]` with the shape of its `ProcessedRollout`; 0 for padding.

        Raises:
            ValueError: if the number or the shape of the arrays differs from that of the microbatches.
        """
        shape = (self.layout.rows_per_microbatch, self.layout.tokens_per_row)
        if [array.shape for array in values] != [shape] * len(self.microbatches):
            raise ValueError(
                f"unpack got arrays of shapes {[array.shape for array in values]}; "
                f"this batch has {len(self.microbatches)} microbatches of shape {shape}"
            )
        rollouts = []
        for slots, positions in zip(self.slots, self.positions, strict=True):
            rollout = np.zeros((len(slots), positions), values[0].dtype)
            for row, (index, packed_row, start, length, prompt_length) in enumerate(slots):
                packed = values[index][packed_row]
                rollout[row, :prompt_length] = packed[:prompt_length]
                rollout[row, prompt_length : prompt_length + length] = packed[start : start + length]
            rollouts.append(rollout)
        return rollouts

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including prompts, without padding. A shared prompt counts once per row."""
        slots = [slot for own in self.slots for slot in own]
        prompts = {(slot.microbatch_index, slot.row): slot.prompt_length for slot in slots}
        return sum(slot.length for slot in slots) + sum(prompts.values())

    @property
    def num_positions(self) -> int:
        """Number of tokens including padding: microbatches · rows · tokens per row."""
        return len(self.microbatches) * self.layout.rows_per_microbatch * self.layout.tokens_per_row


def pack_batch(
    rollouts: Sequence[ProcessedRollout],
    advantages: Sequence[TokenAdvantages],
    aggregation: AggregationConfig,
    layout: RowLayout,
    *,
    pad_token_id: int,
    importance_weights: Sequence[Float[np.ndarray, " _tokens"]] | None = None,
    own_rows: OwnRows | None = None,
) -> PackedBatch:
    """Pack rollouts into microbatches of a fixed shape.

    The layout is the given one or an alternative of it, whichever costs least; this depends on the rollouts only. There
    is always at least one microbatch. All loss weights are 0 if there are no loss tokens.

    Args:
        rollouts: the rollouts, in any order and of any row length.
        advantages: per rollout, the advantages and value targets of its action tokens, which are `array[loss_mask]`,
            row by row.
        aggregation: aggregation of token terms; its denominators are computed here over all microbatches.
        layout: shape of a microbatch, and its alternatives.
        pad_token_id: token id of the padding.
        importance_weights: per rollout, the weight of each action token; 1 by default.
        own_rows: returns the rows of a microbatch that this process feeds; the microbatches contain only these. Slots,
            denominators and counts are those of all rows. None for all rows.

    Returns:
        The microbatches, and the slot of each sequence.

    Raises:
        ValueError: if a sequence is longer than a row, a rollout does not fit into one microbatch, or a rollout does
            not have one advantage and one weight per action token; the message names the rollout.
    """
    if importance_weights is None:
        importance_weights = [np.ones(rollout.num_loss_tokens) for rollout in rollouts]
    per_action = {
        "advantages": [tokens.advantages for tokens in advantages],
        "returns": [tokens.value_targets for tokens in advantages],
        "importance_weights": importance_weights,
    }
    for name, arrays in per_action.items():
        _check_per_action(name, arrays, rollouts)
    prompts = None
    if any(candidate.group for candidate in (layout, *layout.alternatives)):
        prompts = _prompts(rollouts)
    layout, slots = choose_layout(
        [rollout.lengths for rollout in rollouts], layout, [rollout.id for rollout in rollouts], prompts
    )
    rows = None if own_rows is None else own_rows(layout.rows_per_microbatch)
    arrays = _scatter(rollouts, per_action, aggregation, slots, layout, pad_token_id, rows)
    axes = (Axis("batch", arrays["input_ids"].shape[1]), Axis("position", layout.tokens_per_row))
    microbatches = tuple(
        # On the host: `hax.named` would put every array on the default device.
        RlExample(
            **{name: NamedArray(cast(jax.Array, array[index]), axes) for name, array in arrays.items()},
            group=layout.group,
        )
        for index in range(len(arrays["input_ids"]))
    )
    positions = tuple(rollout.input_ids.shape[1] for rollout in rollouts)
    return PackedBatch(microbatches, slots, layout, positions, sum(rollout.num_loss_tokens for rollout in rollouts))


def pack_to_score(
    rollouts: Sequence[ProcessedRollout], layout: RowLayout, *, pad_token_id: int, own_rows: OwnRows | None = None
) -> PackedBatch:
    """Pack rollouts for scoring: like `pack_batch`, with zero advantages.

    Args:
        rollouts: the rollouts, in any order and of any row length.
        layout: shape of a microbatch, and whether sequences share rows.
        pad_token_id: token id of the padding.
        own_rows: see `pack_batch`.

    Returns:
        The microbatches, and the slot of each sequence.
    """
    zeros = [np.zeros(rollout.num_loss_tokens) for rollout in rollouts]
    advantages = [TokenAdvantages(array, array) for array in zeros]
    return pack_batch(rollouts, advantages, TokenMeanConfig(), layout, pad_token_id=pad_token_id, own_rows=own_rows)


def _prompts(rollouts: Sequence[ProcessedRollout]) -> list[list[Prompt]]:
    """Return per sequence the tokens before the one that predicts its first loss token, or its last without loss."""
    input_ids, loss_mask = join_arrays(rollouts, "input_ids"), join_arrays(rollouts, "loss_mask")
    lengths = np.array([length for rollout in rollouts for length in rollout.lengths], np.int64)
    width = np.array([rollout.input_ids.shape[1] for rollout in rollouts for _ in rollout.lengths], np.int64)
    start = np.cumsum(width) - width
    loss_tokens = np.append(np.flatnonzero(loss_mask), loss_mask.size)
    first = np.minimum(loss_tokens[np.searchsorted(loss_tokens, start)] - start, lengths)
    tokens, size = input_ids.tobytes(), input_ids.itemsize
    bounds = zip((size * start).tolist(), np.maximum(first - 1, 0).tolist(), strict=True)
    prompts = (Prompt(tokens[begin : begin + size * length], length) for begin, length in bounds)
    return [[next(prompts) for _ in rollout.lengths] for rollout in rollouts]


def _scatter(
    rollouts: Sequence[ProcessedRollout],
    per_action: Mapping[str, Sequence[np.ndarray]],
    aggregation: AggregationConfig,
    slots: Sequence[Sequence[Slot]],
    layout: RowLayout,
    pad_token_id: int,
    rows: Int64[np.ndarray, " own"] | None,
) -> dict[str, np.ndarray]:
    """Return the arrays of all microbatches, `[microbatch, row, position]`, or those of some rows of each."""
    shape = (count_microbatches(slots), layout.rows_per_microbatch, layout.tokens_per_row)
    places = find_places(slots, shape, [rollout.input_ids.shape[1] for rollout in rollouts])
    is_action = join_arrays(rollouts, "loss_mask")
    loss_mask = places.gather(is_action, np.bool_)
    # The denominators are those of the whole batch, independent of its split into microbatches and among processes.
    rollout_of_token = places.spread(places.owner, NO_ROLLOUT, np.int32)
    by_row = (-1, layout.tokens_per_row)
    weights = aggregation.loss_weights(loss_mask.reshape(by_row), rollout_of_token.reshape(by_row))
    if rows is not None:
        loss_mask, weights = (array.reshape(shape)[:, rows].reshape(-1) for array in (loss_mask, weights))
        places = places.in_rows(rows, shape)
        shape = (shape[0], len(rows), shape[2])
    sources = places.sources[loss_mask[places.tokens]]
    actions = np.cumsum(is_action)[sources] - 1

    def on_loss(name: str, values: np.ndarray) -> np.ndarray:
        array = np.zeros(loss_mask.shape, PER_TOKEN_DTYPES[name])
        array[loss_mask] = values
        return array

    position = np.arange(loss_mask.size, dtype=np.int32) - places.spread(places.start - places.offset, 0, np.int32)
    scores = ("policy_logprobs", "reference_logprobs", "values")
    arrays = {
        "input_ids": places.gather(join_arrays(rollouts, "input_ids"), np.int32, pad_token_id),
        "loss_mask": loss_mask,
        "segment_ids": places.spread(places.segment, 0, np.int32),
        "position_ids": np.where(places.tokens, position, 0),
        "rollout_ids": places.spread(places.number, NO_ROLLOUT, np.int32),
        "loss_weights": weights,
        **{name: on_loss(name, join(values, np.float64)[actions]) for name, values in per_action.items()},
        **{name: on_loss(name, join_arrays(rollouts, name)[sources]) for name in scores},
    }
    if layout.group is not None:
        arrays["prompt_segment_ids"] = places.spread(places.prompt_segment, 0, np.int32)
    return {name: array.reshape(shape) for name, array in arrays.items()}


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
