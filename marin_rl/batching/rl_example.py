# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Named-axis training batches of the learner.

Every per-token array of marin_rl is aligned with its token: entry `t` of `loss_mask`, `policy_logprobs` or `advantages`
belongs to `input_ids[t]`. A causal language model predicts token `t` at position `t - 1`. Only `to_tokens` and
`to_predictors` shift arrays between the two.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import Bool, Int64, Shaped
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmExample

from marin_rl.batching.packing import GroupRow, Prompt, RowLayout, Slot, choose_layout, count_microbatches
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.models.mixture import TOP_EXPERTS, mixture_shape
from marin_rl.objectives.aggregation import AggregationConfig
from marin_rl.types import no_expert
from marin_rl.utils.levanter_line import lm_example

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
OPTIONAL_DTYPES = {
    "prompt_segment_ids": jnp.int32,
    "ce_weights": jnp.float32,
    "ref_kl_weights": jnp.float32,
    "router_weights": jnp.float32,
}
NO_ROLLOUT = -1
"""Rollout id of padding and shared prompts."""
_ON_LOSS = ("policy_logprobs", "reference_logprobs", "values", "advantages", "returns", "importance_weights")


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

    `marin_rl.learner.attention_layers` computes it without the pairs that it excludes. The attention of GPT-2 calls
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
                "only marin_rl.learner.attention_layers computes windows in rows with shared prompts"
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


class TokenRows(eqx.Module):
    """Rows of tokens that a model reads. All arrays are `{batch, position}`."""

    input_ids: NamedArray
    """int32 token ids; the padding token if `segment_ids` is 0."""
    segment_ids: NamedArray
    """int32, 0 for padding, then 1, 2, … along a row; attention is restricted to a segment and its prompt."""
    position_ids: NamedArray
    """int32, position of each token within its sequence: 0, 1, …; 0 for padding."""
    prompt_segment_ids: NamedArray | None = eqx.field(kw_only=True, default=None)
    """int32, segment of the shared prompt of each token's sequence, or the token's own segment; 0 for padding. None
    for rows without shared prompts."""
    group: GroupRow | None = eqx.field(kw_only=True, static=True, default=None)
    """Parts of a row whose sequences share their prompt; None for rows without shared prompts."""

    def to_inputs(self, per_token: NamedArray) -> NamedArray:
        """Keep the positions that the model computes: not the last token of the part of each answer."""
        if self.group is None:
            return per_token
        (first, answers, length), Pos = self.group, per_token.resolve_axis("position")
        prompts, rest = per_token["position", :first], per_token["position", first:]
        parts = rest.unflatten_axis("position", (Axis("answer", answers), Axis("position", self.group.answer_tokens)))
        kept = parts["position", :length].flatten_axes(("answer", "position"), "position")
        return hax.concatenate(Pos.name, [prompts, kept])

    def from_inputs(self, per_input: NamedArray, fill: int = 0) -> NamedArray:
        """Align results of the model with the tokens; those of the tokens that it does not compute are `fill`."""
        if self.group is None:
            return per_input
        (first, answers, length), Pos = self.group, per_input.resolve_axis("position")
        prompts, rest = per_input["position", :first], per_input["position", first:]
        parts = rest.unflatten_axis("position", (Axis("answer", answers), Axis("position", length)))
        padded = hax.pad(parts, {"position": (0, 1)}, constant_values=fill)
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


