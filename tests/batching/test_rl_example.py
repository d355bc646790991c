# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import functools
import re
from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from haliax import Axis, NamedArray
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.layers.attention import AttentionBackend
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import (
    PER_TOKEN_DTYPES,
    PackedBatch,
    RlExample,
    pack_batch,
    to_predictors,
    to_tokens,
)
from marin_rl.batching.rollout_batch import RolloutBatch, batch_rollouts, join_batches
from marin_rl.learner.logprobs import policy_activations
from marin_rl.objectives.advantage_inputs import TokenAdvantages
from marin_rl.objectives.aggregation import (
    AggregationConfig,
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
)
from marin_rl.utils.levanter_line import lm_example, seq_len

PAD = 31
VOCAB = 32
AGGREGATIONS = [TokenMeanConfig(), SequenceMeanConfig(), SequenceSumConfig(), ConstantConfig(10)]
SAMPLED = ("policy_logprobs", "reference_logprobs", "values")
"""Arrays of a rollout that are copied to the batch."""


def processed(id: str, *rows: str, seed: int = 0) -> ProcessedRollout:
    """Build a rollout from row patterns: `o` observed, `x` sampled, `.` padding; a turn is a run of `x`."""
    patterns = np.array([list(row) for row in rows]).reshape(len(rows), -1)
    mask, used = patterns == "x", patterns != "."
    rng = np.random.default_rng([seed, *id.encode()])

    def floats(low: float, high: float) -> np.ndarray:
        return np.where(mask, rng.uniform(low, high, mask.shape), 0).astype(np.float32)

    starts = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    turns = np.cumsum(starts.reshape(-1)).reshape(mask.shape) - 1
    return ProcessedRollout(
        source="test",
        id=id,
        input_ids=np.where(used, rng.integers(0, PAD, mask.shape), PAD).astype(np.int32),
        loss_mask=mask,
        segment_ids=used.astype(np.int32),
        policy_logprobs=floats(-3, -1),
        reference_logprobs=floats(-3, -1),
        turn_ids=np.where(mask, turns, -1).astype(np.int32),
        values=floats(1, 2),
    )


def with_prompt(rollout: ProcessedRollout, row: int, prompt: int) -> ProcessedRollout:
    """Replace the tokens of a sequence before its first loss token by the first tokens of one of several prompts."""
    mask = rollout.loss_mask[row]
    tokens = mask.argmax() if mask.any() else np.count_nonzero(rollout.segment_ids[row])
    ids = rollout.input_ids.copy()
    ids[row, :tokens] = np.random.default_rng([7, prompt]).integers(0, PAD, tokens)
    return dataclasses.replace(rollout, input_ids=ids)


def token_advantages(rollout: ProcessedRollout, advantage: float | None = None) -> TokenAdvantages:
    """One advantage for all action tokens, or a different one for each; value targets differ from advantages."""
    tokens = np.count_nonzero(rollout.loss_mask)
    rng = np.random.default_rng([1, *rollout.id.encode()])
    advantages = rng.normal(size=tokens) if advantage is None else np.full(tokens, float(advantage))
    return TokenAdvantages(advantages, rng.normal(size=tokens))


def batch_of(rollouts: Sequence[ProcessedRollout]) -> RolloutBatch:
    """The tokens of the rollouts, with their advantages."""
    batch = join_batches([batch_rollouts([], max_length=1), *(rollout.to_batch() for rollout in rollouts)])
    computed = [token_advantages(rollout) for rollout in rollouts]
    return batch.with_advantages([one.advantages for one in computed], [one.value_targets for one in computed])


def pack(
    rollouts: Sequence[ProcessedRollout],
    layout: RowLayout,
    aggregation: AggregationConfig = AGGREGATIONS[2],
    importance_weights: Sequence[np.ndarray] | None = None,
) -> PackedBatch:
    batch = batch_of(rollouts)
    if importance_weights is not None:
        weights = batch.from_actions("importance_weights", importance_weights)
        batch = dataclasses.replace(batch, importance_weights=weights)
    packed = pack_batch(batch, aggregation, layout, pad_token_id=PAD)
    # On the device, because parts of haliax and levanter need jax arrays outside compiled functions.
    return dataclasses.replace(packed, microbatches=jax.tree.map(jnp.asarray, packed.microbatches))


def arrays(batch: PackedBatch, name: str) -> list[np.ndarray]:
    return [np.asarray(getattr(example, name).array) for example in batch.microbatches]


def padded(batch: PackedBatch, values: np.ndarray, rollouts: Sequence[ProcessedRollout]) -> list[np.ndarray]:
    """Values of all rows, as arrays of the shape of each rollout; 0 for padding."""
    tokens = iter(batch.unpack(values))
    found = []
    for rollout in rollouts:
        array = np.zeros(rollout.segment_ids.shape, values.dtype)
        for place in zip(*np.nonzero(rollout.segment_ids), strict=True):
            array[place] = next(tokens)
        found.append(array)
    assert next(tokens, None) is None
    return found


def unpacked(batch: PackedBatch, name: str, rollouts: Sequence[ProcessedRollout]) -> list[np.ndarray]:
    """One field, unpacked to the rollouts."""
    return padded(batch, np.stack(arrays(batch, name)), rollouts)


ONE_ROW = processed("one", "ooxxx.")
TWO_ROWS = processed("two", "oxx...", "oooxxx")


Patterns = Sequence[tuple[Sequence[str], Sequence[int], int]]
"""Rows, prompts and row length of each rollout."""


@st.composite
def patterns(draw: st.DrawFn) -> Patterns:
    """Rollouts of 0 to 3 sequences of 1 to 8 tokens, with any loss mask except the first token, of any row length."""
    drawn = []
    for _ in range(draw(st.integers(0, 7))):
        rows = [f"o{row}" for row in draw(st.lists(st.text("ox", max_size=7), max_size=3))]
        length = max([1, *map(len, rows)]) + draw(st.integers(0, 2))
        drawn.append((rows, [draw(st.integers(0, 1)) for _ in rows], length))
    return drawn


