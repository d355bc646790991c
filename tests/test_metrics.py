# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.metrics import Metric, Reduction, mean, merge_all, total

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@settings(deadline=None, max_examples=50)
@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_a_mean_of_parts_is_the_mean_of_all(parts: list[list[float]]):
    merged = merge_all({"x": mean(part)} for part in parts)["x"]
    everything = [value for part in parts for value in part]
    assert merged.value == pytest.approx(math.fsum(everything) / len(everything), rel=1e-9, abs=1e-6)
    assert merged.weight == len(everything)


def test_parts_of_unequal_size_do_not_count_equally():
    merged = mean([0.0, 0.0, 0.0]).merge(mean([4.0]))
    assert (merged.value, merged.weight) == (1.0, 4.0)


@pytest.mark.parametrize(("reduction", "expected"), [(Reduction.SUM, 6.0), (Reduction.MIN, -1.0), (Reduction.MAX, 4.0)])
def test_sum_min_and_max(reduction: Reduction, expected: float):
    parts = [{"x": Metric(value, reduction=reduction)} for value in (3.0, -1.0, 4.0)]
    for seed in range(4):
        random.Random(seed).shuffle(parts)
        assert merge_all(parts)["x"].value == expected


def test_merging_is_associative():
    first, second, third = mean([1.0]), mean([2.0, 4.0]), mean([10.0] * 5)
    left, right = first.merge(second).merge(third), first.merge(second.merge(third))
    assert left.value == pytest.approx(right.value)
    assert left.weight == right.weight


def test_an_empty_mean_has_weight_zero():
    assert mean([]) == Metric(0.0, 0.0)
    assert mean([]).merge(mean([])).value == 0.0
    assert mean([]).merge(mean([7.0])).value == 7.0


def test_totals_add_up():
    assert total([1, 2, True]) == Metric(4.0, reduction=Reduction.SUM)
    assert total([]).value == 0.0


def test_records_may_lack_some_metrics():
    merged = merge_all([{"a": mean([1.0])}, {"b": total([5])}, {"a": mean([3.0])}, {}])
    assert {name: metric.value for name, metric in merged.items()} == {"a": 2.0, "b": 5.0}
    assert merge_all([]) == {}


def test_merging_does_not_change_the_records():
    first = {"a": mean([1.0])}
    merge_all([first, {"a": mean([3.0])}])
    assert first == {"a": mean([1.0])}


def test_different_reductions_do_not_merge():
    with pytest.raises(ValueError, match="cannot merge a mean metric with a sum metric"):
        mean([1.0]).merge(total([1.0]))
