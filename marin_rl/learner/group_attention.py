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

Attend = Callable[..., Array]
"""Causal attention, within segments, of the last positions of each row: a function of queries `[row, query, kv_head,
group, head_size]`, keys and values `[row, position, kv_head, head_size]`, segment ids `[row, position]` and, with a
window, positions in the sequences `[row, position]`."""


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
        attend = functools.partial(self._attend, mask=mask)
        return attend_in_segments(self.attention, x, mask.prompt_segment_ids, mask.position_ids, attend)

    def _attend(
        self, query: NamedArray, keys: Array, values: Array, segments: Array, scale: float, *, mask: SharedPromptMask
    ) -> Array:
        config, rows = self.attention.config, query.axes[:2]
        attend = kernel_of(config, scale, mask.sliding_window, interpret=self.interpret)
        run = functools.partial(group_attention, group=mask.group, attend=attend)
        by_row, by_row_and_head = sharding_of(rows[0]), sharding_of(rows[0], None, config.KVHeads)
        # Places have padding, so that distances in a sequence are not those in a row.
        per_token = [segments] if mask.sliding_window is None else [segments, mask.position_ids.rearrange(rows).array]
        inputs = (by_row_and_head,) * 3 + (by_row,) * len(per_token)
        return on_each_shard(run, inputs, by_row_and_head)(query.array, keys, values, *per_token)


def group_attention(
    query: Float[Array, "batch position kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    segment_ids: Int[Array, "batch position"],
    position_ids: Int[Array, "batch position"] | None = None,
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
        position_ids: positions in the sequences, for attention with a window.
        group: parts of a row.
        attend: attention of a part.
    """

    def split(array: Array) -> tuple[Array, Array]:
        """Return `[row, position, ...]` of the prompts and `[row · answer, position, ...]` of the answers."""
        prompt, rest = array[:, : group.prompt_length], array[:, group.prompt_length :]
        return prompt, rest.reshape(-1, group.answer_length, *array.shape[2:])

    def with_prompt(prompt: Array, own: Array) -> Array:
        return jnp.concatenate([jnp.repeat(prompt, group.answers, axis=0), own], axis=1)

    per_token = [segment_ids] if position_ids is None else [segment_ids, position_ids]
    (query_p, query_a), *others = (split(array) for array in (query, keys, values, *per_token))
    of_prompt = attend(query_p, *(prompt for prompt, _ in others))
    of_answers = attend(query_a, *(with_prompt(prompt, own) for prompt, own in others))
    return jnp.concatenate([of_prompt, of_answers.reshape(len(query), -1, *query.shape[2:])], axis=1)


def kernel_of(config: AttentionConfig, scale: float, window: int | None = None, *, interpret: bool = False) -> Attend:
    """Return the attention of a part of a row with the kernel of an attention module.

    Args:
        config: kernel and cap of the scores.
        scale: multiplies the scores before the cap.
        window: last positions of a sequence that a token attends to; None for all.
        interpret: whether to interpret the kernels of TPUs and GPUs.

    Raises:
        NotImplementedError: if the kernel does not support the window; see `AttentionKernel.supports_shared_prompts`.
    """
    cap = config.logits_soft_cap
    if window is not None and config.attn_backend in (AttentionBackend.SPLASH, GpuBackend.PALLAS):
        raise NotImplementedError(
            f"rows with shared prompts do not support attention windows ({window} positions) with "
            f"model.attn_backend: {config.attn_backend.value}; set rollouts.share_prompts to false"
        )
    match config.attn_backend:
        case AttentionBackend.SPLASH:
            block = config.flash_attention_block_size or SPLASH_BLOCK
            return functools.partial(splash_attention, scale=scale, soft_cap=cap, block=block, interpret=interpret)
        case GpuBackend.PALLAS if cap is None:
            return functools.partial(_square_attention, scale=scale, interpret=interpret)
        case GpuBackend.PALLAS:
            return functools.partial(_block_attention, scale=scale, soft_cap=cap)
        case _:
            return functools.partial(_full_attention, scale=scale, soft_cap=cap, window=window)


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
    query: Array,
    keys: Array,
    values: Array,
    segment_ids: Array,
    position_ids: Array | None = None,
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
) -> Array:
    """Attend with XLA, with all scores in memory."""
    first = keys.shape[1] - query.shape[1]
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", query * scale, keys, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    causal = first + jnp.arange(query.shape[1])[:, None] >= jnp.arange(keys.shape[1])
    visible = causal & (segment_ids[:, first:, None] == segment_ids[:, None, :])
    if position_ids is not None and window is not None:
        visible &= position_ids[:, first:, None] - position_ids[:, None, :] < window
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1).astype(values.dtype)
    return jnp.einsum("rhgqk,rkhd->rqhgd", weights, values)