def make_rollouts(drawn: Patterns) -> list[ProcessedRollout]:
    """Build the rollouts, of which many begin with the same tokens; not in a strategy, because beartype uses random."""
    rollouts = []
    for index, (rows, prompts, length) in enumerate(drawn):
        padded_rows = [row.ljust(length, ".") for row in rows]
        rollout = processed(f"r{index}", *padded_rows) if rows else empty_rollout(f"r{index}", length)
        for row, prompt in enumerate(prompts):
            rollout = with_prompt(rollout, row, prompt)
        rollouts.append(rollout)
    return rollouts


def empty_rollout(id: str, length: int) -> ProcessedRollout:
    whole = processed(id, "o" * length)
    return dataclasses.replace(
        whole,
        **{name: value[:0] for name, value in vars(whole).items() if isinstance(value, np.ndarray)},
    )


def with_groups(layout: RowLayout, group: GroupRow, rows: int) -> RowLayout:
    """Add a layout with shared prompts, which all batches use that fit."""
    groups = RowLayout(group.row_length, rows, packed=True, whole_rollouts=layout.whole_rollouts, group=group)
    return dataclasses.replace(layout, row_cost=1.0, alternatives=(groups,))


LAYOUTS = st.builds(
    lambda row_length, rows, packed, group, whole: (
        with_groups(RowLayout(row_length, rows, packed, whole_rollouts=whole), group, rows)
        if group
        else RowLayout(row_length, rows, packed)
    ),
    st.integers(8, 20),
    st.integers(3, 5),
    st.booleans(),
    st.none() | st.builds(GroupRow, st.integers(1, 5), st.integers(2, 3), st.integers(4, 9)),
    st.booleans(),
)
GROUP = [with_prompt(processed(f"g{index}", row), 0, 0) for index, row in enumerate(["oooooxx", "oooooxxx", "ooooox"])]
"""Three rollouts with a common prompt of 5 tokens."""
SHARING = with_groups(RowLayout(14, 1, packed=True), GroupRow(4, 3, 3), 1)
"""Holds `GROUP` in one row: 4 + 4 + 3 + 2 = 13 tokens instead of 8 + 7 + 6 = 21; the model computes 13 positions."""


def weight_by_hand(aggregation: AggregationConfig, rollouts: Sequence[ProcessedRollout], index: int) -> float:
    """Compute the weight of each loss token of a rollout from the formulas in objectives.md."""
    counted = [rollout for rollout in rollouts if rollout.loss_mask.any()]
    own = int(rollouts[index].loss_mask.sum())
    match aggregation:
        case TokenMeanConfig():
            return 1 / sum(int(rollout.loss_mask.sum()) for rollout in counted)
        case SequenceMeanConfig():
            return 1 / (len(counted) * own)
        case SequenceSumConfig():
            return 1 / len(counted)
        case ConstantConfig():
            return 1 / (len(counted) * aggregation.length)
    raise AssertionError(aggregation)


def lay_out_by_hand(
    rollouts, advantages, aggregation, layout, importance_weights, slots
) -> list[dict[str, np.ndarray]]:
    """Loop over tokens and sequences, starting at the start position of each slot."""
    count = 1 + max([0, *(slot.microbatch_index for own in slots for slot in own)])
    microbatches = []
    for _ in range(count):
        shape = (layout.rows_per_microbatch, layout.tokens_per_row)
        microbatches.append({name: np.zeros(shape, dtype) for name, dtype in PER_TOKEN_DTYPES.items()})
        microbatches[-1]["prompt_segment_ids"] = np.zeros(shape, np.int32)
        microbatches[-1]["input_ids"][:] = PAD
        microbatches[-1]["rollout_ids"][:] = -1
    seen = [0] * count
    for index, (rollout, own) in enumerate(zip(rollouts, slots, strict=True)):
        action = 0
        for sequence, slot in enumerate(own):
            out = microbatches[slot.microbatch_index]
            in_row = [
                other
                for others in slots
                for other in others
                if other[:2] == slot[:2]  # microbatch and row
            ]
            starts = sorted({other.start for other in in_row} | {0 for other in in_row if other.prompt_length})
            for position in range(int(rollout.segment_ids[sequence].sum())):
                shared = position < slot.prompt_length
                start = 0 if shared else slot.start - slot.prompt_length
                at, here = (slot.row, start + position), (sequence, position)
                out["input_ids"][at] = rollout.input_ids[here]
                out["segment_ids"][at] = starts.index(0 if shared else slot.start) + 1
                out["prompt_segment_ids"][at] = starts.index(0 if slot.prompt_length else slot.start) + 1
                out["position_ids"][at] = position
                out["rollout_ids"][at] = -1 if shared else seen[slot.microbatch_index]
                if rollout.loss_mask[here]:
                    out["loss_mask"][at] = True
                    out["loss_weights"][at] = weight_by_hand(aggregation, rollouts, index)
                    out["importance_weights"][at] = importance_weights[index][action]
                    out["advantages"][at] = advantages[index].advantages[action]
                    out["returns"][at] = advantages[index].value_targets[action]
                    for name in SAMPLED:
                        out[name][at] = getattr(rollout, name)[here]
                    action += 1
        for microbatch_index in {slot.microbatch_index for slot in own}:
            seen[microbatch_index] += 1
    return microbatches


@pytest.mark.medium
@settings(deadline=None)
@given(patterns(), LAYOUTS, st.sampled_from(AGGREGATIONS))
def test_equals_a_layout_by_hand(drawn: Patterns, layout: RowLayout, aggregation: AggregationConfig) -> None:
    rollouts = make_rollouts(drawn)
    weights = [np.random.default_rng(2).uniform(0.5, 2, rollout.loss_mask.sum()) for rollout in rollouts]
    batch = pack(rollouts, layout, aggregation, weights)
    advantages = [token_advantages(rollout) for rollout in rollouts]
    layout = batch.layout
    expected = lay_out_by_hand(rollouts, advantages, aggregation, layout, weights, batch.slots)
    assert len(batch.microbatches) == len(expected)
    for values, by_hand in zip(batch.microbatches, expected, strict=True):
        assert set(values.arrays()) == set(by_hand) - (set() if layout.group else {"prompt_segment_ids"})
        axes = (Axis("batch", layout.rows_per_microbatch), Axis("position", layout.tokens_per_row))
        for name, array in values.arrays().items():
            assert array.axes == axes, name
            assert array.dtype == PER_TOKEN_DTYPES.get(name, jnp.int32), name
            np.testing.assert_allclose(array.array, by_hand[name], rtol=1e-6, atol=0, err_msg=name)


