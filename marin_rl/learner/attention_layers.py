# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention modules of a model, in place of levanter's, for the rows that levanter's do not support.

`with_attention_kernel` replaces them for four reasons:

- the kernel is not levanter's (`GpuBackend`);
- layers have windows, most of which levanter's models ignore;
- rows hold a prompt once for several answers. The prompt attends to itself, and each answer to a copy of the prompt's
  keys and values and to itself: causal attention of the last positions of shorter rows, without the pairs that the mask
  excludes. XLA adds up the gradients of the copies;
- positions are split over devices (context parallelism). Every device has the queries of its positions and gathers the
  keys and values of all positions. So it holds the activations of its positions only, and the keys and values of one
  layer. Later positions attend to more keys: the last device has the most work, about twice the average.
"""

import functools
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import current_thread_local_mapping, physical_axis_name, physical_axis_size
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from levanter.layers.attention import Attention, AttentionBackend, AttentionConfig, AttentionMask
from levanter.layers.rotary import RotaryEmbeddings
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.attention_kernel import SPLASH_BLOCK, GpuBackend
from marin_rl.batching.packing import GroupRow
from marin_rl.batching.rl_example import SharedPromptMask, TokenRows
from marin_rl.learner.flash_attention import (
    Attend,
    block_attention,
    dense_attention,
    pallas_attention,
    splash_attention,
    splash_kernel,
)
from marin_rl.models.attention_windows import window_rope, windows_within
from marin_rl.utils.devices.sharding import POSITION, on_each_shard, sharding_of


def context_shards() -> int:
    """Return the number of devices over which the current axis mapping splits the positions of a row."""
    if current_thread_local_mapping() is None or physical_axis_name(POSITION) is None:
        return 1
    return physical_axis_size(POSITION) or 1


def with_attention_kernel(model: LmHeadModel, batch: TokenRows, *, interpret: bool = False) -> LmHeadModel:
    """Return the model with the attention modules that the rows of a batch need.

    GPT-2 has an attention module of its own, which is not replaced; it applies the mask to all pairs of a row. The
    layers of the model are scanned, and its weights are not copied. Call this inside the function that is
    differentiated. `interpret` interprets the kernels of TPUs and GPUs, which works without one, slowly.
    """
    config = cast(Any, model).config
    longest = batch.input_ids.axis_size(POSITION) if batch.group is None else batch.group.longest
    windows = windows_within(config, longest)
    other_kernel = getattr(config, "attn_backend", None) is GpuBackend.PALLAS
    if not (windows or other_kernel or batch.group is not None or context_shards() > 1):
        return model
    window = has_window = rope = None
    if windows:
        # Windows of layers that have one are equal.
        (window,) = {each for each in windows if each is not None}
        if not all(windows):
            has_window = hax.named(jnp.array([each is not None for each in windows]), config.Layers)
        if (rope := window_rope(config)) is not None:
            rope = rope.build(config.attention_config().HeadSize)

    def replace(node: object) -> object:
        return _Attention(node, has_window, rope, window, interpret) if isinstance(node, Attention) else node

    return jax.tree.map(replace, model, is_leaf=lambda node: isinstance(node, Attention))


class _Attention(eqx.Module):
    """The attention module of a layer."""

    attention: Attention
    """Levanter's, with the weights."""
    has_window: NamedArray | None
    """Whether this layer has the window; a scan over layers computes one of two programs. None if all are equal."""
    rope: RotaryEmbeddings | None
    """Rotary embeddings of layers with the window, which have no weights; None for those of the attention module."""
    window: int | None = eqx.field(static=True)
    """Last positions that a token attends to, its own included; None if no layer has a window."""
    interpret: bool = eqx.field(static=True)

    def __call__(
        self, x: NamedArray, mask: AttentionMask, *, key: None = None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        def attend_within() -> NamedArray:
            attention = self.attention
            if self.rope is not None:
                attention = eqx.tree_at(lambda node: node.rot_embs, attention, self.rope)
            return _attend(attention, x, mask.with_sliding_window(self.window), pos_ids, self.interpret)

        to_all = functools.partial(_attend, self.attention, x, mask, pos_ids, self.interpret)
        if self.window is None:
            return to_all()
        if self.has_window is None:
            return attend_within()
        return jax.lax.cond(self.has_window.scalar(), attend_within, to_all)


def _attend(
    attention: Attention, x: NamedArray, mask: AttentionMask, pos_ids: NamedArray | None, interpret: bool
) -> NamedArray:
    """Compute the result of levanter's attention module for the kind of rows."""
    config, window, group, is_split = attention.config, mask.sliding_window, None, context_shards() > 1
    if isinstance(mask, SharedPromptMask) and not is_split:
        group, segment_ids, pos_ids = mask.group, mask.prompt_segment_ids, mask.position_ids
    elif is_split or config.attn_backend is GpuBackend.PALLAS:
        segment_ids = _segments_of(mask)
    else:
        return attention(x, mask, key=None, pos_ids=pos_ids)
    dtype = jnp.float32 if config.upcast_attn else x.dtype
    query, keys, values = (
        array.rearrange((..., POSITION, "kv_head", ..., "head_size")).astype(dtype)
        for array in attention._compute_qkv(x, key=None, pos_ids=pos_ids)
    )
    rows = Batch, _ = query.resolve_axis("batch"), query.resolve_axis(POSITION)
    segments = segment_ids.rearrange(rows).array
    scale = config.HeadSize.size**-0.5 if config.scaling_factor is None else config.scaling_factor
    if is_split:
        attended = _attend_split(query, keys.array, values.array, segments, config, scale, window, interpret)
    else:
        per_token = [segments]
        if group is not None and window is not None:
            # Places have padding, so that distances in a sequence are not those in a row.
            per_token.append(cast(NamedArray, pos_ids).rearrange(rows).array)
        by_row, by_row_and_head = sharding_of(Batch), sharding_of(Batch, None, config.KVHeads)
        inputs = (by_row_and_head,) * 3 + (by_row,) * len(per_token)
        kernel = kernel_of(config, scale, window, group=group, interpret=interpret)
        run = on_each_shard(kernel, inputs, by_row_and_head)
        attended = run(query.array, keys.array, values.array, *per_token)
    heads = NamedArray(attended, query.axes).flatten_axes(("kv_head", "q_heads_per_group"), "heads")
    return attention.o_proj(heads.astype(x.dtype), key=None)


def _segments_of(mask: AttentionMask) -> NamedArray:
    """Return the segment ids of a causal mask, which are those of queries and keys."""
    # Subclasses mask more pairs.
    plain = type(mask) is AttentionMask and mask.is_causal and mask.causal_offset is mask.explicit_mask is None
    if not plain or mask.segment_ids is None:
        raise NotImplementedError(
            "attention on GPU, or of positions that are split over devices, takes causal masks with segments, not "
            f"{type(mask).__name__}; set model.attn_backend: JAX_FLASH and no "
            "trainer.tensor_parallel_axes: [position]"
        )
    return mask.segment_ids[0]


def kernel_of(
    config: AttentionConfig,
    scale: float,
    window: int | None = None,
    *,
    group: GroupRow | None = None,
    interpret: bool = False,
) -> Attend:
    """Return the attention of rows with the kernel of an attention module.

    Args:
        config: kernel and cap of the scores.
        scale: multiplies the scores before the cap.
        window: last positions of a sequence that a token attends to, its own included; None for all. With `group`, the
            function takes positions in the sequences `[row, position]`, too.
        group: parts of a row with a shared prompt; None for other rows.
        interpret: whether to interpret the kernels of TPUs and GPUs.

    Raises:
        NotImplementedError: if the kernel does not support the window; see `AttentionKernel.supports_shared_prompts`.
    """
    backend, cap = config.attn_backend, config.logits_soft_cap
    match backend:
        case AttentionBackend.SPLASH | GpuBackend.PALLAS if group is not None and window is not None:
            raise NotImplementedError(
                f"rows with shared prompts do not support attention windows ({window} positions) with "
                f"model.attn_backend: {backend.value}; set rollouts.share_prompts to false"
            )
        case AttentionBackend.SPLASH:
            block = config.flash_attention_block_size or SPLASH_BLOCK

            def attend(query: Array, keys: Array, values: Array, segments: Array) -> Array:
                shape, heads = (query.shape[1], keys.shape[1]), query.shape[2] * query.shape[3]
                kernel = splash_kernel(shape, heads, block=block, soft_cap=cap, interpret=interpret)
                return splash_attention(kernel, query, keys, values, segments[:, -shape[0] :], segments, scale=scale)
        case GpuBackend.PALLAS if cap is window is None:
            attend = functools.partial(pallas_attention, scale=scale, interpret=interpret)
        case GpuBackend.PALLAS:
            attend = functools.partial(block_attention, scale=scale, soft_cap=cap, window=window)
        case _:
            attend = functools.partial(dense_attention, scale=scale, soft_cap=cap, window=window)
    return attend if group is None else functools.partial(_group_attention, group=group, attend=attend)


def _group_attention(
    query: Float[Array, "batch position kv_head group head_size"],
    keys: Float[Array, "batch position kv_head head_size"],
    values: Float[Array, "batch position kv_head head_size"],
    *per_token: Int[Array, "batch position"],
    group: GroupRow,
    attend: Attend,
) -> Float[Array, "batch position kv_head group head_size"]:
    """Attend in rows with shared prompts.

    `per_token` has the `prompt_segment_ids` of the rows: an answer has the id of its prompt, and only one sequence in
    each part of a row has that id. Then positions in the sequences, if there is a window.
    """

    def split(array: Array) -> tuple[Array, Array]:
        """Return `[row, position, ...]` of the prompts and `[row · answer, position, ...]` of the answers."""
        prompt, rest = array[:, : group.prompt_length], array[:, group.prompt_length :]
        return prompt, rest.reshape(-1, group.answer_length, *array.shape[2:])

    def with_prompt(prompt: Array, own: Array) -> Array:
        return jnp.concatenate([jnp.repeat(prompt, group.answers, axis=0), own], axis=1)

    (query_p, query_a), *others = (split(array) for array in (query, keys, values, *per_token))
    of_prompt = attend(query_p, *(prompt for prompt, _ in others))
    of_answers = attend(query_a, *(with_prompt(prompt, own) for prompt, own in others))
    return jnp.concatenate([of_prompt, of_answers.reshape(len(query), -1, *query.shape[2:])], axis=1)


def _attend_split(
    query: NamedArray,
    keys: Array,
    values: Array,
    segments: Array,
    config: AttentionConfig,
    scale: float,
    window: int | None,
    interpret: bool,
) -> Array:
    """Attend with positions that are split over devices."""
    Batch, Position = query.resolve_axis("batch"), query.resolve_axis(POSITION)
    axis, own, whole = physical_axis_name(Position), sharding_of(Batch, Position), sharding_of(Batch, None)
    cap = config.logits_soft_cap
    if config.attn_backend is AttentionBackend.SPLASH:
        kernel = splash_kernel(
            (Position.size, Position.size),
            query.axis_size("kv_head") * query.axis_size("q_heads_per_group"),
            block=config.flash_attention_block_size or SPLASH_BLOCK,
            soft_cap=cap,
            window=window,
            shards=context_shards(),
            interpret=interpret,
        )
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(None, axis))
        inputs = (kernel.manual_sharding_spec(sharding), own, whole, whole, own, whole)
        run = on_each_shard(functools.partial(splash_attention, scale=scale), inputs, own)
        return run(kernel, query.array, keys, values, segments, segments)

    def attend(query: Array, keys: Array, values: Array, segments: Array) -> Array:
        first = jax.lax.axis_index(cast(str, axis)) * query.shape[1]
        return block_attention(query, keys, values, segments, first=first, scale=scale, soft_cap=cap, window=window)

    return on_each_shard(attend, (own, whole, whole, whole), own)(query.array, keys, values, segments)
