# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.objectives.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_equals_the_share_of_subsets_with_a_correct_sample(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


@given(st.data())
def test_matches_the_product_form_of_the_paper(data):
    n = data.draw(st.integers(1, 300))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    expected = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_is_unbiased():
    # The exact mean over all outcomes of n draws with success probability p is 1 - (1 - p)^k.
    n, p = 5, Fraction(1, 3)
    for k in range(1, n + 1):
        mean = sum(
            float(p ** sum(draws) * (1 - p) ** (n - sum(draws))) * pass_at_k(n, sum(draws), k)
            for draws in itertools.product([0, 1], repeat=n)
        )
        assert mean == pytest.approx(float(1 - (1 - p) ** k), abs=1e-14)


def test_large_counts_do_not_overflow_or_underflow():
    assert pass_at_k(10_000, 1, 1) == 1e-4
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert 0.999 < pass_at_k(10_000, 5_000, 100) <= 1.0


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (4, 5, 1, r"num_correct is 5; it must be in \[0, num_samples = 4\]"),
        (4, -1, 1, "num_correct is -1"),
        (4, 2, 5, r"k is 5; it must be in \[1, num_samples = 4\]"),
        (4, 2, 0, "k is 0"),
        (0, 0, 1, "k is 1"),
    ],
)
def test_invalid_counts_raise_an_error_that_names_the_value(n, c, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)
