# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.dispersion import centered, sample_variance, standardized

numbers = st.lists(st.floats(-100, 100).map(lambda x: round(x, 4)), min_size=1, max_size=9)


@given(numbers)
def test_match_the_formulas(values):
    n = len(values)
    mean = sum(values) / n
    variance = sum((x - mean) ** 2 for x in values) / (n - 1) if n > 1 else 0.0
    array = np.array(values)
    np.testing.assert_allclose(centered(array), [x - mean for x in values], atol=1e-11)
    assert sample_variance(array) == pytest.approx(variance, rel=1e-9, abs=1e-18)
    expected = [(x - mean) / (math.sqrt(variance) + 1e-6) for x in values]
    np.testing.assert_allclose(standardized(array), expected, rtol=1e-6, atol=1e-6)


@given(value=st.floats(-1e9, 1e9), size=st.integers(1, 9))
def test_equal_values_are_exactly_zero_apart(value, size):
    array = np.full(size, value)
    assert centered(array).tolist() == standardized(array).tolist() == [0.0] * size
    assert sample_variance(array) == 0.0


def test_no_values():
    assert centered(np.zeros(0)).size == standardized(np.zeros(0)).size == 0
    assert sample_variance(np.zeros(0)) == 0.0


@given(numbers, st.integers(0, 999))
def test_the_order_changes_no_bit(values, seed):
    order = np.random.default_rng(seed).permutation(len(values))
    array = np.array(values)
    assert centered(array[order]).tolist() == centered(array)[order].tolist()
    assert sample_variance(array[order]) == sample_variance(array)
