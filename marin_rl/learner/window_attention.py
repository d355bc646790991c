# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention windows of layers in training and scoring, for every attention kernel."""

import functools
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import PyTree
from levanter.layers.attention import Attention, AttentionMask
from levanter.layers.rotary import RotaryEmbeddings
from levanter.models.lm_model import LmHeadModel

from marin_rl.attention_windows import Windows, window_rope
from marin_rl.learner.gpu_attention import replace_attention


def with_windows(model: LmHeadModel, windows: Windows) -> LmHeadModel:
    """Return a model whose layers attend within windows; for models of scanned layers.

    The attention module of a layer may be levanter's or another one that reads `sliding_window` of its mask.

    Args:
        model: the model; its weights are not copied.
        windows: the window of each layer; those that are not None are equal.
    """
    (window,) = {window for window in windows if window is not None}
    has_window = None
    if not all(windows):
        has_window = hax.named(jnp.array([each is not None for each in windows]), cast(Any, model).config.Layers)
    config = cast(Any, model).config
    rope = None if (rope := window_rope(config)) is None else rope.build(config.attention_config().HeadSize)
    return replace_attention(model, lambda attention: _WindowAttention(attention, has_window, window, rope))


class _WindowAttention(eqx.Module):
    """The attention module of a layer, with the window of the layer."""

    attention: PyTree
    has_window: NamedArray | None
    """Whether this layer has the window; a scan over layers computes one of two programs. None if all have it."""
    window: int = eqx.field(static=True)
    rope: RotaryEmbeddings | None
    """Rotary embeddings of layers with the window, which have no weights; None for those of the attention module."""

    def __call__(
        self, x: NamedArray, mask: AttentionMask, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        def attend_within() -> NamedArray:
            attention = self.attention
            if self.rope is not None:
                attention = eqx.tree_at(lambda node: _levanter_module(node).rot_embs, attention, self.rope)
            return attention(x, mask.with_sliding_window(self.window), key=key, pos_ids=pos_ids)

        if self.has_window is None:
            return attend_within()
        all_positions = functools.partial(self.attention, x, mask, key=key, pos_ids=pos_ids)
        return jax.lax.cond(self.has_window.scalar(), attend_within, all_positions)


def _levanter_module(attention: Any) -> Attention:
    """Return levanter's module, which other modules of attention contain."""
    return attention if isinstance(attention, Attention) else attention.attention
