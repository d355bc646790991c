# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A language model with a KV cache: levanter's layers, one after another, with attention over cached keys and values.

Works for every levanter model that has a stack of layers with a module `self_attn`, and for GPT-2. Each layer has its
own cache, which XLA updates in place; a scan over stacked layers would copy it at each step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, ScanCheckpointPolicy
from haliax.util import ensure_tuple
from jaxtyping import Array, Float
from levanter.layers.attention import Attention, AttentionConfig
from levanter.layers.rotary import RotaryEmbeddings
from levanter.models.gpt2 import Gpt2Attention, Gpt2Block, Gpt2Config
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.models.attention_windows import window_rope, windows_within
from marin_rl.models.lora import merge_adapter
from marin_rl.models.mixture import TOP_EXPERTS, mixture_shape, routed_activations, with_routing
from marin_rl.sampling.attention import PADDING, AttentionForm, CacheAxes, DenseAttention, LayerCache, Tokens
from marin_rl.utils.levanter_line import shard

Cache = tuple[LayerCache, ...]
"""The cache of every layer. If the chosen experts are recorded, one more array: those of every token, `[slot, context,
layers, experts of a token]`."""


class CachedModel(NamedTuple):
    """A model in the layout for decoding."""

    model: LmHeadModel
    """The model without its head, with its layers unstacked and their attention replaced."""
    lm_head: NamedArray
    """`{embed, vocab}`."""
    rotary: "_RotaryTable | None"
    """Rotary embeddings, which have no weights and are those of all layers; None if the model has none."""
    window_rotary: "_RotaryTable | None" = None
    """Rotary embeddings of the layers with a window, if they have others."""

    def run(self, tokens: Tokens, cache: Cache, *, all_slots: bool) -> tuple[Float[Array, "rows queries embed"], Cache]:
        """Add tokens to the cache, and compute their activations.

        `all_slots` means that row `i` is slot `i` for all slots, so the cache is read without a copy. The activations
        are those before the head.
        """
        rows, queries = tokens.ids.shape
        Position = Axis("position", rows * queries)
        # Padding reads the first row of a table of positions.
        positions = jnp.where(tokens.positions == PADDING, 0, tokens.positions)
        positions = hax.named(positions.reshape(-1), Position)
        rotary = (self.rotary, self.window_rotary or self.rotary)
        layers, ids = (
            _CachedLayers(tokens, positions, list(cache), rotary, all_slots),
            hax.named(tokens.ids.reshape(-1), Position),
        )
        if mixture_shape(self.model.config) is None:
            activations = self.model.activations(ids, cast(Any, layers), key=None, pos_ids=positions)
        else:
            activations, experts, _ = routed_activations(self.model, ids, layers, positions)
            if records_experts(cache, self.model.config):
                chosen = experts.rearrange(("position", "layer", TOP_EXPERTS)).array
                chosen = chosen.reshape(rows, queries, *chosen.shape[1:])
                (recorded,) = layers.cache[-1]
                at = recorded.at[tokens.slots[:, None], tokens.positions]
                layers.cache[-1] = (at.set(chosen, mode="drop"),)
        return activations.array.reshape(rows, queries, -1), tuple(layers.cache)


@jax.tree_util.register_pytree_node_class
class ModelArrays:
    """The arrays of a `CachedModel`, as an argument of programs.

    For every call, jax lists the arrays of its arguments. With the modules of the model this takes as long as the rest
    of a call, and longer with more layers.
    """

    def __init__(self, arrays: Sequence[Any], structure: jax.tree_util.PyTreeDef) -> None:
        self._arrays = arrays
        self._structure = structure

    @classmethod
    def of(cls, model: CachedModel) -> "ModelArrays":
        """List the arrays of a model."""
        return cls(*jax.tree.flatten(model))

    @property
    def model(self) -> CachedModel:
        """The model with these arrays."""
        return jax.tree.unflatten(self._structure, self._arrays)

    def tree_flatten(self) -> tuple[Sequence[Any], jax.tree_util.PyTreeDef]:
        """Return the arrays, and the rest; see `jax.tree_util.register_pytree_node_class`."""
        return self._arrays, self._structure

    @classmethod
    def tree_unflatten(cls, structure: jax.tree_util.PyTreeDef, arrays: Sequence[Any]) -> "ModelArrays":
        """Reverse `tree_flatten`."""
        return cls(arrays, structure)


