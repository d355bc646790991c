# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Floating-point operations of models."""

import functools
import math
from typing import Any, cast

import equinox as eqx
import haliax.nn as hnn
import jax
from haliax import Axis
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.models.mixture import mixture_shape


def forward_flops(policy: LmHeadModel, tokens: float, context: float, head_tokens: float) -> float:
    """Return the FLOPs of the matrix products of a forward pass.

    `2 · P · tokens + 4 · layers · heads · head size · tokens · context + 2 · H · head_tokens`, where P are the
    parameters of the linear layers, of a mixture those of the experts that a token uses, and H those of the head.

    Args:
        policy: the model, or its shapes.
        tokens: tokens that pass through the layers.
        context: mean number of positions that a token attends to.
        head_tokens: tokens whose logits are computed.
    """
    config, mixture = cast(Any, policy).config, mixture_shape(policy.config)
    used = 1.0 if mixture is None else mixture.per_token / mixture.experts

    def is_product(node: Any) -> bool:
        return isinstance(node, hnn.Linear | hnn.MoELinear)

    linear = 0.0
    for node in filter(is_product, jax.tree.leaves(cast(Any, policy).transformer, is_leaf=is_product)):
        linear += (used if isinstance(node, hnn.MoELinear) else 1.0) * math.prod(node.weight.array.shape)
    head_size = getattr(config, "head_dim", None) or config.Embed.size // config.num_heads
    attention = config.num_layers * config.num_heads * head_size
    head = math.prod(policy.get_lm_head().array.shape)
    return 2.0 * linear * tokens + 4.0 * attention * tokens * context + 2.0 * head * head_tokens


@functools.lru_cache
def flops_per_token(model: LmConfig, vocab_size: int, context: int) -> float:
    """Return the FLOPs of a forward pass and the head for one token; see `forward_flops`.

    Levanter's own count takes `hidden_dim / num_heads` for the head size.
    """
    build = functools.partial(model.build, Axis("vocab", vocab_size))
    policy = eqx.filter_eval_shape(lambda: build(key=jax.random.PRNGKey(0)))
    return forward_flops(policy, 1, context, 1)
