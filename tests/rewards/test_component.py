# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import pytest

from marin_rl.rewards.component import check_component


@pytest.mark.parametrize("name", ["style", "Style_2.b-c", "0"])
@pytest.mark.parametrize("weight", [1.0, -2.5, 0.0])
def test_valid_names_and_weights(name: str, weight: float):
    check_component(name, weight)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\n", "größe", "a:b"])
def test_invalid_names_are_errors(name: str):
    with pytest.raises(ValueError, match=r"rewards: invalid name .*; use letters, digits") as raised:
        check_component(name, 1.0)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_infinite_weights_are_errors(weight: float):
    with pytest.raises(ValueError, match=f"rewards: weight of 'style' must be finite, got {weight}"):
        check_component("style", weight)