def cache_axes(
    model: LmConfig, form: AttentionForm, slots: int, context: int, head_shards: int, *, experts: bool = False
) -> tuple[CacheAxes, ...]:
    """Return the axes of each layer's cache, and of the chosen experts if they are recorded.

    The layout is that of `form`. `context` is the maximum number of tokens of each of the `slots` sequences. Heads are
    sharded over `head_shards` devices.
    """
    layers = (form.cache_axes(_attention_config(model), slots, context, head_shards),) * cast(Any, model).num_layers
    mixture = mixture_shape(model)
    if not experts or mixture is None:
        return layers
    sizes = {"slot": slots, "context": context, "layer": mixture.layers, TOP_EXPERTS: mixture.per_token}
    return (*layers, (tuple(Axis(name, size) for name, size in sizes.items()),))


def records_experts(cache: Sequence[Any], model: LmConfig) -> bool:
    """Whether a cache, or its axes, has the chosen experts of a model's layers."""
    return len(cache) > cast(Any, model).num_layers


def empty_cache(axes: tuple[CacheAxes, ...], dtype: jnp.dtype, experts_dtype: jnp.dtype | None = None) -> Cache:
    """Return an empty cache of these axes, sharded as the current axis mapping shards slots and heads."""

    def zeros(array: tuple[Axis, ...]) -> Array:
        return shard(hax.zeros(array, experts_dtype if array[-1].name == TOP_EXPERTS else dtype)).array

    return tuple(tuple(zeros(array) for array in layer) for layer in axes)


def _attention_config(model: LmConfig) -> AttentionConfig:
    if isinstance(model, Gpt2Config):
        return AttentionConfig(model.Embed, num_heads=model.num_heads, num_kv_heads=model.num_heads)
    return cast(Any, model).attention_config()


def with_cache(model: LmHeadModel, form: AttentionForm, context: int) -> CachedModel:
    """Return the model in the layout for decoding; run it under `jit` once per update of the weights.

    Adapters are merged into the result. `context` is the maximum number of tokens of a sequence.
    """
    model = merge_adapter(model)
    transformer = cast(Any, model).transformer

    def stack(transformer: Any) -> Any:
        return transformer.blocks if isinstance(model.config, Gpt2Config) else transformer.layers

    stacked = stack(transformer)
    layers = list(stacked.unstacked())
    rotary = window_rotary = None
    if not isinstance(layers[0], Gpt2Block):
        rotary = _rotary_table(layers[0].self_attn.rot_embs, model.config, context)
        if (rope := window_rope(model.config)) is not None:
            window_rotary = _rotary_table(rope.build(_attention_config(model.config).HeadSize), model.config, context)
    windows = windows_within(model.config, context) or (None,) * len(layers)
    cached = [_layer_with_cache(layer, form, window) for layer, window in zip(layers, windows, strict=True)]
    if isinstance(form, DenseAttention):
        cached = [_inputs_first(layer) for layer in cached]
    unstacked = BlockSeq(cached, stacked.Block, ScanCheckpointPolicy._mk(False))
    transformer = eqx.tree_at(stack, transformer, unstacked)
    unrolled = eqx.tree_at(lambda node: node.transformer, model, transformer)
    if mixture_shape(model.config) is not None:
        unrolled = with_routing(unrolled)
    head = model.get_lm_head()
    (Embed,) = (axis for axis in head.axes if axis.name == "embed")
    if getattr(unrolled, "lm_head", None) is not None:
        unrolled = eqx.tree_at(lambda node: node.lm_head, unrolled, None)
    return CachedModel(unrolled, head.rearrange((Embed, ...)), rotary, window_rotary)


def _layer_with_cache(layer: Any, form: AttentionForm, window: int | None) -> Any:
    """Replace the attention of a layer."""
    if isinstance(layer, Gpt2Block):
        return eqx.tree_at(lambda node: node.attn, layer, _CachedGpt2Attention(layer.attn, form))
    return eqx.tree_at(lambda node: node.self_attn, layer, _CachedAttention(layer.self_attn, form, window))


