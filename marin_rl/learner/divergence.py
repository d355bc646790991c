# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Per-token divergences between a policy and a teacher over the whole vocabulary, computed in blocks on a mask.

`[batch, position, vocab]` is never materialized, see `marin_rl.learner.blocks`.
"""

import functools
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Float, Float32

from marin_rl.batching.rl_example import to_predictors, to_tokens
from marin_rl.learner.attention_layers import context_shards
from marin_rl.learner.blocks import (
    Block,
    backpropagate,
    gather,
    head_arrays,
    head_logits,
    join_tokens,
    masked_tokens,
    over_blocks,
    scatter,
    set_block,
    shards_of,
    split_tokens,
)
from marin_rl.objectives.divergence import Divergence, divergence_terms


def token_divergences(
    policy: tuple[NamedArray, NamedArray],
    teacher: tuple[NamedArray, NamedArray],
    mask: NamedArray,
    **options: Any,
) -> NamedArray:
    """Compute the divergence between the predictive distributions of every token on a mask.

    Args:
        policy: activations `{batch, position, embed}`, from
            [`policy_activations`][marin_rl.learner.logprobs.policy_activations], and head `{embed, vocab}`.
        teacher: the same of the teacher, which may have another `embed`; without gradient.
        mask: `{batch, position}`, tokens to compute.
        **options: `divergence`, `mixture`, `temperature` and `block_size` of `blockwise_divergence`.

    Returns:
        Nats, `{batch, position}` float32, aligned with the tokens; 0 off the mask.
    """
    axes = mask.axes
    divergences = blockwise_divergence(
        *head_arrays(*policy, axes),
        *head_arrays(*jax.lax.stop_gradient(teacher), axes),
        to_predictors(mask).array,
        shards=shards_of(axes[0]),
        position_shards=context_shards(),
        **options,
    )
    return to_tokens(hax.named(divergences, axes))


def blockwise_divergence(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    teacher_activations: Float[Array, "batch position teacher_embed"],
    teacher_head: Float[Array, "teacher_embed teacher_vocab"],
    mask: Bool[Array, "batch position"],
    *,
    divergence: Divergence,
    mixture: float = 0.5,
    temperature: float = 1.0,
    block_size: int,
    shards: int = 1,
    position_shards: int = 1,
) -> Float32[Array, "batch position"]:
    """Compute the divergence between policy and teacher on `mask`, one block of positions at a time.

    Vocabularies of different sizes, which padding of the heads causes, are compared on the ids that both have: both
    distributions are normalized over them.

    Args:
        activations: `[batch, position, embed]`, of the policy; off the mask any value, NaN included.
        lm_head: `[embed, vocab]`, of the policy.
        teacher_activations: `[batch, position, teacher_embed]`.
        teacher_head: `[teacher_embed, teacher_vocab]`.
        mask: `[batch, position]`, True at positions to compare.
        divergence: which one.
        mixture: as for [`divergence_terms`][marin_rl.objectives.divergence.divergence_terms].
        temperature: divides the logits of both, above 0.
        block_size: as for [`blockwise_logprobs`][marin_rl.learner.logprobs.blockwise_logprobs]; also `shards` and
            `position_shards`.
        shards: number of devices over which the rows are split.
        position_shards: number of devices over which the positions are split.

    Returns:
        Nats, `[batch, position]` float32; 0 off the mask. They support one reverse-mode differentiation with respect
        to the policy; the teacher is a constant.
    """
    parts, vocab = (shards, position_shards), min(lm_head.shape[1], teacher_head.shape[1])
    trunk, teacher_trunk, mask_parts = (
        split_tokens(array, *parts) for array in (activations, teacher_activations, mask)
    )
    inputs = trunk, lm_head[:, :vocab], teacher_trunk, teacher_head[:, :vocab], mask_parts
    options = divergence, mixture, temperature, min(block_size, mask_parts.shape[1])
    return join_tokens(_divergences(*inputs, *options), mask.shape, *parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _divergences(
    activations: Float[Array, "shard token embed"],
    lm_head: Float[Array, "embed vocab"],
    teacher_activations: Float[Array, "shard token teacher_embed"],
    teacher_head: Float[Array, "teacher_embed vocab"],
    mask: Bool[Array, "shard token"],
    divergence: Divergence,
    mixture: float,
    temperature: float,
    block_size: int,
) -> Float32[Array, "shard token"]:
    slots = masked_tokens(mask, block_size)

    def compare(block: Block, results: Array) -> Array:
        logs = _log_softmax((activations, lm_head), (teacher_activations, teacher_head), block, temperature)
        terms, _ = divergence_terms(divergence, *logs, mixture)
        return set_block(results, jnp.sum(terms, axis=-1), block.start)

    return scatter(over_blocks(slots, mask, block_size, compare, jnp.zeros(slots.shape, jnp.float32)), mask)


def _log_softmax(
    policy: tuple[Array, Array], teacher: tuple[Array, Array], block: Block, temperature: float
) -> tuple[Float32[Array, "shard block vocab"], Float32[Array, "shard block vocab"]]:
    logits = (head_logits(gather(trunk, block.slots), head, temperature) for trunk, head in (policy, teacher))
    # In one array, so that equal logits have equal log-probabilities, bit for bit.
    of_policy, of_teacher = jax.nn.log_softmax(jnp.stack([*logits]))
    return of_policy, of_teacher


def _forward(*arguments: Any) -> tuple[Array, tuple[Array, ...]]:
    return _divergences(*arguments), arguments[:5]


def _backward(
    divergence: Divergence,
    mixture: float,
    temperature: float,
    block_size: int,
    residuals: tuple[Array, ...],
    cotangents: Float32[Array, "shard token"],
) -> tuple[Array, Array, None, None, None]:
    activations, lm_head, teacher_activations, teacher_head, mask = residuals

    def slopes(block: Block, _: Array) -> Array:
        logs = _log_softmax((activations, lm_head), (teacher_activations, teacher_head), block, temperature)
        _, weights = divergence_terms(divergence, *logs, mixture)
        return weights - jnp.exp(logs[0]) * jnp.sum(weights, axis=-1, keepdims=True)

    gradients = backpropagate(activations, lm_head, mask, cotangents, temperature, block_size, slopes)
    return *gradients, None, None, None


_divergences.defvjp(_forward, _backward)
