# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import draccus
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.aggregation import (
    AggregationConfig,
    ConstantConfig,
    SequenceMeanConfig,
    SequenceSumConfig,
    TokenMeanConfig,
)

CONFIGS = [TokenMeanConfig(), SequenceMeanConfig(), SequenceSumConfig(), ConstantConfig(length=4)]


def oracle(config, terms, mask, ids):
    """The definitions, evaluated on a list of losses per rollout."""
    losses = {}
    for row in range(mask.shape[0]):
        for position in range(mask.shape[1]):
            if mask[row, position]:
                losses.setdefault(int(ids[row, position]), []).append(float(terms[row, position]))
    if not losses:
        return 0.0
    rollouts = list(losses.values())
    match config:
        case TokenMeanConfig():
            return sum(map(sum, rollouts)) / sum(map(len, rollouts))
        case SequenceMeanConfig():
            return sum(sum(r) / len(r) for r in rollouts) / len(rollouts)
        case SequenceSumConfig():
            return sum(map(sum, rollouts)) / len(rollouts)
        case ConstantConfig(length=length):
            return sum(map(sum, rollouts)) / (len(rollouts) * length)


def loss(config, terms, mask, ids):
    return float((config.loss_weights(mask, ids).astype(np.float64) * terms).sum())


@st.composite
def batches(draw):
    """Ragged batches: any mask, rollouts that span rows or share rows, and padding."""
    rows, positions = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.integers(-1, draw(st.integers(1, 6)), (rows, positions))
    if draw(st.booleans()):
        ids = np.broadcast_to(ids[:, :1], ids.shape)
    mask = (rng.random((rows, positions)) < draw(st.sampled_from([0.0, 0.3, 1.0]))) & (ids >= 0)
    return rng.normal(size=(rows, positions)), mask, ids


@pytest.mark.medium
@pytest.mark.parametrize("config", CONFIGS)
@given(batch=batches())
def test_matches_the_definition(config, batch):
    np.testing.assert_allclose(loss(config, *batch), oracle(config, *batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("config", "expected"), list(zip(CONFIGS, [2.5, 3.0, 5.0, 1.25], strict=True)))
def test_worked_example(config, expected):
    terms = np.array([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    mask = np.array([[True, True, True, False], [True, False, False, False]])
    assert loss(config, terms, mask, np.array([[0] * 4, [1] * 4])) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("config", CONFIGS)
@given(batch=batches(), seed=st.integers(0, 1000))
def test_weights_do_not_depend_on_row_order(config, batch, seed):
    _, mask, ids = batch
    order = np.random.default_rng(seed).permutation(mask.shape[0])
    np.testing.assert_array_equal(config.loss_weights(mask[order], ids[order]), config.loss_weights(mask, ids)[order])


@pytest.mark.parametrize("config", CONFIGS)
@given(batch=batches())
def test_weights_do_not_depend_on_rollout_ids(config, batch):
    _, mask, ids = batch
    renamed = np.where(ids >= 0, 1000 - 7 * ids, -1)
    np.testing.assert_array_equal(config.loss_weights(mask, renamed), config.loss_weights(mask, ids))


@pytest.mark.parametrize("config", CONFIGS)
@given(batch=batches())
def test_splitting_rollouts_over_rows_does_not_change_weights(config, batch):
    """Every token is moved to a separate row."""
    _, mask, ids = batch
    split = config.loss_weights(mask.reshape(-1, 1), ids.reshape(-1, 1))
    np.testing.assert_array_equal(split.reshape(mask.shape), config.loss_weights(mask, ids))


@pytest.mark.parametrize("config", CONFIGS)
@given(batch=batches(), wider=st.integers(0, 3), taller=st.integers(0, 3))
def test_padding_and_masked_rollouts_do_not_change_weights(config, batch, wider, taller):
    _, mask, ids = batch
    rows, positions = mask.shape
    padded_mask = np.pad(mask, ((0, taller), (0, wider)))
    # The added rows belong to further rollouts without loss tokens.
    padded_ids = np.pad(ids, ((0, taller), (0, wider)), constant_values=77)
    weights = config.loss_weights(padded_mask, padded_ids)
    np.testing.assert_array_equal(weights[:rows, :positions], config.loss_weights(mask, ids))
    assert not weights[rows:].any()
    assert not weights[:, positions:].any()


@pytest.mark.parametrize("config", CONFIGS)
@given(batch=batches(), parts=st.integers(1, 4))
def test_losses_of_microbatches_sum_to_the_loss(config, batch, parts):
    terms, mask, ids = batch
    weights = config.loss_weights(mask, ids).astype(np.float64)
    pieces = [(w * t).sum() for w, t in zip(np.array_split(weights, parts), np.array_split(terms, parts), strict=True)]
    assert sum(pieces) == pytest.approx(loss(config, *batch), abs=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_are_zero_outside_the_mask(config):
    mask = np.array([[False, True], [True, False]])
    ids = np.array([[0] * 2, [1] * 2])
    assert not config.loss_weights(mask, ids)[~mask].any()
    assert config.loss_weights(mask, ids)[mask].all()
    assert config.loss_weights(np.zeros_like(mask), ids).tolist() == [[0, 0], [0, 0]]
    assert config.loss_weights(mask, ids).dtype == np.float32


@pytest.mark.parametrize("config", CONFIGS)
def test_loss_on_padding_is_an_error(config):
    mask = np.array([[True, True], [False, True]])
    with pytest.raises(ValueError, match="row 1, position 1 has rollout id -1"):
        config.loss_weights(mask, np.array([[0] * 2, [-1] * 2]))


def test_configs_are_selected_by_type():
    names = ["token_mean", "sequence_mean", "sequence_sum"]
    assert [draccus.decode(AggregationConfig, {"type": name}) for name in names] == CONFIGS[:3]
    assert draccus.decode(AggregationConfig, {"type": "constant", "length": 4}) == CONFIGS[3]


def test_constant_needs_a_positive_length():
    with pytest.raises(ValueError, match=r"aggregation\.length is 0"):
        ConstantConfig(length=0)
