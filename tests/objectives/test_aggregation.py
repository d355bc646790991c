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


def oracle(config, losses):
    """The definitions, evaluated on a list of losses per rollout."""
    rollouts = [terms for terms in losses if terms]
    if not rollouts:
        return 0.0
    match config:
        case TokenMeanConfig():
            return sum(map(sum, rollouts)) / sum(map(len, rollouts))
        case SequenceMeanConfig():
            return sum(sum(r) / len(r) for r in rollouts) / len(rollouts)
        case SequenceSumConfig():
            return sum(map(sum, rollouts)) / len(rollouts)
        case ConstantConfig(length=length):
            return sum(map(sum, rollouts)) / (len(rollouts) * length)


def weights_of(config, losses):
    weights = config.loss_weights(np.array([*map(len, losses)], np.int64))
    assert weights.dtype == np.float64
    assert np.isfinite(weights).all()
    return weights.tolist()


def loss(config, losses):
    return sum(
        weight * term for weight, terms in zip(weights_of(config, losses), losses, strict=True) for term in terms
    )


batches = st.lists(st.lists(st.floats(-3, 3), max_size=6), max_size=6)
"""Losses of the loss tokens of each rollout, of which some have none."""


@pytest.mark.parametrize("config", CONFIGS)
@given(losses=batches)
def test_matches_the_definition(config, losses):
    np.testing.assert_allclose(loss(config, losses), oracle(config, losses), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("config", "expected"), list(zip(CONFIGS, [2.5, 3.0, 5.0, 1.25], strict=True)))
def test_worked_example(config, expected):
    assert loss(config, [[1.0, 2.0, 3.0], [4.0]]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
@given(losses=batches, random=st.randoms(use_true_random=False))
def test_weights_do_not_depend_on_the_order_of_rollouts(config, losses, random):
    order = random.sample(range(len(losses)), len(losses))
    weights = weights_of(config, losses)
    assert weights_of(config, [losses[index] for index in order]) == [weights[index] for index in order]


@pytest.mark.parametrize("config", CONFIGS)
@given(losses=batches, more=st.integers(1, 3))
def test_rollouts_without_loss_tokens_do_not_change_weights(config, losses, more):
    assert weights_of(config, [*losses, *([[]] * more)])[: len(losses)] == weights_of(config, losses)


def test_configs_are_selected_by_type():
    names = ["token_mean", "sequence_mean", "sequence_sum"]
    assert [draccus.decode(AggregationConfig, {"type": name}) for name in names] == CONFIGS[:3]
    assert draccus.decode(AggregationConfig, {"type": "constant", "length": 4}) == CONFIGS[3]
