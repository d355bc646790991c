# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from types import ModuleType

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.lm_model import LmHeadModel

from marin_rl.learner.base_weights import OtherBaseError, check_base, fingerprint


def with_up_proj(model: LmHeadModel, array: np.ndarray | jax.Array) -> LmHeadModel:
    def get(model):
        return model.transformer.layers.stacked.mlp.up_proj.weight.array

    return eqx.tree_at(get, model, jnp.asarray(array))


@pytest.mark.medium
def test_a_fingerprint_changes_with_any_bit_place_and_type(tiny: ModuleType, model: LmHeadModel) -> None:
    trainer = tiny.make_trainer()
    weight = np.array(model.transformer.layers.stacked.mlp.up_proj.weight.array)
    one_bit, swapped, rows = weight.copy(), weight.copy(), weight.copy()
    one_bit.view(np.uint32)[0, 3, 5] ^= 1
    swapped[0, 3, 5], swapped[0, 4, 5] = weight[0, 4, 5], weight[0, 3, 5]
    rows[0, :2] = weight[0, 1::-1]
    others = [with_up_proj(model, array) for array in (one_bit, swapped, rows)]
    others.append(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model))
    prints = [fingerprint(each, trainer) for each in (model, *others)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(with_up_proj(model, weight.copy()), trainer) == prints[0]
    assert all(len(each) == 64 for each in prints)


def test_another_base_is_refused_by_name() -> None:
    check_base("", "", "None")
    check_base("ab", "ab", "models/base")
    with pytest.raises(OtherBaseError, match=r"initialize_from 'models/base' has other weights \(fingerprint cd\)"):
        check_base("ab", "cd", "models/base")
