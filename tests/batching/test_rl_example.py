# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, BatchShape, make_batch
from marin_rl.objectives.aggregation import (
    AggregationConfig,
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
)

POSITIONS = 6
PAD = 99


def processed(id: str, *rows: str) -> ProcessedRollout:
    """A rollout from pictures of its rows: `o` observed, `x` sampled, `.` padding."""
    pictures = np.array([list(row) for row in rows]).reshape(len(rows), POSITIONS)
    mask, used = pictures == "x", pictures != "."
    tokens = np.arange(pictures.size).reshape(pictures.shape) + 1
    return ProcessedRollout(
        source="test",
        id=id,
        input_ids=np.where(used, tokens, PAD).astype(np.int32),
        loss_mask=mask,
        segment_ids=used.astype(np.int32),
        policy_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        reference_logprobs=np.where(mask, -0.25, 0).astype(np.float32),
        returns=np.ones(len(rows), np.float32),
    )


ONE_ROW = processed("one", "ooxxx.")
TWO_ROWS = processed("two", "oxx...", "oooxxx")
SHAPE = BatchShape(rows=5, positions=POSITIONS)


def test_the_shape_is_fixed_and_missing_rows_are_padding() -> None:
    batch = make_batch([ONE_ROW, TWO_ROWS], [2.0, -1.0], SequenceSumConfig(), SHAPE)
    for name, dtype in PER_TOKEN_DTYPES.items():
        array = getattr(batch, name)
        assert array.axes == (hax.Axis("batch", 5), hax.Axis("position", POSITIONS)), name
        assert array.dtype == dtype, name
        if name != "input_ids":
            assert not array.array[3:].any(), name
    assert batch.input_ids.array[:1].tolist() == ONE_ROW.input_ids.tolist()
    assert batch.input_ids.array[1:3].tolist() == TWO_ROWS.input_ids.tolist()
    assert batch.segment_ids.array[1:3].tolist() == TWO_ROWS.segment_ids.tolist()


def test_no_rollouts_make_a_batch_of_padding_without_loss() -> None:
    batch = make_batch([], [], TokenMeanConfig(), SHAPE)
    assert batch.input_ids.array.shape == (5, POSITIONS)
    assert not batch.loss_weights.array.any()
    assert not batch.segment_ids.array.any()


def test_nothing_stands_off_the_loss_mask() -> None:
    batch = make_batch([ONE_ROW, TWO_ROWS], [2.0, -1.0], SequenceSumConfig(), SHAPE)
    off = ~np.asarray(batch.loss_mask.array)
    for name in ("loss_weights", "advantages", "policy_logprobs", "reference_logprobs"):
        values = np.asarray(getattr(batch, name).array)
        assert not values[off].any(), name
        assert values[~off].all(), name


def test_an_advantage_is_spread_over_all_rows_of_its_rollout_and_no_other() -> None:
    batch = make_batch([ONE_ROW, TWO_ROWS], [2.0, -1.0], SequenceSumConfig(), SHAPE)
    assert batch.advantages.array.tolist() == [
        [0, 0, 2, 2, 2, 0],
        [0, -1, -1, 0, 0, 0],
        [0, 0, 0, -1, -1, -1],
        [0] * 6,
        [0] * 6,
    ]


@pytest.mark.parametrize(
    ("aggregation", "one", "two"),
    [
        # 2 rollouts, of 3 and 5 tokens: the second counts once although it has two rows.
        (TokenMeanConfig(), 1 / 8, 1 / 8),
        (SequenceMeanConfig(), 1 / (2 * 3), 1 / (2 * 5)),
        (SequenceSumConfig(), 1 / 2, 1 / 2),
        (ConstantConfig(10), 1 / 20, 1 / 20),
    ],
)
def test_a_rollout_of_two_rows_counts_once(aggregation: AggregationConfig, one: float, two: float) -> None:
    batch = make_batch([ONE_ROW, TWO_ROWS], [2.0, -1.0], aggregation, SHAPE)
    weights, mask = np.asarray(batch.loss_weights.array), np.asarray(batch.loss_mask.array)
    np.testing.assert_allclose(weights[0][mask[0]], one, rtol=1e-6)
    np.testing.assert_allclose(weights[1:3][mask[1:3]], two, rtol=1e-6)


