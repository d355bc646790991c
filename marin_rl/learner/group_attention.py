# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention of rows that hold a prompt once for several answers, without the pairs that the mask excludes.

The prompt attends to itself, and each answer to a copy of the prompt's keys and values and to itself: causal attention
of the last positions of shorter rows, for which every kernel has a form. XLA adds up the gradients of the copies.
"""

import functools
from collections.abc import Callable
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Float, Int
from levanter.layers.attention import Attention, AttentionBackend, AttentionConfig, AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import GroupRow
from marin_rl.batching.rl_example import SharedPromptMask
from marin_rl.kernel_sharding import on_each_shard, sharding_of
from marin_rl.learner.attention_kernel import SPLASH_BLOCK
from marin_rl.learner.gpu_attention import GpuBackend, attend_in_segments, block_attention, segment_attention
from marin_rl.learner.splash_attention import splash_attention

Attend = Callable[[Array, Array, Array, Array], Array]
"""Causal attention, within segments, of the last positions of each row: a function of queries `[row, query, kv_head,
group, head_size]`, keys and values `[row, position, kv_head, head_size]` and segment ids `[row, position]`."""


def with_group_attention(model: LmHeadModel, *, interpret: bool = False) -> LmHeadModel:
    """Replace the attention of every layer for rows with shared prompts.

    GPT-2 has an attention module of its own, which is not replaced; it applies the mask to all pairs of a row.

    Args:
        model: a language model; call this inside the function that is differentiated.
        interpret: whether to interpret the kernels of TPUs and GPUs, which works without one, slowly.
    """

    def replace(node: object) -> object:
        return _GroupAttention(node, interpret) if isinstance(node, Attention) else node

    return jax.tree.map(replace, model, is_leaf=lambda node: isinstance(node, Attention))


class _GroupAttention(eqx.Module):
    """An attention module for rows with shared prompts."""

    attention: Attention
    interpret: bool = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, mask: AttentionMask, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        mask = cast(SharedPromptMask, mask)
        attend = functools.partial(self._attend, group=mask.group)
        return attend_in_segments(self.attention, x, mask.prompt_segment_ids, mask.position_ids, attend)

    def _attend(
        self, query: NamedArray, keys: Array, values: Array, segments: Array, scale: float, *, group: GroupRow
    ) -> Array:
        config, Batch = self.attention.config, query.resolve_axis("batch")
        attend = kernel_of(config, scale, interpret=self.interpret)
        run = functools.partial(group_attention, group=group, attend=attend)
        by_row, by_row_and_head = sharding_of(Batch), sharding_of(Batch, None, config.KVHeads)
        sharded = on_each_shard(run, (by_row_and_head,) * 3 + (by_row,), by_row_and_head)
        return sharded(query.array, keys, values, segments)


def group_attention(
    query: Float[Array, "batch position kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segment_ids: Int[Array, "batch position"],
    *,
    group: GroupRow,
    attend: Attend,
) -> Float[Array, "batch position kv_head group head_size"]:
    """Compute attention in rows with shared prompts.

    Args:
        query: queries; several heads share keys and values.
        keys: keys, after rotary embedding.
        values: values.
        segment_ids: `prompt_segment_ids` of the rows: an answer has the id of its prompt. Only one sequence in each
            part of a row has that id.
        group: parts of a row.
        attend: attention of a part.
    """

    def split(array: Array) -> tuple[Array, Array]:
        """Return `[row, position, ...]` of the prompts and `[row · answer, position, ...]` of the answers."""
        prompt, rest = array[:, : group.prompt_length], array[:, group.prompt_length :]
        return prompt, rest.reshape(-1, group.answer_length, *array.shape[2:])

    def with_prompt(prompt: Array, own: Array) -> Array:
        return jnp.concatenate([jnp.repeat(prompt, group.answers, axis=0), own], axis=1)

    (query_p, query_a), *others = (split(array) for array in (query, keys, values, segment_ids))
    of_prompt = attend(query_p, *(prompt for prompt, _ in others))
    of_answers = attend(query_a, *(with_prompt(prompt, own) for prompt, own in others))
    return jnp.concatenate([of_prompt, of_answers.reshape(len(query), -1, *query.shape[2:])], axis=1)


def kernel_of(config: AttentionConfig, scale: float, *, interpret: bool = False) -> Attend:
    """Return the attention of a part of a row with the kernel of an attention module.

    Args:
        config: kernel and cap of the scores.
        scale: multiplies the scores before the cap.
        interpret: whether to interpret the kernels of TPUs and GPUs.
    """
    cap = config.logits_soft_cap
    match config.attn_backend:
        case AttentionBackend.SPLASH:
            block = config.flash_attention_block_size or SPLASH_BLOCK
            return functools.partial(splash_attention, scale=scale, soft_cap=cap, block=block, interpret=interpret)
        case GpuBackend.PALLAS if cap is None:
            return functools.partial(_square_attention, scale=scale, interpret=interpret)
        case GpuBackend.PALLAS:
            return functools.partial(_block_attention, scale=scale, soft_cap=cap)
        case _:
            return functools.partial(_full_attention, scale=scale, soft_cap=cap)


def _square_attention(
    query: Array, keys: Array, values: Array, segment_ids: Array, *, scale: float, interpret: bool
) -> Array:
    """Attend with jax's kernel of GPUs, which takes as many queries as keys: the first queries are zeros."""
    others = keys.shape[1] - query.shape[1]
    padded = jnp.pad(query, ((0, 0), (others, 0), (0, 0), (0, 0), (0, 0)))
    return segment_attention(padded, keys, values, segment_ids, scale=scale, interpret=interpret)[:, others:]


def _block_attention(
    query: Array, keys: Array, values: Array, segment_ids: Array, *, scale: float, soft_cap: float | None
) -> Array:
    """Attend with XLA, one block of queries at a time."""
    first = keys.shape[1] - query.shape[1]
    own = segment_ids[:, first:]
    return block_attention(query, keys, values, own, segment_ids, first=first, scale=scale, soft_cap=soft_cap)


def _full_attention(
    query: Array, keys: Array, values: Array, segment_ids: Array, *, scale: float, soft_cap: float | None
) -> Array:
    """Attend with XLA, with all scores in memory."""
    first = keys.shape[1] - query.shape[1]
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", query * scale, keys, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    causal = first + jnp.arange(query.shape[1])[:, None] >= jnp.arange(keys.shape[1])
    visible = causal & (segment_ids[:, first:, None] == segment_ids[:, None, :])
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1).astype(values.dtype)
    return jnp.einsum("rhgqk,rkhd->rqhgd", weights, values)
