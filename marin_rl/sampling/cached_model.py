# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A language model with a KV cache: levanter's layers, one after another, with attention over cached keys and values.

Works for every levanter model that has a stack of layers with a module `self_attn`. Each layer has its cache in one
contiguous array, which XLA updates in place; a scan over stacked layers would copy it at each step.
"""

import math
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, ScanCheckpointPolicy
from jaxtyping import Array, Bool, Float, Int
from levanter.layers.attention import Attention, AttentionConfig
from levanter.models.lm_model import LmConfig, LmHeadModel


class LayerCache(NamedTuple):
    """Keys (after rotary embedding) and values of one layer."""

    keys: Float[Array, "slots kv_heads context head_size"]
    values: Float[Array, "slots kv_heads context head_size"]


Cache = tuple[LayerCache, ...]
"""The cache of every layer."""


class Tokens(NamedTuple):
    """New tokens of some slots: `queries` consecutive positions of each row's slot."""

    ids: Int[Array, "rows queries"]
    slots: Int[Array, " rows"]
    """Slot of each row; out of range for padding."""
    positions: Int[Array, "rows queries"]
    """Position of each token in its sequence; `context` for padding, which is not written to the cache."""


class CachedModel(NamedTuple):
    """A model in the layout for decoding."""

    model: LmHeadModel
    """The model without its head, with its layers unstacked and their attention replaced."""
    lm_head: Float[Array, "embed vocab"]

    def run(self, tokens: Tokens, cache: Cache, *, all_slots: bool) -> tuple[Float[Array, "rows queries embed"], Cache]:
        """Add tokens to the cache, and compute their activations.

        Args:
            tokens: the new tokens.
            cache: the cache of each layer.
            all_slots: whether row `i` is slot `i` for all slots, so that the cache is read without a copy.

        Returns:
            The activations before the head, and the cache with the new tokens.
        """
        rows, queries = tokens.ids.shape
        Position = Axis("position", rows * queries)
        positions = hax.named(tokens.positions.reshape(-1), Position)
        layers = _CachedLayers(tokens, positions, list(cache), all_slots)
        activations = self.model.activations(
            hax.named(tokens.ids.reshape(-1), Position), cast(Any, layers), key=None, pos_ids=positions
        )
        if isinstance(activations, tuple):  # Mixture-of-experts models also return a balancing loss.
            activations = activations[0]
        return activations.array.reshape(rows, queries, -1), tuple(layers.cache)


def empty_cache(model: LmConfig, slots: int, context: int, dtype: jnp.dtype) -> Cache:
    """Return an empty cache for each layer, sharded as the current axis mapping shards heads.

    Args:
        model: architecture.
        slots: number of sequences.
        context: maximum number of tokens of a sequence.
        dtype: type of keys and values.
    """
    axes = _cache_axes(model, slots, context)
    return tuple(
        LayerCache(*(hax.auto_sharded(hax.zeros(axes, dtype)).array for _ in LayerCache._fields))
        for _ in range(cast(Any, model).num_layers)
    )


def cache_bytes(model: LmConfig, slots: int, context: int, dtype: jnp.dtype) -> int:
    """Return the size of the cache in bytes; the arguments are those of `empty_cache`."""
    elements = math.prod(axis.size for axis in _cache_axes(model, slots, context))
    return len(LayerCache._fields) * cast(Any, model).num_layers * elements * jnp.dtype(dtype).itemsize


def _cache_axes(model: LmConfig, slots: int, context: int) -> tuple[Axis, ...]:
    config = cast(Any, model).attention_config()
    return Axis("slot", slots), config.KVHeads, Axis("context", context), config.HeadSize


def with_cache(model: LmHeadModel, context: int) -> CachedModel:
    """Return the model in the layout for decoding; run it under `jit` once per update of the weights.

    Args:
        model: the learner's model.
        context: maximum number of tokens of a sequence.
    """
    stacked = cast(Any, model).transformer.layers
    layers = [
        eqx.tree_at(lambda layer: layer.self_attn, layer, _CachedAttention(_with_table(layer.self_attn, context)))
        for layer in stacked.unstacked()
    ]
    unstacked = BlockSeq(layers, stacked.Block, ScanCheckpointPolicy._mk(False))
    unrolled = eqx.tree_at(lambda node: node.transformer.layers, model, unstacked)
    head = model.get_lm_head()
    (Embed,) = (axis for axis in head.axes if axis.name == "embed")
    if getattr(unrolled, "lm_head", None) is not None:
        unrolled = eqx.tree_at(lambda node: node.lm_head, unrolled, None)
    return CachedModel(unrolled, head.rearrange((Embed, ...)).array)