class RlExample(TokenRows):
    """One microbatch of rollouts. All arrays but `experts` are `{batch, position}`; all are aligned with tokens.

    A row contains one or several sequences, one segment each. If sequences share a prompt, it is a separate segment,
    before theirs, which start with a copy of the prompt's last token: every token is predicted by the position before
    it. The loss of the whole batch is the plain sum over its microbatches of
    `Σ loss_weights · term(advantages, …) + Σ ce_weights · (-log π) + Σ ref_kl_weights · D`; the denominators are in the
    weights.
    """

    loss_mask: NamedArray
    """bool, True for loss tokens."""
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
    ce_weights: NamedArray | None = None
    """float32, weight of each token in the cross-entropy, on the loss mask or off it; None without cross-entropy."""
    ref_kl_weights: NamedArray | None = None
    """float32, weight of each token in the exact divergence from the teacher; None without one."""
    router_weights: NamedArray | None = None
    """float32, weight of each token in the losses of the routers of a mixture: 1 / (tokens of the batch without the
    last one of each sequence); 0 for these and padding. None for a dense model."""
    experts: NamedArray | None = None
    """uint8 or uint16 `{batch, position, layer, top_experts}`, the experts that the sampler's router chose when it read
    each token; the largest number of the type for padding and without a recorded choice. None if they are not
    collected. A shared prompt has those of one of its sequences."""

    def __check_init__(self) -> None:
        leaves = self.arrays()
        if not all(isinstance(leaf, NamedArray) for leaf in leaves.values()):
            return  # a transformed tree with other leaves, as inside jax.tree.map
        axes = self.input_ids.axes
        for name, leaf in leaves.items():
            expected = (*axes, *leaf.axes[-2:]) if name == "experts" else axes
            if leaf.axes != expected:
                raise ValueError(f"RlExample: {name} has axes {leaf.axes}, input_ids has {axes}")

    def arrays(self) -> dict[str, NamedArray]:
        """Return the arrays by name."""
        # `getattr` of an `eqx.Module` takes long.
        return {name: array for name, array in vars(self).items() if name != "group" and array is not None}

    def for_other_model(self) -> "RlExample":
        """Return the batch for another model than the policy, whose routers choose their own experts."""
        return dataclasses.replace(self, experts=None, router_weights=None)

    @property
    def scored_mask(self) -> NamedArray:
        """Tokens whose log-probability is in the loss: those on the loss mask or with a weight of cross-entropy."""
        return self.loss_mask if self.ce_weights is None else self.loss_mask | (self.ce_weights != 0)

    def to_lm_example(self) -> LmExample:
        """Convert to levanter's `LmExample`, with the loss mask at the predicting positions."""
        return lm_example(self.input_ids, to_predictors(self.loss_mask.astype(jnp.int32)), self.attention_mask)