@pytest.mark.parametrize("aggregation", [TokenMeanConfig(), SequenceMeanConfig(), SequenceSumConfig()])
def test_splitting_a_rollout_into_rows_changes_no_weight(aggregation: AggregationConfig) -> None:
    together = processed("whole", "oxoxxx")
    apart = processed("split", "ox....", "oooxxx")
    other = processed("other", "oxx...")
    whole = make_batch([together, other], [1.0, 1.0], aggregation, SHAPE)
    split = make_batch([apart, other], [1.0, 1.0], aggregation, SHAPE)
    assert sorted(np.ravel(whole.loss_weights.array)) == sorted(np.ravel(split.loss_weights.array))


def test_padding_rows_and_order_change_no_weight() -> None:
    small = make_batch([ONE_ROW, TWO_ROWS], [2.0, -1.0], SequenceMeanConfig(), BatchShape(3, POSITIONS))
    large = make_batch([TWO_ROWS, ONE_ROW], [-1.0, 2.0], SequenceMeanConfig(), BatchShape(8, POSITIONS))
    assert large.loss_weights.array[2].tolist() == small.loss_weights.array[0].tolist()
    assert large.loss_weights.array[:2].tolist() == small.loss_weights.array[1:].tolist()
    assert large.advantages.array[2].tolist() == small.advantages.array[0].tolist()


def test_too_many_rows_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="2 rollouts need 3 rows, the batch has 2"):
        make_batch([ONE_ROW, TWO_ROWS], [1.0, 1.0], SequenceSumConfig(), BatchShape(2, POSITIONS))


def test_another_row_length_is_an_error_that_names_the_rollout() -> None:
    with pytest.raises(ValueError, match="rollout one has rows of 6 positions, the batch has 7"):
        make_batch([ONE_ROW], [1.0], SequenceSumConfig(), BatchShape(2, 7))


def test_each_rollout_needs_an_advantage() -> None:
    with pytest.raises(ValueError, match="2 rollouts but 1 advantages"):
        make_batch([ONE_ROW, TWO_ROWS], [1.0], SequenceSumConfig(), SHAPE)


def test_as_levanter_takes_it() -> None:
    example = make_batch([ONE_ROW, TWO_ROWS], [2.0, -1.0], SequenceSumConfig(), SHAPE).to_lm_example()
    assert example.loss_mask.array.tolist() == [
        [0, 1, 1, 1, 0, 0],  # ooxxx.: tokens 2, 3, 4 are predicted at 1, 2, 3
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0] * 6,
        [0] * 6,
    ]
    assert example.tokens.array[0].tolist() == [1, 2, 3, 4, 5, PAD]


def test_attention_stays_in_its_segment_and_looks_back_only() -> None:
    batch = make_batch([processed("short", "oxx...")], [1.0], SequenceSumConfig(), BatchShape(1, POSITIONS))
    allowed = batch.attention_mask.materialize(hax.Axis("position", POSITIONS), hax.Axis("key_position", POSITIONS))
    assert allowed is not None
    expected = [[key <= query and (key < 3) == (query < 3) for key in range(POSITIONS)] for query in range(POSITIONS)]
    assert allowed["batch", 0].rearrange(("position", "key_position")).array.tolist() == expected


def test_axes_that_differ_are_refused_by_name() -> None:
    batch = make_batch([ONE_ROW], [1.0], SequenceSumConfig(), SHAPE)
    with pytest.raises(ValueError, match="advantages has axes"):
        dataclasses.replace(batch, advantages=hax.named(jnp.zeros((2, 2)), ("batch", "position")))


def test_the_batch_passes_through_jax_transformations() -> None:
    batch = make_batch([ONE_ROW], [1.0], SequenceSumConfig(), SHAPE)
    assert jax.tree.structure(jax.tree.map(lambda leaf: leaf.shape, batch)) is not None
    doubled = jax.jit(lambda example: jax.tree.map(lambda leaf: leaf * 2, example))(batch)
    assert float(doubled.advantages.array.sum()) == 6.0
