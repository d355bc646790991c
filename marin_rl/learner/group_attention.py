# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention of rows that hold a prompt once for several answers, without the pairs that the mask excludes.

The prompt attends to itself, and each answer to the prompt and itself. The products of a row have
`GroupRow.attention_pairs` pairs of a query and a key instead of the square of its length.
"""

import math
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Float, Int32
from levanter.layers.attention import Attention, AttentionConfig, AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import SharedPromptMask

EXCLUDED = -1e9
"""Score of a pair that the mask excludes. Padding has no other pairs, so it must not be infinite."""


def with_group_attention(model: LmHeadModel) -> LmHeadModel:
    """Replace the attention of every layer for rows with shared prompts.

    GPT-2 has an attention module of its own, which is not replaced; it applies the mask to all pairs of a row.

    Args:
        model: a language model; call this inside the function that is differentiated.
    """

    def replace(node: object) -> object:
        return _GroupAttention(node) if isinstance(node, Attention) else node

    return jax.tree.map(replace, model, is_leaf=lambda node: isinstance(node, Attention))


class _GroupAttention(eqx.Module):
    """An attention module for rows with shared prompts."""

    attention: Attention

    def __call__(
        self, x: NamedArray, mask: AttentionMask, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        mask = cast(SharedPromptMask, mask)
        query, keys, values = self.attention._compute_qkv(x, key=None, pos_ids=mask.position_ids)
        attended = group_attention(query, keys, values, mask, self.attention.config)
        heads = attended.flatten_axes(("kv_head", "q_heads_per_group"), "heads")
        return self.attention.o_proj(heads.astype(x.dtype))


def group_attention(
    query: NamedArray, keys: NamedArray, values: NamedArray, mask: SharedPromptMask, config: AttentionConfig
) -> NamedArray:
    """Compute attention in rows with shared prompts.

    Args:
        query: `{batch, position, kv_head, q_heads_per_group, head_size}`, in any order.
        keys: `{batch, position, kv_head, head_size}`, in any order.
        values: like `keys`.
        mask: segments of the rows and their parts.
        config: scale, cap and precision of the scores.

    Returns:
        An array with the axes of `query`, in the order above.
    """
    assert mask.segment_ids is not None
    (Batch, Position) = mask.prompt_segment_ids.axes
    query = query.rearrange((Batch, Position, "kv_head", "q_heads_per_group", "head_size"))
    keys, values = (array.rearrange((Batch, Position, "kv_head", "head_size")) for array in (keys, values))
    if config.upcast_attn:
        query, keys, values = (array.astype(jnp.float32) for array in (query, keys, values))
    prompt_length, answers, _ = mask.group

    def split(array: NamedArray) -> tuple[Array, Array]:
        """Return `[row, 1, position, ...]` of the prompts and `[row, answer, position, ...]` of the answers."""
        prompt, rest = array.array[:, None, :prompt_length], array.array[:, prompt_length:]
        return prompt, rest.reshape(Batch.size, answers, -1, *rest.shape[2:])

    def with_prompt(prompt: Array, own: Array) -> Array:
        return jnp.concatenate([jnp.broadcast_to(prompt, (*own.shape[:2], *prompt.shape[2:])), own], axis=2)

    (query_p, query_a), (key_p, key_a), (value_p, value_a) = (split(array) for array in (query, keys, values))
    (segment_p, segment_a), (_, prompt_a) = split(mask.segment_ids[0]), split(mask.prompt_segment_ids)
    own_p, own_a = (_causal(segments) for segments in (segment_p, segment_a))
    to_prompt = prompt_a[..., :, None] == segment_p[..., None, :]
    of_prompt = _attend(query_p, key_p, value_p, own_p, config)
    of_answers = _attend(
        query_a,
        with_prompt(key_p, key_a),
        with_prompt(value_p, value_a),
        jnp.concatenate([to_prompt, own_a], axis=-1),
        config,
    )
    rows = (Batch.size, -1, *query.array.shape[2:])
    attended = jnp.concatenate([of_prompt.reshape(rows), of_answers.reshape(rows)], axis=1)
    return hax.auto_sharded(hax.named(attended, query.axes))


def _causal(segments: Int32[Array, "row part position"]) -> Bool[Array, "row part position position"]:
    positions = jnp.arange(segments.shape[-1])
    return (segments[..., :, None] == segments[..., None, :]) & (positions[:, None] >= positions[None, :])


def _attend(
    query: Float[Array, "row part position head group size"],
    keys: Float[Array, "row part key_position head size"],
    values: Float[Array, "row part key_position head size"],
    mask: Bool[Array, "row part position key_position"],
    config: AttentionConfig,
) -> Float[Array, "row part position head group size"]:
    scale = config.scaling_factor or 1 / math.sqrt(config.HeadSize.size)
    scores = jnp.einsum("rpqhgd,rpkhd->rphgqk", query * scale, keys, preferred_element_type=jnp.float32)
    if config.logits_soft_cap is not None:
        scores = config.logits_soft_cap * jnp.tanh(scores / config.logits_soft_cap)
    weights = jax.nn.softmax(jnp.where(mask[:, :, None, None], scores, EXCLUDED), axis=-1).astype(values.dtype)
    return jnp.einsum("rphgqk,rpkhd->rpqhgd", weights, values)
