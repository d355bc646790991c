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


def test_convention_by_hand() -> None:
    # Sequence "a b c d": position 0 predicts b, position 1 predicts c, position 2 predicts d, position 3 nothing.
    tokens = named([[10, 11, 12, 13], [20, 21, 22, 23]])
    assert to_predictors(tokens).array.tolist() == [[11, 12, 13, 0], [21, 22, 23, 0]]
    # What position 0 says is about token 1, and so on; nothing speaks about token 0.
    said = named([[0.5, 0.25, 0.125, 99.0]])
    assert to_tokens(said).array.tolist() == [[0.0, 0.5, 0.25, 0.125]]


def test_loss_mask_moves_to_the_positions_that_predict_the_tokens() -> None:
    mask = named([[False, False, True, True, False]])
    assert to_predictors(mask).array.tolist() == [[False, True, True, False, False]]


def test_there_and_back_keeps_everything_but_the_first_token() -> None:
    values = named(np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32))
    back = to_tokens(to_predictors(values)).array
    assert np.array_equal(back[:, 1:], values.array[:, 1:])
    assert not back[:, 0].any()


def test_back_and_there_keeps_everything_but_the_last_position() -> None:
    values = named(np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32))
    there = to_predictors(to_tokens(values)).array
    assert np.array_equal(there[:, :-1], values.array[:, :-1])
    assert not there[:, -1].any()


@pytest.mark.parametrize("move", [to_tokens, to_predictors])
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int32, jnp.float32, jnp.bfloat16])
def test_axes_and_dtype_stay(move, dtype) -> None:
    moved = move(named(jnp.ones((2, 3), dtype)))
    assert moved.dtype == dtype
    assert [axis.name for axis in moved.axes] == ["batch", "position"]


@pytest.mark.parametrize("move", [to_tokens, to_predictors])
def test_what_falls_off_the_end_does_not_matter(move) -> None:
    values = np.ones((1, 4), np.float32)
    values[0, -1 if move is to_tokens else 0] = np.nan
    assert np.isfinite(move(named(values)).array).all()


def test_position_need_not_be_the_last_axis() -> None:
    values = hax.named(jnp.arange(6).reshape(3, 2), ("position", "batch"))
    assert to_tokens(values).rearrange(("batch", "position")).array.tolist() == [[0, 0, 2], [0, 1, 3]]