def empty_microbatch(layout: RowLayout, optional: Collection[str] = (), model: LmConfig | None = None) -> RlExample:
    """Return a microbatch without content, with some optional arrays; `model` is that of chosen experts."""
    axes = (Axis("batch", layout.rows_per_microbatch), Axis("position", layout.tokens_per_row))
    shape = [axis.size for axis in axes]
    names = [*(set(optional) - {"experts"}), *(() if layout.group is None else ("prompt_segment_ids",))]
    dtypes = PER_TOKEN_DTYPES | {name: OPTIONAL_DTYPES[name] for name in names}
    arrays = {name: NamedArray(cast(jax.Array, np.zeros(shape, dtype)), axes) for name, dtype in dtypes.items()}
    if "experts" in optional:
        assert model is not None
        mixture = mixture_shape(model)
        assert mixture is not None
        axes = (*axes, Axis("layer", mixture.layers), Axis(TOP_EXPERTS, mixture.per_token))
        chosen = np.zeros([axis.size for axis in axes], mixture.dtype)
        arrays["experts"] = NamedArray(cast(jax.Array, chosen), axes)
    return RlExample(**arrays, group=layout.group)


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """A batch of rollouts as microbatches of one shape."""

    microbatches: tuple[RlExample, ...]
    """The microbatches, all of the same shape; at least one."""
    slots: tuple[tuple[Slot, ...], ...]
    """Per rollout, the slot of each sequence."""
    layout: RowLayout
    """Shape of a microbatch."""
    places: Int64[np.ndarray, " tokens"]
    """Index of each token of the rollouts in the positions of all microbatches."""
    num_loss_tokens: int
    """Number of loss tokens."""

    def unpack(
        self, values: Shaped[np.ndarray, "microbatches rows tokens_per_row *more"]
    ) -> Shaped[np.ndarray, "tokens *more"]:
        """Gather per-token values from all positions of the microbatches, in the order of the `RolloutBatch`.

        Raises:
            ValueError: if the shape of the array differs from that of the microbatches.
        """
        shape = (len(self.microbatches), self.layout.rows_per_microbatch, self.layout.tokens_per_row)
        if values.shape[:3] != shape:
            raise ValueError(f"unpack got an array of shape {values.shape}; this batch has {shape}")
        return values.reshape(-1, *values.shape[3:])[self.places]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including prompts, without padding. A shared prompt counts once per row."""
        slots = [*itertools.chain.from_iterable(self.slots)]
        prompts = {(slot.microbatch_index, slot.row): slot.prompt_length for slot in slots}
        return sum(slot.length for slot in slots) + sum(prompts.values())

    @property
    def num_positions(self) -> int:
        """Number of tokens including padding: microbatches · rows · tokens per row."""
        return len(self.microbatches) * self.layout.rows_per_microbatch * self.layout.tokens_per_row


def pack_batch(
    batch: RolloutBatch,
    aggregation: AggregationConfig,
    layout: RowLayout,
    *,
    pad_token_id: int,
    own_rows: OwnRows | None = None,
    ce_mask: Bool[np.ndarray, " tokens"] | None = None,
    ref_kl_mask: Bool[np.ndarray, " tokens"] | None = None,
    has_router: bool = False,
) -> PackedBatch:
    """Pack rollouts into microbatches of a fixed shape.

    The layout is the given one or an alternative of it, whichever costs least; this depends on the rollouts only. There
    is always at least one microbatch. All loss weights are 0 if there are no loss tokens.

    Args:
        batch: the rollouts, in any order.
        aggregation: aggregation of token terms; its denominators are computed here over all microbatches.
        layout: shape of a microbatch, and its alternatives.
        pad_token_id: token id of the padding.
        own_rows: returns the rows of a microbatch that this process feeds; the microbatches contain only these. Slots,
            denominators and counts are those of all rows. None for all rows.
        ce_mask: True for the tokens of the cross-entropy, on the loss mask or off it. Each has the weight
            1 / (number of these tokens in the batch), so the cross-entropy is the mean over them. None without
            cross-entropy.
        ref_kl_mask: the same for the exact divergence from the teacher.
        has_router: whether the model is a mixture of experts, whose losses need `router_weights`.

    Returns:
        The microbatches, and the slot of each sequence.

    Raises:
        ValueError: if a sequence is longer than a row, or a rollout does not fit into one microbatch; the message names
            the rollout. Also if a mask has the first token of a sequence, which is never predicted.
    """
    given = {"ce": ce_mask, "ref_kl": ref_kl_mask}
    streams = {name: mask for name, mask in given.items() if mask is not None}
    for name, mask in streams.items():
        if mask[batch.first_tokens].any():
            raise ValueError(f"{name}_mask includes the first token of a sequence, which is never predicted")
    has_groups = any(candidate.group for candidate in (layout, *layout.alternatives))
    prompts = _prompts(batch, np.logical_or.reduce([batch.loss_mask, *streams.values()])) if has_groups else None
    layout, slots = choose_layout(batch.lengths, layout, batch.ids, prompts)
    shape = (count_microbatches(slots), layout.rows_per_microbatch, layout.tokens_per_row)
    places, on_tokens = locate_tokens(batch.sequence_offsets, slots, shape)
    on_tokens |= {"input_ids": batch.input_ids, "loss_mask": batch.loss_mask}
    if layout.group is None:
        del on_tokens["prompt_segment_ids"]
    on_tokens |= {f"{name}_weights": mask / max(np.count_nonzero(mask), 1) for name, mask in streams.items()}
    on_loss = {name: getattr(batch, name)[batch.loss_mask] for name in _ON_LOSS}
    # The denominators are those of the whole batch, independent of its split into microbatches and among processes.
    on_loss["loss_weights"] = np.repeat(aggregation.loss_weights(batch.num_loss_tokens), batch.num_loss_tokens)
    padding = {"input_ids": pad_token_id, "rollout_ids": NO_ROLLOUT}
    rows = slice(None) if own_rows is None else own_rows(layout.rows_per_microbatch)

    def scatter(name: str, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        dtype, more = (PER_TOKEN_DTYPES | OPTIONAL_DTYPES).get(name, values.dtype), values.shape[1:]
        array = np.full((math.prod(shape), *more), padding.get(name, 0), dtype)
        array[indices] = values
        return array.reshape(*shape, *more)[:, rows]

    arrays = {name: scatter(name, places, values) for name, values in on_tokens.items()}
    actions = places[batch.loss_mask]
    arrays |= {name: scatter(name, actions, values) for name, values in on_loss.items()}
    if has_router:
        # A shared prompt is read once, and the last token of a sequence in some layouts only.
        is_read = np.ones(places.shape, bool)
        is_read[batch.sequence_offsets[1:] - 1] = False
        read = np.unique(places[is_read])
        arrays["router_weights"] = scatter("router_weights", read, np.array(1 / max(read.size, 1)))
    if batch.experts is not None:
        padding["experts"] = no_expert(batch.experts.dtype)
        # A sequence without the choices of a shared prompt does not remove those of the others.
        is_recorded = (batch.experts != padding["experts"]).any(axis=(1, 2))
        arrays["experts"] = scatter("experts", places[is_recorded], batch.experts[is_recorded])
    names = ("batch", "position", "layer", "top_experts")
    axes = {name: tuple(map(Axis, names, array.shape[1:])) for name, array in arrays.items()}
    microbatches = tuple(
        # On the host: `hax.named` would put every array on the default device.
        RlExample(
            **{name: NamedArray(cast(jax.Array, array[index]), axes[name]) for name, array in arrays.items()},
            group=layout.group,
        )
        for index in range(shape[0])
    )
    return PackedBatch(microbatches, slots, layout, places, int(batch.num_loss_tokens.sum()))


def _prompts(batch: RolloutBatch, scored: Bool[np.ndarray, " tokens"]) -> list[list[Prompt]]:
    """Return per sequence the tokens before the one that predicts its first scored token, or its last without one."""
    start, lengths = batch.sequence_offsets[:-1], np.diff(batch.sequence_offsets)
    scored_tokens = np.append(np.flatnonzero(scored), scored.size)
    first = np.minimum(scored_tokens[np.searchsorted(scored_tokens, start)] - start, lengths)
    tokens, size = batch.input_ids.tobytes(), batch.input_ids.itemsize
    bounds = zip((size * start).tolist(), np.maximum(first - 1, 0).tolist(), strict=True)
    prompts = (Prompt(tokens[begin : begin + size * length], length) for begin, length in bounds)
    return [[next(prompts) for _ in of_rollout] for of_rollout in batch.lengths]


def locate_tokens(
    offsets: Int64[np.ndarray, " offsets"], slots: Sequence[Sequence[Slot]], shape: tuple[int, int, int]
) -> tuple[Int64[np.ndarray, " tokens"], dict[str, np.ndarray]]:
    """Return the place of each token in microbatches of a shape, and the arrays that depend on its place.

    `offsets` are those of the sequences in the tokens, with the number of tokens as the last one. The tokens of a
    shared prompt have the same place in all sequences that share it, and belong to no rollout.
    """
    fields = itertools.chain.from_iterable(itertools.chain.from_iterable(slots))
    microbatch, row, start, _, prompt_length = np.fromiter(fields, np.int64).reshape(-1, len(Slot._fields)).T
    row_start = np.ravel_multi_index((microbatch, row, np.zeros_like(row)), shape)
    # The sequences of a row, and of a microbatch the rollouts, are numbered in their order; a prompt comes first.
    order = np.argsort(row_start + start)
    segment = np.empty_like(order)
    segment[order] = 1 + np.arange(len(order)) - np.searchsorted(row_start[order], row_start[order])
    segment += prompt_length > 0
    rollout = np.repeat(np.arange(len(slots)), [*map(len, slots)])
    distinct, number = np.unique(microbatch * len(slots) + rollout, return_inverse=True)
    number -= np.searchsorted(distinct, microbatch * len(slots))

    lengths = np.diff(offsets)

    def spread(values: Int64[np.ndarray, " sequences"]) -> Int64[np.ndarray, " tokens"]:
        return np.repeat(values, lengths)

    position = np.arange(offsets[-1]) - spread(offsets[:-1])
    in_prompt = position < spread(prompt_length)
    places = spread(row_start) + position + np.where(in_prompt, 0, spread(start - prompt_length))
    return places, {
        "position_ids": position,
        "segment_ids": np.where(in_prompt, 1, spread(segment)),
        "prompt_segment_ids": spread(np.where(prompt_length > 0, 1, segment)),
        "rollout_ids": np.where(in_prompt, NO_ROLLOUT, spread(number)),
    }