class _CachedLayers:
    """The caches during one call of a model. It takes the place of the attention mask, which each layer receives."""

    def __init__(self, tokens: Tokens, positions: NamedArray, cache: list[LayerCache], all_slots: bool) -> None:
        self.cache = cache
        self.positions = positions
        self._tokens = tokens
        self._all_slots = all_slots
        self._layer = 0

    def attend(self, query: NamedArray, key: NamedArray, value: NamedArray, config: AttentionConfig) -> NamedArray:
        """Write the next layer's keys and values, and attend to its cache."""
        tokens, layer = self._tokens, self._layer
        rows, queries = tokens.ids.shape
        cache = self.cache[layer]
        order = ("position", "kv_head", "head_size")

        def write(cached: Array, new: NamedArray) -> Array:
            new_array = new.rearrange(order).array.reshape(rows, queries, *cached.shape[1::2]).astype(cached.dtype)
            return cached.at[tokens.slots[:, None], :, tokens.positions].set(
                new_array, mode="drop", unique_indices=True
            )

        cache = LayerCache(write(cache.keys, key), write(cache.values, value))
        self.cache[layer] = cache
        self._layer += 1
        keys, values = cache if self._all_slots else (array.at[tokens.slots].get(mode="clip") for array in cache)
        query = query.rearrange(("position", "kv_head", "q_heads_per_group", "head_size"))
        result = attend_to_cache(
            query.array.reshape(rows, queries, *query.array.shape[1:]), keys, values, tokens.positions, config
        )
        return hax.named(result.reshape(query.array.shape), query.axes)


def attend_to_cache(
    query: Float[Array, "rows queries kv_heads group head_size"],
    keys: Float[Array, "rows kv_heads context head_size"],
    values: Float[Array, "rows kv_heads context head_size"],
    positions: Int[Array, "rows queries"],
    config: AttentionConfig,
) -> Float[Array, "rows queries kv_heads group head_size"]:
    """Attend to the cached positions up to each query's, in float32.

    `out_i = Σ_j softmax_j(scale·q_i·k_j)·v_j` over `j <= positions_i`. With a soft cap `c`, scores are
    `c·tanh(score/c)`.

    Args:
        query: queries of each row.
        keys: cached keys of each row's sequence.
        values: cached values.
        positions: position of each query.
        config: scale and soft cap.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if config.scaling_factor is None else config.scaling_factor
    scaled = (query.astype(jnp.float32) * scale).astype(keys.dtype)
    scores = einsum_in_float32("rqhgd,rhcd->rhqgc", scaled, keys)
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * jnp.tanh(scores / config.logits_soft_cap)
    visible: Bool[Array, "rows queries context"] = jnp.arange(keys.shape[2]) <= positions[..., None]
    scores = jnp.where(visible[:, None, :, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)
    summed = einsum_in_float32("rhqgc,rhcd->rqhgd", weights.astype(values.dtype), values)
    return summed / jnp.moveaxis(total, 2, 1)[..., None]


def einsum_in_float32(equation: str, first: Array, second: Array) -> Array:
    """Return `jnp.einsum` with float32 sums; a CPU has no such product of bfloat16 arrays, and converts them first."""
    return jax.lax.platform_dependent(
        first,
        second,
        cpu=lambda *arrays: jnp.einsum(equation, *(array.astype(jnp.float32) for array in arrays)),
        default=lambda *arrays: jnp.einsum(equation, *arrays, preferred_element_type=jnp.float32),
    )


class _RotaryTable(eqx.Module):
    """Rotary embedding from a table, instead of cosines and sines of each token in each layer."""

    table: NamedArray
    """`{position, head_size}`: cosines in the first half, sines in the second."""

    def __call__(self, x: NamedArray, position_ids: NamedArray) -> NamedArray:
        (Position,) = position_ids.axes
        HeadSize = x.resolve_axis("head_size")
        rows = self.table.array.at[position_ids.array].get(mode="clip").astype(x.dtype)
        cosines, sines = (
            hax.named(jnp.concatenate([part, part], axis=-1), (Position, HeadSize)) for part in jnp.split(rows, 2, -1)
        )
        first, second = (x[HeadSize.name, hax.ds(start, HeadSize.size // 2)] for start in (0, HeadSize.size // 2))
        return x * cosines + hax.concatenate(HeadSize, (-second, first)) * sines


def _with_table(attention: Attention, context: int) -> Attention:
    """Replace rotary embeddings, which are linear, by their values on a vector of ones and zeros."""
    if attention.rot_embs is None:
        return attention
    axes = (Axis("position", context), attention.config.HeadSize)
    half = attention.config.HeadSize.size // 2
    ones = hax.named(jnp.broadcast_to(jnp.repeat(jnp.array([1.0, 0.0]), half), (context, 2 * half)), axes)
    table = attention.rot_embs(ones, hax.arange(axes[0]))
    return eqx.tree_at(lambda node: node.rot_embs, attention, _RotaryTable(table.rearrange(axes)))


class _CachedAttention(eqx.Module):
    """An attention module that reads and writes the cache of the call."""

    attention: Attention

    def __call__(
        self, x: NamedArray, mask: _CachedLayers, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        query, new_key, new_value = self.attention._compute_qkv(x, key=None, pos_ids=mask.positions)
        attended = mask.attend(query, new_key, new_value, self.attention.config)
        heads = attended.flatten_axes(("kv_head", "q_heads_per_group"), "heads")
        return self.attention.o_proj(heads.astype(x.dtype))