@pytest.mark.medium
@settings(deadline=None)
@given(patterns(), LAYOUTS)
def test_unpacking_restores_the_arrays_of_every_rollout(drawn: Patterns, layout: RowLayout) -> None:
    rollouts = make_rollouts(drawn)
    batch = pack(rollouts, layout)
    used = [rollout.segment_ids != 0 for rollout in rollouts]
    for values, rollout, tokens in zip(unpacked(batch, "input_ids", rollouts), rollouts, used, strict=True):
        assert values.dtype == np.int32
        np.testing.assert_array_equal(values, np.where(tokens, rollout.input_ids, 0))
    for name in ("loss_mask", *SAMPLED):
        for values, rollout in zip(unpacked(batch, name, rollouts), rollouts, strict=True):
            np.testing.assert_array_equal(values, getattr(rollout, name), err_msg=name)
    for field, name in (("advantages", "advantages"), ("value_targets", "returns")):
        for values, rollout in zip(unpacked(batch, name, rollouts), rollouts, strict=True):
            expected = getattr(token_advantages(rollout), field).astype(np.float32)
            np.testing.assert_array_equal(values[rollout.loss_mask], expected, err_msg=name)
    for values, tokens in zip(unpacked(batch, "position_ids", rollouts), used, strict=True):
        np.testing.assert_array_equal(values, np.where(tokens, np.arange(tokens.shape[1]), 0))


@pytest.mark.medium
@settings(deadline=None)
@given(patterns(), LAYOUTS)
def test_padding_positions_have_the_padding_token_and_zeros(drawn: Patterns, layout: RowLayout) -> None:
    rollouts = make_rollouts(drawn)
    batch = pack(rollouts, layout)
    for example in batch.microbatches:
        padding = np.asarray(example.segment_ids.array) == 0
        for name, array in example.arrays().items():
            filler = {"input_ids": PAD, "rollout_ids": -1}.get(name, 0)
            assert (np.asarray(array.array)[padding] == filler).all(), name
    tokens = sum(np.count_nonzero(rollout.segment_ids) for rollout in rollouts)
    saved = tokens - sum(np.count_nonzero(ids) for ids in arrays(batch, "segment_ids"))
    in_rows = {slot[:2]: slot.prompt_length for own in batch.slots for slot in own}
    assert saved == sum(slot.prompt_length for own in batch.slots for slot in own) - sum(in_rows.values())
    tokens -= saved
    slots = len(batch.microbatches) * batch.layout.rows_per_microbatch * batch.layout.tokens_per_row
    assert (batch.num_tokens, batch.num_positions) == (tokens, slots)


@pytest.mark.medium
@settings(deadline=None)
@given(patterns(), LAYOUTS, LAYOUTS, st.sampled_from(AGGREGATIONS), st.randoms(use_true_random=False))
def test_token_values_do_not_depend_on_layout_or_rollout_order(
    drawn: Patterns, first, second, aggregation, random
) -> None:
    rollouts = make_rollouts(drawn)
    order = list(range(len(rollouts)))
    random.shuffle(order)
    shuffled = [rollouts[index] for index in order]
    one, other = pack(rollouts, first, aggregation), pack(shuffled, second, aggregation)
    for name in ("loss_weights", "advantages", "returns", "importance_weights", *SAMPLED):
        left, right = unpacked(one, name, rollouts), unpacked(other, name, shuffled)
        for place, index in enumerate(order):
            np.testing.assert_array_equal(right[place], left[index], err_msg=name)


@pytest.mark.medium
@settings(deadline=None)
@given(patterns(), LAYOUTS)
def test_rollout_ids_number_the_rollouts_of_a_microbatch(drawn: Patterns, layout: RowLayout) -> None:
    rollouts = make_rollouts(drawn)
    batch = pack(rollouts, layout)
    ids = unpacked(batch, "rollout_ids", rollouts)
    for index in range(len(batch.microbatches)):
        here = []
        for values, rollout, slots in zip(ids, rollouts, batch.slots, strict=True):
            rows = [row for row, slot in enumerate(slots) if slot.microbatch_index == index]
            own = values[rows][rollout.segment_ids[rows] != 0]
            if rows:
                here.append(set(own.tolist()) - {-1})  # tokens of shared prompts
        assert here == [{number} for number in range(len(here))]


@pytest.mark.medium
@given(patterns(), LAYOUTS, st.sampled_from(AGGREGATIONS), st.sets(st.integers(0, 2), min_size=1))
@settings(deadline=None, max_examples=60)
def test_own_rows_are_those_of_the_whole_batch(drawn: Patterns, layout: RowLayout, aggregation, own: set[int]) -> None:
    rollouts = make_rollouts(drawn)
    rows = np.array(sorted(own))
    whole, part = (
        pack_batch(batch_of(rollouts), aggregation, layout, pad_token_id=PAD, own_rows=own_rows)
        for own_rows in (None, lambda count: rows)
    )
    assert (part.slots, part.layout, part.num_loss_tokens) == (whole.slots, whole.layout, whole.num_loss_tokens)
    for name in whole.microbatches[0].arrays():
        for found, expected in zip(arrays(part, name), arrays(whole, name), strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected[rows], err_msg=name)


def with_experts(batch: RolloutBatch, dtype: str, unknown: float) -> RolloutBatch:
    """Add random chosen experts, which the `unknown` share of the tokens does not have."""
    rng, none, tokens = np.random.default_rng(3), np.iinfo(dtype).max, batch.input_ids.size
    experts = rng.integers(none, size=(tokens, 2, 3)).astype(dtype)
    experts[rng.random(tokens) < unknown] = none
    return dataclasses.replace(batch, experts=experts)