def _inputs_first(layer: Any) -> Any:
    """Reorder the axes of the weights of every `Linear`: first inputs, then outputs.

    XLA's products on a CPU read no other order, and would copy the weights for every token. The tiles of a TPU would
    pad small axes at the end.
    """

    def reorder(node: Any) -> Any:
        if not isinstance(node, hax.nn.Linear):
            return node
        inputs = (axis.name for axis in cast(tuple[Axis, ...], ensure_tuple(node.In)))
        return eqx.tree_at(lambda linear: linear.weight, node, node.weight.rearrange((*inputs, ...)))

    return jax.tree.map(reorder, layer, is_leaf=lambda node: isinstance(node, hax.nn.Linear))


class _CachedLayers:
    """The caches during one call of a model. It takes the place of the attention mask, which each layer receives."""

    def __init__(
        self,
        tokens: Tokens,
        positions: NamedArray,
        cache: list[LayerCache],
        rotary: "tuple[_RotaryTable | None, _RotaryTable | None]",
        all_slots: bool,
    ) -> None:
        self.cache = cache
        self.positions = positions
        self.rotary, self.window_rotary = rotary
        self._tokens = tokens
        self._all_slots = all_slots
        self._layer = 0

    def attend(
        self,
        form: AttentionForm,
        query: NamedArray,
        key: NamedArray,
        value: NamedArray,
        config: AttentionConfig,
        window: int | None = None,
    ) -> NamedArray:
        """Write the next layer's keys and values, and attend to its cache."""
        tokens, layer = self._tokens, self._layer
        self._layer += 1

        def by_row(array: NamedArray, *axes: str) -> Array:
            ordered = array.rearrange(("position", *axes)).array
            return ordered.reshape(*tokens.ids.shape, *ordered.shape[1:])

        query = query.rearrange(("position", "kv_head", "q_heads_per_group", "head_size"))
        attended, self.cache[layer] = form.attend(
            by_row(query, "kv_head", "q_heads_per_group", "head_size"),
            by_row(key, "kv_head", "head_size"),
            by_row(value, "kv_head", "head_size"),
            self.cache[layer],
            tokens,
            config,
            all_slots=self._all_slots,
            window=window,
        )
        return hax.named(attended.reshape(query.array.shape), query.axes)


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


def _rotary_table(embeddings: RotaryEmbeddings | None, model: LmConfig, context: int) -> _RotaryTable | None:
    """Return the values of rotary embeddings, which are linear, on a vector of ones and zeros."""
    if embeddings is None:
        return None
    HeadSize = _attention_config(model).HeadSize
    axes, half = (Axis("position", context), HeadSize), HeadSize.size // 2
    ones = hax.named(jnp.broadcast_to(jnp.repeat(jnp.array([1.0, 0.0]), half), (context, 2 * half)), axes)
    table = embeddings(ones, hax.arange(axes[0]))
    return _RotaryTable(table.rearrange(axes))


class _CachedAttention(eqx.Module):
    """An attention module that reads and writes the cache of the call."""

    attention: Attention
    form: AttentionForm = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, mask: _CachedLayers, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        attention = self.attention
        rotary = mask.rotary if self.window is None else mask.window_rotary
        if rotary is not None:
            attention = eqx.tree_at(lambda node: node.rot_embs, attention, rotary)
        query, new_key, new_value = attention._compute_qkv(x, key=None, pos_ids=mask.positions)
        attended = mask.attend(self.form, query, new_key, new_value, self.attention.config, self.window)
        heads = attended.flatten_axes(("kv_head", "q_heads_per_group"), "heads")
        return self.attention.o_proj(heads.astype(x.dtype))


class _CachedGpt2Attention(eqx.Module):
    """GPT-2's attention module, with the cache of the call."""

    attention: Gpt2Attention
    form: AttentionForm = eqx.field(static=True)

    def __call__(self, x: NamedArray, mask: _CachedLayers, layer_idx: NamedArray, *, key: None = None) -> NamedArray:
        config = self.attention.config
        projected = self.attention.c_attn(x).rename({"heads": "kv_head"})
        query, new_key, new_value = projected.unbind("qkv")
        if config.scale_attn_by_inverse_layer_idx:
            query = query / (layer_idx + 1.0)
        attention = _attention_config(config)
        query = query.broadcast_axis(attention.QHeadsPerGroup)
        attended = mask.attend(self.form, query, new_key, new_value, attention)
        heads = attended["q_heads_per_group", 0].rename({"kv_head": "heads"})
        return self.attention.c_proj(heads.astype(x.dtype))
