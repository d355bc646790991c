# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics with a reduction, so that means are merged by weight.

Importing this module does not load jax. Inside the jitted step `levanter.metrics.Metric` has the same role.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping


class Reduction(enum.Enum):
    """How two observations of a metric are merged."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A partially reduced metric: a value, its weight and its reduction.

    For a mean, `value` is the weighted mean so far and `weight` the sum of the weights. The other
    reductions do not use the weight.
    """

    value: float
    """The reduced value so far."""
    weight: float = 1.0
    """Total weight of a mean (number of rollouts, tokens, …)."""
    reduction: Reduction = Reduction.MEAN
    """How two observations are merged."""

    def merge(self, other: "Metric") -> "Metric":
        """Merge two observations of the same metric; associative and commutative.

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
    """Merge metrics by name; a record may lack some of the names."""
    merged: dict[str, Metric] = {}
    for record in records:
        for name, metric in record.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