@pytest.mark.medium
@settings(deadline=None)
@given(
    patterns(),
    LAYOUTS,
    st.sampled_from(["uint8", "uint16"]),
    st.sampled_from([0.0, 0.4]),
    st.none() | st.sets(st.integers(0, 2), min_size=1),
)
def test_chosen_experts_have_the_place_of_their_token(
    drawn: Patterns, layout: RowLayout, dtype: str, unknown: float, own: set[int] | None
) -> None:
    rollouts = make_rollouts(drawn)
    batch, none = with_experts(batch_of(rollouts), dtype, unknown), [[np.iinfo(dtype).max] * 3] * 2
    assert batch.experts is not None
    rows = None if own is None else np.array(sorted(own))
    own_rows = None if own is None else lambda count: rows
    packed = pack_batch(batch, AGGREGATIONS[2], layout, pad_token_id=PAD, own_rows=own_rows)
    # The choices of all tokens that have a place, which are several in a shared prompt.
    choices: dict[tuple[int, int, int], list[list[list[int]]]] = {}
    following = iter(batch.experts.tolist())
    for rollout, slots in zip(rollouts, packed.slots, strict=True):
        for sequence, slot in enumerate(slots):
            for position in range(np.count_nonzero(rollout.segment_ids[sequence])):
                column = position if position < slot.prompt_length else slot.start - slot.prompt_length + position
                choices.setdefault((slot.microbatch_index, slot.row, column), []).append(next(following))
    assert next(following, None) is None
    for index, example in enumerate(packed.microbatches):
        assert example.experts is not None
        assert example.experts.dtype == dtype
        assert example.experts.axes == (*example.input_ids.axes, Axis("layer", 2), Axis("top_experts", 3))
        found = np.asarray(example.experts.array).tolist()
        for row, of_row in zip(range(packed.layout.rows_per_microbatch) if rows is None else rows, found, strict=True):
            for column, value in enumerate(of_row):
                here = choices.get((index, int(row), column), [])
                assert value in ([one for one in here if one != none] or [none])


@pytest.mark.parametrize("of_first", [True, False])
def test_a_shared_prompt_has_the_experts_of_a_sequence_that_has_them(of_first: bool) -> None:
    batch = with_experts(batch_of(GROUP), "uint8", 0.0)
    assert batch.experts is not None
    # Only the first or the last of three rollouts has those of the prompt.
    kept = 0 if of_first else 2
    experts = np.concatenate(
        [part if index == kept else np.full_like(part, 255) for index, part in enumerate(batch.split(batch.experts))]
    )
    packed = pack_batch(dataclasses.replace(batch, experts=experts), AGGREGATIONS[2], SHARING, pad_token_id=PAD)
    [example] = packed.microbatches
    assert packed.layout.group is not None
    assert example.experts is not None
    np.testing.assert_array_equal(example.experts.array[0, :4], batch.split(batch.experts)[kept][:4])


def test_experts_of_the_positions_that_the_model_computes_are_those_of_their_tokens() -> None:
    batch = batch_of(GROUP)
    positions = np.concatenate([np.arange(length) for [length] in batch.lengths]).astype(np.uint8)
    packed = pack_batch(
        dataclasses.replace(batch, experts=np.tile(positions[:, None, None], (1, 2, 3))),
        AGGREGATIONS[2],
        SHARING,
        pad_token_id=PAD,
    )
    [example] = jax.tree.map(jnp.asarray, packed.microbatches)
    read, expected, used = map(example.to_inputs, (example.experts, example.position_ids, example.segment_ids))
    assert read.axes == (*expected.axes, *example.experts.axes[2:])
    # One position less per answer than tokens.
    assert read.axis_size("position") == 13
    for layer, place in np.ndindex(2, 3):
        found = np.asarray(read.array)[..., layer, place]
        np.testing.assert_array_equal(found, np.where(used.array > 0, expected.array, 255))


def test_experts_of_an_example_have_two_more_axes() -> None:
    batch = with_experts(batch_of([ONE_ROW]), "uint16", 0.0)
    [example] = pack_batch(batch, AGGREGATIONS[2], RowLayout(6, 1, packed=True), pad_token_id=PAD).microbatches
    assert example.experts is not None
    experts = example.experts.array
    axes = example.experts.axes
    for wrong, named in ((experts[..., 0], axes[:3]), (experts[0], axes[1:]), (experts[:, :5], None)):
        named = (axes[0], axes[1].resize(5), *axes[2:]) if named is None else named
        with pytest.raises(ValueError, match="RlExample: experts has axes"):
            dataclasses.replace(example, experts=NamedArray(wrong, named))


@pytest.mark.medium
@settings(deadline=None, max_examples=60)
@given(patterns(), LAYOUTS, st.randoms(use_true_random=False), st.sets(st.integers(0, 2), min_size=1))
def test_the_cross_entropy_has_its_own_denominator_in_every_layout(drawn: Patterns, layout, random, own) -> None:
    rollouts = make_rollouts(drawn)
    batch = batch_of(rollouts)
    ce_mask = np.array([random.random() < 0.4 for _ in range(batch.loss_mask.size)], bool)
    ce_mask[batch.first_tokens] = False
    made = functools.partial(pack_batch, batch, AGGREGATIONS[2], layout, pad_token_id=PAD)
    packed = made(ce_mask=ce_mask, ref_kl_mask=batch.loss_mask)
    of_teacher = packed.unpack(np.stack(arrays(packed, "ref_kl_weights")))
    np.testing.assert_array_equal(of_teacher > 0, batch.loss_mask)
    np.testing.assert_allclose(of_teacher.sum(), float(batch.loss_mask.any()), rtol=1e-5)
    weights = packed.unpack(np.stack(arrays(packed, "ce_weights")))
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, (ce_mask / max(ce_mask.sum(), 1)).astype(np.float32))
    # No token is counted twice, or replaced by the copy of a shared prompt.
    assert sum(np.count_nonzero(weights) for weights in arrays(packed, "ce_weights")) == ce_mask.sum()
    np.testing.assert_array_equal(
        packed.unpack(np.stack([np.asarray(example.scored_mask.array) for example in packed.microbatches])),
        batch.loss_mask | ce_mask,
    )
    # The stream `rl` has the same values, although the tokens may be placed differently.
    alone = made()
    assert "ce_weights" not in alone.microbatches[0].arrays()
    for name in ("loss_weights", "advantages", "returns", *SAMPLED):
        left, right = (each.unpack(np.stack(arrays(each, name))) for each in (packed, alone))
        np.testing.assert_array_equal(left, right, err_msg=name)
    rows = np.array(sorted(own))
    for found, expected in zip(
        arrays(made(ce_mask=ce_mask, own_rows=lambda _: rows), "ce_weights"), arrays(packed, "ce_weights"), strict=True
    ):
        np.testing.assert_array_equal(found, expected[rows])


