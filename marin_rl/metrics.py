# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics that carry their own reduction, so that a mean is never a mean of means.

Importing this module loads no jax. Inside the jitted step the same job is done by levanter's
`levanter.metrics.Metric`.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping


class Reduction(enum.Enum):
    """How observations of one metric combine."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A partly reduced metric: a value, its weight, and how it combines with another.

    For a mean, `value` is the weighted mean so far and `weight` the sum of the weights. For the
    other reductions the weight is carried along and plays no part.
    """

    value: float
    """The reduced value so far."""
    weight: float = 1.0
    """Total weight behind a mean (rollouts, tokens, …)."""
    reduction: Reduction = Reduction.MEAN
    """How two of them combine."""

    def merge(self, other: "Metric") -> "Metric":
        """Combine two observations of the same metric; associative and commutative.

        Raises:
            ValueError: if the reductions differ.

        >>> Metric(1.0, 3.0).merge(Metric(5.0, 1.0))
        Metric(value=2.0, weight=4.0, reduction=<Reduction.MEAN: 'mean'>)
        """
        if self.reduction is not other.reduction:
            raise ValueError(f"cannot merge a {self.reduction.value} metric with a {other.reduction.value} metric")
        weight = self.weight + other.weight
        match self.reduction:
            case Reduction.MEAN:
                value = (self.value * self.weight + other.value * other.weight) / weight if weight else 0.0
            case Reduction.SUM:
                value = self.value + other.value
            case Reduction.MIN:
                value = min(self.value, other.value)
            case Reduction.MAX:
                value = max(self.value, other.value)
        return Metric(value, weight, self.reduction)


def mean(values: Iterable[int | float]) -> Metric:
    """The mean of `values`, weighted by their number.

    >>> mean([1.0, 2.0, 6.0])
    Metric(value=3.0, weight=3.0, reduction=<Reduction.MEAN: 'mean'>)
    """
    values = list(values)
    return Metric(sum(values) / len(values) if values else 0.0, float(len(values)))


def total(values: Iterable[int | float]) -> Metric:
    """The sum of `values`."""
    return Metric(float(sum(values)), reduction=Reduction.SUM)


def merge_all(records: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge records that may each hold some of the metrics."""
    merged: dict[str, Metric] = {}
    return functools.reduce(_merge_into, records, merged)


def _merge_into(merged: dict[str, Metric], record: Mapping[str, Metric]) -> dict[str, Metric]:
    for name, metric in record.items():
        merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
