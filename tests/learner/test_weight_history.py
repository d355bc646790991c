# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The history of weights: unchanged, limited in number, and restored to the device with their sharding."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.learner.weight_history import WeightHistory


class Policy(eqx.Module):
    weight: hax.NamedArray
    bias: jax.Array
    name: str = eqx.field(static=True)


def policy(value: float) -> Policy:
    return Policy(hax.named(jnp.full((2, 3), value), ("a", "b")), jnp.array([value, -value]), "tiny")


@jax.jit
def plus_one(arrays: list[jax.Array]) -> list[jax.Array]:
    return [array + 1 for array in arrays]


def test_kept_weights_outlive_their_donation() -> None:
    history, kept = WeightHistory(2), policy(3.0)
    history.keep(kept, 7)
    [array.delete() for array in jax.tree.leaves(kept)]
    found = history.get(7)
    assert found.name == "tiny"
    np.testing.assert_array_equal(found.weight.array, np.full((2, 3), 3.0))
    np.testing.assert_array_equal(found.bias, [3.0, -3.0])
    assert found.weight.axes == policy(0.0).weight.axes
    # Programs accept the restored weights without another transfer.
    assert {array.sharding for array in jax.tree.leaves(found)} == {policy(0.0).bias.sharding}
    np.testing.assert_array_equal(plus_one(jax.tree.leaves(found))[1], [4.0, -2.0])


def test_new_version_evicts_the_oldest() -> None:
    history = WeightHistory(2)
    for version in (4, 5, 9):
        history.keep(policy(version), version)
    assert [version in history for version in (4, 5, 9)] == [False, True, True]
    with pytest.raises(KeyError, match=r"weights of version 4 are not kept; kept versions are \[5, 9\]"):
        history.get(4)
    assert float(history.get(5).bias[0]) == 5.0
    history.keep(policy(50.0), 9)
    assert float(history.get(9).bias[0]) == 50.0
    assert 5 in history


def test_history_of_zero_versions_is_rejected() -> None:
    with pytest.raises(ValueError, match="versions must be at least 1, got 0"):
        WeightHistory(0)