def test_a_first_token_has_no_cross_entropy() -> None:
    batch = batch_of([ONE_ROW, TWO_ROWS])
    ce_mask = np.zeros(batch.loss_mask.shape, bool)
    ce_mask[batch.sequence_offsets[2]] = True
    with pytest.raises(ValueError, match="ce_mask includes the first token of a sequence, which is never predicted"):
        pack_batch(batch, AGGREGATIONS[2], RowLayout(6, 2, packed=True), pad_token_id=PAD, ce_mask=ce_mask)


def test_observations_are_the_tokens_without_loss_between_those_with_loss() -> None:
    batch = batch_of([processed("a", "ooxoox", "oooxo."), processed("b", "oooo"), processed("c", "oxxox")])
    expected = "...oo." + "....o" + "...." + "...o."
    assert "".join("o" if is_observation else "." for is_observation in batch.observation_mask) == expected
    assert not batch.without_loss(np.array([0, 2])).observation_mask.any()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("aggregation", "one", "two"),
    [
        # 2 rollouts of 3 and 5 tokens: the second is counted once although it has two rows.
        (TokenMeanConfig(), 1 / 8, 1 / 8),
        (SequenceMeanConfig(), 1 / (2 * 3), 1 / (2 * 5)),
        (SequenceSumConfig(), 1 / 2, 1 / 2),
        (ConstantConfig(10), 1 / 20, 1 / 20),
    ],
)
def test_a_rollout_of_two_sequences_is_counted_once(aggregation, one: float, two: float, packed: bool) -> None:
    batch = pack([ONE_ROW, TWO_ROWS], RowLayout(6, 2, packed), aggregation)
    assert len(batch.microbatches) == 2  # the denominators include both
    for values, rollout, weight in zip(
        unpacked(batch, "loss_weights", (ONE_ROW, TWO_ROWS)), (ONE_ROW, TWO_ROWS), (one, two), strict=True
    ):
        np.testing.assert_allclose(values, np.where(rollout.loss_mask, weight, 0), rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_splitting_a_rollout_into_sequences_does_not_change_weights(aggregation: AggregationConfig) -> None:
    other = processed("other", "oxx...")
    both = [processed("whole", "oxoxxx"), other], [processed("split", "ox....", "oooxxx"), other]
    whole, split = (
        unpacked(pack(rollouts, RowLayout(8, 2, True), aggregation), "loss_weights", rollouts) for rollouts in both
    )
    for left, right in zip(whole, split, strict=True):
        assert left[left != 0].tolist() == right[right != 0].tolist()


@pytest.mark.parametrize(("rows", "packed"), [(1, True), (3, True), (2, False)])
def test_a_group_of_rollouts_of_different_numbers_of_turns(rows: int, packed: bool) -> None:
    # T = 3, 6, 18 and 9 action tokens; the history of the third was rewritten twice.
    group = [
        processed("1 turn", "ooxxx".ljust(30, ".")),
        processed("2 turns", "ooxxxoxxx".ljust(30, ".")),
        processed("6 turns", *(("o" * n + "xxxoxxx").ljust(30, ".") for n in (2, 9, 16))),
        processed("3 turns", "oxxxooxxxooxxx".ljust(30, ".")),
    ]
    layout = RowLayout(60 if packed else 30, rows if packed else 3, packed)
    batch = pack(group, layout, SequenceSumConfig())
    sums = [float(weights.sum()) for weights in unpacked(batch, "loss_weights", group)]
    assert sums == [3 / 4, 6 / 4, 18 / 4, 9 / 4]
    means = unpacked(pack(group, layout, SequenceMeanConfig()), "loss_weights", group)
    np.testing.assert_allclose([float(weights.sum()) for weights in means], [0.25] * 4, rtol=1e-6)
    assert len({slot.microbatch_index for slot in batch.slots[2]}) == 1
    # The n-th action token of a rollout gets the n-th advantage.
    for values, rollout in zip(unpacked(batch, "advantages", group), group, strict=True):
        in_order = token_advantages(rollout).advantages.astype(np.float32)
        assert values[rollout.loss_mask].tolist() == in_order.tolist()
        assert len(set(rollout.turn_ids[rollout.loss_mask])) == int(rollout.id[0])


WITHOUT_LOSS = processed("without", "ooo.", "oo..")


@pytest.mark.parametrize("rollouts", [[], [WITHOUT_LOSS], [empty_rollout("none", 4)]])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_loss_has_one_microbatch_with_zero_weights(rollouts, aggregation: AggregationConfig) -> None:
    batch = pack(rollouts, RowLayout(6, 2, True), aggregation)
    assert len(batch.microbatches) == 1
    for name in ("loss_mask", "loss_weights", "importance_weights", "advantages", "returns"):
        assert not getattr(batch.microbatches[0], name).array.any(), name
    tokens = sum(np.count_nonzero(rollout.segment_ids) for rollout in rollouts)
    assert (batch.num_tokens, batch.num_positions) == (tokens, 12)
    assert batch.unpack(np.ones((1, 2, 6), np.float32)).tolist() == [1.0] * tokens


def test_importance_weights_are_one_by_default() -> None:
    batch = pack([ONE_ROW, TWO_ROWS], RowLayout(8, 2, True))
    for values, rollout in zip(
        unpacked(batch, "importance_weights", (ONE_ROW, TWO_ROWS)), (ONE_ROW, TWO_ROWS), strict=True
    ):
        np.testing.assert_array_equal(values, rollout.loss_mask.astype(np.float32))


def test_oversized_rollouts_raise_an_error_that_names_the_rollout() -> None:
    with pytest.raises(ValueError, match=r"rollout two has a sequence of 6 tokens, .* rows of 5 positions"):
        pack([ONE_ROW, TWO_ROWS], RowLayout(5, 2, True))
    with pytest.raises(ValueError, match="rollout two has 2 sequences of 9 tokens in total, which need 2 rows"):
        pack([ONE_ROW, TWO_ROWS], RowLayout(6, 1, True))


def test_each_action_token_needs_an_advantage() -> None:
    batch = batch_of([ONE_ROW, TWO_ROWS])
    with pytest.raises(ValueError, match="2 rollouts but advantages for 1; pass one array per rollout"):
        batch.with_advantages([1.0])
    with pytest.raises(ValueError, match=re.escape("rollout one has 3 loss tokens, but its advantages")):
        batch.with_advantages([np.zeros(5), 1.0])
    with pytest.raises(ValueError, match=re.escape("but its returns have shape (2,)")):
        batch.with_advantages([1.0, 1.0], [0.0, np.zeros(2)])


def test_an_advantage_of_a_rollout_is_that_of_all_its_action_tokens() -> None:
    batch = batch_of([ONE_ROW, TWO_ROWS])
    whole = batch.with_advantages([0.5, -2.0])
    of_one, of_two = batch.num_loss_tokens
    per_token = batch.with_advantages([np.full(of_one, 0.5), np.full(of_two, -2.0)])
    np.testing.assert_array_equal(whole.advantages, per_token.advantages)
    assert set(whole.advantages[whole.loss_mask]) == {0.5, -2.0}
    np.testing.assert_array_equal(whole.returns, batch.returns)


@pytest.mark.parametrize("shape", [(1, 2, 6), (2, 6, 2), (4, 6)])
def test_unpack_requires_all_rows(monkeypatch, shape: tuple[int, ...]) -> None:
    # Disable the type checks of the tests, which would raise first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    batch = pack([ONE_ROW, TWO_ROWS], RowLayout(6, 2, True))
    with pytest.raises(ValueError, match=re.escape(f"an array of shape {shape}; this batch has (2, 2, 6)")):
        batch.unpack(np.zeros(shape))


def test_conversion_to_lm_example() -> None:
    batch = pack([ONE_ROW, processed("short", "ox.")], RowLayout(8, 2, True))
    example = batch.microbatches[0].to_lm_example()
    mask = [
        [0, 1, 1, 1, 0, 1, 0, 0],  # ooxxx ox: tokens 2, 3, 4 and 6 are predicted at 1, 2, 3 and 5
        [0] * 8,
    ]
    expected = lm_example(example.tokens, hax.named(jnp.array(mask), example.tokens.axes), example.attn_mask)
    assert eqx.tree_equal(example, expected)
    assert example.tokens.array[0, 5:].tolist() == [*processed("short", "ox.").input_ids[0, :2], PAD]


def test_attention_is_causal_within_each_segment() -> None:
    example = pack([processed("a", "oxx"), processed("b", "ox")], RowLayout(6, 1, True)).microbatches[0]
    allowed = example.attention_mask.materialize(hax.Axis("position", 6), hax.Axis("key_position", 6))
    assert allowed is not None
    segment = [1, 1, 1, 2, 2, 0]
    expected = [[key <= query and segment[key] == segment[query] for key in range(6)] for query in range(6)]
    assert allowed["batch", 0].rearrange(("position", "key_position")).array.tolist() == expected


FEW_LAYOUTS = st.sampled_from(
    [
        RowLayout(9, 4, packed=False),
        RowLayout(13, 3, packed=True),
        with_groups(RowLayout(13, 3, packed=True), GroupRow(3, 2, 6), 3),
        with_groups(RowLayout(13, 3, packed=True, whole_rollouts=True), GroupRow(4, 3, 4), 3),
    ]
)
"""Few shapes, because each takes a second to compile."""


@pytest.mark.medium
@settings(deadline=None)
@given(patterns(), FEW_LAYOUTS)
def test_tokens_see_the_tokens_before_them_in_their_sequence(drawn: Patterns, layout: RowLayout) -> None:
    rollouts = make_rollouts(drawn)
    batch = pack(rollouts, layout)
    layout = batch.layout
    Pos, KeyPos = hax.Axis("position", layout.row_length), hax.Axis("key_position", layout.row_length)
    axes = (Axis("batch", layout.rows_per_microbatch), Pos, KeyPos)
    tokens = layout.tokens_per_row
    expected = np.zeros((len(batch.microbatches), layout.rows_per_microbatch, tokens, tokens), bool)
    # The model does not compute the last token of the part of an answer.
    group = layout.group
    lasts = [] if group is None else range(group.prompt_length + group.answer_length, tokens, group.answer_length + 1)
    computed = [position for position in range(tokens) if position not in lasts]
    for slot in (slot for own in batch.slots for slot in own):
        path = [*range(slot.prompt_length), *range(slot.start, slot.start + slot.length)]
        for place, query in enumerate(path):
            expected[slot.microbatch_index, slot.row, query, path[: place + 1]] = True
    for example, by_hand in zip(batch.microbatches, expected, strict=True):
        allowed = example.attention_mask.materialize(Pos, KeyPos)
        assert allowed is not None
        used = np.asarray(example.segment_ids.array)[:, computed] > 0
        seen = by_hand[:, computed][:, :, computed]
        np.testing.assert_array_equal(np.asarray(allowed.rearrange(axes).array)[used], seen[used])
        # Attention in blocks materializes parts of the mask.
        part = example.attention_mask.materialize(Pos, KeyPos, hax.dslice(2, 4), hax.dslice(1, 3))
        assert part is not None
        np.testing.assert_array_equal(
            np.asarray(part.rearrange(("batch", "position", "key_position")).array),
            np.asarray(allowed.rearrange(axes).array)[:, 2:6, 1:4],
        )


def test_rollouts_with_a_common_prompt_share_it_in_fewer_microbatches() -> None:
    batch = pack(GROUP, SHARING)
    (example,) = batch.microbatches
    prompt = GROUP[0].input_ids[0, :5]
    assert example.input_ids.array[0].tolist() == [
        *prompt[:4],
        *(prompt[4], *GROUP[1].input_ids[0, 5:8]),
        *(prompt[4], *GROUP[0].input_ids[0, 5:7], PAD),
        *(prompt[4], *GROUP[2].input_ids[0, 5:6], PAD, PAD),
    ]
    assert example.position_ids.array[0].tolist() == [0, 1, 2, 3, *(4, 5, 6, 7), *(4, 5, 6, 0), *(4, 5, 0, 0)]
    assert example.segment_ids.array[0].tolist() == [1, 1, 1, 1, *(2, 2, 2, 2), *(3, 3, 3, 0), *(4, 4, 0, 0)]
    assert example.rollout_ids.array[0].tolist() == [-1] * 4 + [1] * 4 + [0, 0, 0, -1] + [2, 2, -1, -1]
    assert arrays(batch, "prompt_segment_ids")[0].tolist() == [[1] * 11 + [0, 1, 1, 0, 0]]
    assert example.loss_mask.array[0].tolist() == [c == "x" for c in "oooo" + "oxxx" + "oxx." + "ox.."]
    assert (batch.num_tokens, batch.num_loss_tokens, batch.num_positions) == (13, 6, 16)


def test_a_rollout_without_loss_shares_no_prompt() -> None:
    """Its prompt is unknown, so it takes a row of its own."""
    rollouts = [*GROUP, with_prompt(processed("none", "ooooooo"), 0, 0)]
    batch = pack(rollouts, SHARING)
    assert [slot.prompt_length for (slot,) in batch.slots] == [4, 4, 4, 4]
    assert [(slot.microbatch_index, slot.row) for (slot,) in batch.slots] == [(0, 0)] * 3 + [(1, 0)]
    assert batch.microbatches[1].loss_weights.array.sum() == 0


def test_a_window_in_rows_with_shared_prompts_is_not_ignored() -> None:
    """Only the learner computes it, from the positions in the sequences."""
    mask = pack(GROUP, SHARING).microbatches[0].attention_mask
    windowed = mask.with_sliding_window(2)
    assert windowed.sliding_window == 2
    Position = windowed.position_ids.resolve_axis("position")
    with pytest.raises(NotImplementedError, match="attention_layers"):
        windowed.materialize(Position, Position.alias("key_position"))


def test_packed_arrays_stay_on_the_host() -> None:
    packed = pack_batch(batch_of([ONE_ROW]), AGGREGATIONS[2], PACKED, pad_token_id=PAD)
    assert all(isinstance(array, np.ndarray) for array in jax.tree.leaves(packed.microbatches))


def test_different_axes_raise_an_error_that_names_the_array() -> None:
    example = pack([ONE_ROW], RowLayout(6, 2, True)).microbatches[0]
    with pytest.raises(ValueError, match="advantages has axes"):
        dataclasses.replace(example, advantages=hax.named(jnp.zeros((2, 2)), ("batch", "position")))


def test_rl_example_is_a_pytree() -> None:
    example = pack([ONE_ROW], RowLayout(6, 2, True)).microbatches[0]
    assert jax.tree.structure(jax.tree.map(lambda leaf: leaf.shape, example)) is not None
    doubled = jax.jit(lambda example: jax.tree.map(lambda leaf: leaf * 2, example))(example)
    assert float(doubled.importance_weights.array.sum()) == 6.0


SMALL = {"hidden_dim": 16, "num_layers": 1, "num_heads": 4, "attn_backend": AttentionBackend.VANILLA}
MODELS: dict[str, LmConfig] = {
    "llama": LlamaConfig(
        **seq_len(32),
        intermediate_dim=32,
        num_kv_heads=2,
        initializer_range=0.3,
        gradient_checkpointing=False,
        **SMALL,
    ),
    # Rotary positions are relative, so llama does not depend on where positions start. GPT-2 does.
    "gpt2": Gpt2Config(
        **seq_len(32),
        initializer_range=0.3,
        embed_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        gradient_checkpointing=False,
        **SMALL,
    ),
}
ROLLOUTS = [
    processed("a", "ooxxxxoxx"),
    processed("b", "oxxx...", "oooooxx"),
    processed("c", "ooooxxxx"),
    processed("d", "ox"),
    processed("e", "ooxx"),
]
PACKED = RowLayout(16, 3, packed=True)


@pytest.fixture(scope="module", params=list(MODELS))
def model(request) -> LmHeadModel:
    config = MODELS[request.param]
    return config.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))


