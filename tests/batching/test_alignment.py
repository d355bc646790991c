# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from marin_rl.batching.alignment import to_predictors, to_tokens


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
