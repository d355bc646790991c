# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Auxiliary losses and metrics of the routers of a mixture of experts."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from levanter.metrics import Metric, ReductionType
from levanter.models.lm_model import LmConfig

from marin_rl.models.mixture import Routing, mixture_shape
from marin_rl.utils.levanter_line import metric

LOAD = "router/load/"
"""Prefix of the metrics of each expert."""


def router_loss(model: LmConfig, routing: Routing) -> tuple[jax.Array, dict[str, Metric]]:
    """Compute a microbatch's part of the auxiliary losses, and metrics.

    ```
    L = Σ_layers [ a · experts · Σ_e f_e P_e  +  z · mean_t(logsumexp(logits_t)²) ]
    ```

    `f_e` is the share of the microbatch's tokens that use expert e, without a gradient, and `P_e` the mean probability
    of e. The coefficients are those of the model's config. The means over tokens of microbatches add up with their
    shares of the tokens of the update.

    Source: Fedus et al. 2022, arXiv 2101.03961 (balance); Zoph et al. 2022, arXiv 2202.08906 (z).
    """
    shape = mixture_shape(model)
    assert shape is not None
    balance, z = jnp.sum(routing.balance), jnp.sum(routing.z)
    total = shape.balance_coefficient * balance + shape.z_coefficient * z
    layers, weight = len(routing.z), routing.weight[0]

    def mean(summed: jax.Array) -> Metric:
        return Metric(_value=jnp.sum(summed) / layers, _count=weight, reduction=ReductionType.MEAN)

    metrics = {
        "loss/router_balance_avg": metric(shape.balance_coefficient * balance, ReductionType.SUM),
        "loss/router_z_avg": metric(shape.z_coefficient * z, ReductionType.SUM),
        "router/entropy": mean(routing.entropy),
        "router/differing": mean(routing.differing),
    }
    # 1 if all experts have equal loads.
    loads = routing.loads * (shape.experts / shape.per_token)
    metrics |= {f"{LOAD}{expert:03d}": mean(loads[:, expert]) for expert in range(shape.experts)}
    return total, metrics


def load_range(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the largest and the smallest load of an expert; nothing for a dense model."""
    loads = [value for name, value in metrics.items() if name.startswith(LOAD)]
    return {"router/load_max": float(np.max(loads)), "router/load_min": float(np.min(loads))} if loads else {}