def activations_of(model: LmHeadModel, example: RlExample) -> np.ndarray:
    """`[rows, row_length, embed]`."""
    values = model.activations(example.input_ids, example.attention_mask, pos_ids=example.position_ids, key=None)
    return np.asarray(values.rearrange(("batch", "position", "embed")).array)


@pytest.mark.medium
def test_packed_and_unpacked_rows_have_the_same_activations(model: LmHeadModel) -> None:
    packed = pack(ROLLOUTS, PACKED)
    unpacked_batch = pack(ROLLOUTS, RowLayout(9, 2, packed=False))
    assert any(len({slot.row for slot in own}) for own in packed.slots)
    assert max(ids.max() for ids in arrays(packed, "segment_ids")) >= 3
    packed_activations = [activations_of(model, example) for example in packed.microbatches]
    unpacked_activations = [activations_of(model, example) for example in unpacked_batch.microbatches]
    for channel in range(16):
        left = packed.unpack(np.stack([values[..., channel] for values in packed_activations]))
        right = unpacked_batch.unpack(np.stack([values[..., channel] for values in unpacked_activations]))
        np.testing.assert_allclose(left, right, atol=1e-5)
    assert np.std(packed_activations[0]) > 0.1


def activations_and_gradient(
    model: LmHeadModel, batch: PackedBatch, rollouts: Sequence[ProcessedRollout]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the activations that predict a token of each rollout, and the gradient of a weighted mean of them."""
    weights = hax.random.normal(jax.random.PRNGKey(1), model.Embed) / batch.num_loss_tokens

    @eqx.filter_jit
    @functools.partial(eqx.filter_value_and_grad, has_aux=True)
    def total(model: LmHeadModel, example: RlExample) -> tuple[jax.Array, jax.Array]:
        values = policy_activations(model, example)
        weighted = hax.dot(values, weights, axis=model.Embed) * to_predictors(example.advantages)
        return hax.sum(weighted).scalar(), values.rearrange(("embed", "batch", "position")).array

    results = [total(model, example) for example in batch.microbatches]
    channels = zip(*(np.asarray(values) for (_, values), _ in results), strict=True)
    per_channel = [padded(batch, np.stack(channel), rollouts) for channel in channels]
    gradients = [jax.tree.leaves(gradient) for _, gradient in results]
    predicts = [np.pad(rollout.segment_ids[:, 1:], ((0, 0), (0, 1))) for rollout in rollouts]
    return [np.stack(own) * mask for own, mask in zip(zip(*per_channel, strict=True), predicts, strict=True)], [
        np.sum(parts, axis=0) for parts in zip(*gradients, strict=True)
    ]


IN_BLOCKS = dataclasses.replace(MODELS["llama"], attn_backend=AttentionBackend.JAX_FLASH, flash_attention_block_size=4)


@pytest.mark.medium
@pytest.mark.parametrize("config", [*MODELS.values(), IN_BLOCKS], ids=[*MODELS, "llama in blocks"])
def test_shared_prompts_do_not_change_activations_and_gradient(config: LmConfig) -> None:
    """The groups have different or equal prompts, and rollouts without loss, of several turns and of one token."""
    model = config.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))
    rows = ["oooooxxoox", "oooooxxx", "ooooo", "oooooxxxxxx", "ooooox", "oxx", "oooooxx", "oooooxx"]
    rollouts = [with_prompt(processed(f"r{i}", row), 0, prompt) for prompt in (0, 1, 0) for i, row in enumerate(rows)]
    shared = pack(rollouts, with_groups(RowLayout(16, 2, packed=True), GroupRow(4, 3, 6), 2))
    assert sum(slot.prompt_length > 0 for own in shared.slots for slot in own) > 9
    alone = pack(rollouts, RowLayout(12, 2, packed=False))
    found, expected = (activations_and_gradient(model, batch, rollouts) for batch in (shared, alone))
    for one, other in zip(found, expected, strict=True):
        for left, right in zip(one, other, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    assert max(np.abs(leaf).max() for leaf in found[1]) > 0.1


@pytest.mark.medium
def test_segments_do_not_attend_to_each_other(model: LmHeadModel) -> None:
    example = pack(ROLLOUTS, PACKED).microbatches[0]
    segments, ids = np.asarray(example.segment_ids.array), np.asarray(example.input_ids.array)
    before = activations_of(model, example)
    for row, segment in {(row, int(segment)) for (row, _), segment in np.ndenumerate(segments)}:
        here = (segments == segment) & (np.arange(PACKED.rows_per_microbatch) == row)[:, None]
        changed = hax.named(np.where(here, (ids + 7) % VOCAB, ids).astype(np.int32), example.input_ids.axes)
        after = activations_of(model, dataclasses.replace(example, input_ids=changed))
        np.testing.assert_array_equal(after[~here], before[~here])
        assert (np.abs(after[here] - before[here]).max(axis=-1) > 1e-3).all()


@pytest.mark.medium
def test_wrong_position_ids_change_the_activations() -> None:
    model = MODELS["gpt2"].build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))
    example = pack(ROLLOUTS, PACKED).microbatches[0]
    running = np.broadcast_to(np.arange(PACKED.row_length, dtype=np.int32), example.segment_ids.array.shape)
    wrong = dataclasses.replace(example, position_ids=hax.named(running, example.input_ids.axes))
    later = np.asarray(example.segment_ids.array) > 1
    difference = np.abs(activations_of(model, wrong) - activations_of(model, example)).max(axis=-1)
    assert difference[later].min() > 1e-2


def named(values: object) -> NamedArray:
    return hax.named(jnp.asarray(values), ("batch", "position"))


def test_shift_convention() -> None:
    # Sequence "a b c d": position 0 predicts b, position 1 predicts c, position 2 predicts d, position 3 nothing.
    tokens = named([[10, 11, 12, 13], [20, 21, 22, 23]])
    assert to_predictors(tokens).array.tolist() == [[11, 12, 13, 0], [21, 22, 23, 0]]
    # Position 0 predicts token 1, and so on; no position predicts token 0.
    outputs = named([[0.5, 0.25, 0.125, 99.0]])
    assert to_tokens(outputs).array.tolist() == [[0.0, 0.5, 0.25, 0.125]]


def test_loss_mask_is_shifted_to_predicting_positions() -> None:
    mask = named([[False, False, True, True, False]])
    assert to_predictors(mask).array.tolist() == [[False, True, True, False, False]]


def test_round_trip_from_tokens_loses_only_the_first_token() -> None:
    values = named(np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32))
    shifted = to_tokens(to_predictors(values)).array
    assert np.array_equal(shifted[:, 1:], values.array[:, 1:])
    assert not shifted[:, 0].any()


def test_round_trip_from_predictors_loses_only_the_last_position() -> None:
    values = named(np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32))
    shifted = to_predictors(to_tokens(values)).array
    assert np.array_equal(shifted[:, :-1], values.array[:, :-1])
    assert not shifted[:, -1].any()


@pytest.mark.parametrize("shift", [to_tokens, to_predictors])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32, jnp.bfloat16])
def test_axes_and_dtype_are_kept(shift, dtype) -> None:
    shifted = shift(named(jnp.ones((2, 3), dtype)))
    assert shifted.dtype == dtype
    assert [axis.name for axis in shifted.axes] == ["batch", "position"]


@pytest.mark.parametrize("shift", [to_tokens, to_predictors])
def test_dropped_values_do_not_affect_the_result(shift) -> None:
    values = np.ones((1, 4), np.float32)
    values[0, -1 if shift is to_tokens else 0] = np.nan
    assert np.isfinite(shift(named(values)).array).all()


def test_position_may_be_any_axis() -> None:
    values = hax.named(jnp.arange(6).reshape(3, 2), ("position", "batch"))
    assert to_tokens(values).rearrange(("batch", "position")).array.tolist() == [[0, 0, 2], [0, 1, 3]]
