# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Blocks of the tokens on a mask, for functions of the logits that never hold `[batch, position, vocab]`.

The positions of each device that are on the mask are gathered, and the head runs over them in blocks.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import current_thread_local_mapping, physical_axis_size
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from marin_rl.utils.levanter_line import shard

Carry = TypeVar("Carry")

SMALL_BLOCKS = 8
"""The tokens after the last whole block run in blocks of this fraction of its size."""


class Block(NamedTuple):
    """Some of the tokens on the mask."""

    slots: Int32[Array, "shard block"]
    """Indices of the tokens; an out-of-range index for a place without a token."""
    start: Int32[Array, ""]
    """Number of tokens before the block."""
    size: int
    """Number of tokens of the block."""


def split_tokens(
    array: Shaped[Array, "batch position *rest"], shards: int, position_shards: int
) -> Shaped[Array, "shard token *rest"]:
    """Return the tokens of each device, if rows and positions are split over some."""
    (rows, positions), rest = array.shape[:2], array.shape[2:]
    parts = array.reshape(shards, rows // shards, position_shards, positions // position_shards, *rest)
    return jnp.swapaxes(parts, 1, 2).reshape(shards * position_shards, -1, *rest)


def join_tokens(
    array: Shaped[Array, "shard token *rest"], shape: tuple[int, ...], shards: int, position_shards: int
) -> Shaped[Array, "batch position *rest"]:
    """Undo `split_tokens`, given the shape of the rows."""
    (rows, positions), rest = shape, array.shape[2:]
    parts = array.reshape(shards, position_shards, rows // shards, positions // position_shards, *rest)
    return jnp.swapaxes(parts, 1, 2).reshape(*shape, *rest)


def shards_of(Batch: Axis) -> int:
    """Return the number of devices over which the current axis mapping splits the rows; 1 without a mapping."""
    if current_thread_local_mapping() is None:
        return 1
    return math.gcd(physical_axis_size(Batch) or 1, Batch.size)


def head_arrays(
    activations: NamedArray, lm_head: NamedArray, axes: Sequence[Axis]
) -> tuple[Float[Array, "batch position embed"], Float[Array, "embed vocab"]]:
    """Return the arrays of activations, whose axes are `axes` and one more, and of the head that is applied to them."""
    (Embed,) = (axis for axis in activations.axes if axis not in axes)
    # Gather the head after the trunk's forward pass, and reduce its gradient before the trunk's backward pass. XLA may
    # otherwise hold the gathered head during all microbatches, and the gradient during the backward pass.
    activations, lm_head = jax.lax.optimization_barrier((activations, lm_head))
    # The head may be sharded along its embedding axis. Gather it here once instead of in every block.
    lm_head = shard(lm_head)
    return activations.rearrange((*axes, Embed)).array, lm_head.rearrange((Embed, ...)).array


def head_logits(
    activations: Float[Array, "shard block embed"], lm_head: Float[Array, "embed vocab"], temperature: float
) -> Float32[Array, "shard block vocab"]:
    """Compute the logits of a block, in float32 for every dtype of the inputs."""
    return jnp.einsum("ste,ev->stv", activations, lm_head, preferred_element_type=jnp.float32) / temperature


def over_blocks(
    slots: Int32[Array, "shard slot"],
    mask: Bool[Array, "shard token"],
    block_size: int,
    run: Callable[[Block, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run a function of block and carry over all tokens on the mask, block by block; `slots` are its `masked_tokens`.

    The tokens of the fullest shard determine the blocks: some of `block_size`, and then some of an eighth of it for the
    rest. Their number is computed at run time, so a new mask never triggers compilation.
    """
    fullest = jnp.max(jnp.sum(mask, axis=-1, dtype=jnp.int32))
    whole, small = fullest // block_size, max(block_size // SMALL_BLOCKS, 1)
    rest = (fullest - whole * block_size + small - 1) // small

    def run_at(start: Int32[Array, ""], size: int, carry: Carry) -> Carry:
        return run(Block(get_block(slots, start, size), start, size), carry)

    carry = jax.lax.fori_loop(0, whole, lambda index, carry: run_at(index * block_size, block_size, carry), carry)
    first = whole * block_size
    return jax.lax.fori_loop(0, rest, lambda index, carry: run_at(first + index * small, small, carry), carry)


def backpropagate(
    activations: Float[Array, "shard token embed"],
    lm_head: Float[Array, "embed vocab"],
    mask: Bool[Array, "shard token"],
    cotangents: Float32[Array, "shard token"],
    temperature: float,
    block_size: int,
    slopes: Callable[[Block, Float[Array, "shard block embed"]], Float32[Array, "shard block vocab"]],
) -> tuple[Float[Array, "shard token embed"], Float[Array, "embed vocab"]]:
    """Compute the gradient of `Σ_t cotangent_t · value_t` with respect to activations and head, block by block.

    Off `mask`, `activations` may have any value. `slopes` computes the gradients of the values of a block with respect
    to the logits, from its activations. `temperature` divides the logits.
    """
    slots = masked_tokens(mask, block_size)
    scaled_cotangents = cotangents / temperature

    def add(block: Block, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
        of_activations, of_head = gradients
        inputs = gather(activations, block.slots)
        of_logits = slopes(block, inputs) * gather(scaled_cotangents, block.slots)[..., None]
        # Mixed precision: factors of a product are in the head's dtype, sums are in float32.
        of_logits = of_logits.astype(lm_head.dtype)
        to_inputs = jnp.einsum("stv,ev->ste", of_logits, lm_head, preferred_element_type=jnp.float32)
        to_head = jnp.einsum("ste,stv->sev", inputs, of_logits, preferred_element_type=jnp.float32)
        return set_block(of_activations, to_inputs, block.start), of_head + to_head

    zeros = (
        jnp.zeros((*slots.shape, activations.shape[-1]), activations.dtype),
        jnp.zeros((mask.shape[0], *lm_head.shape), jnp.float32),
    )
    of_activations, of_head = over_blocks(slots, mask, block_size, add, zeros)
    return scatter(of_activations, mask), jnp.sum(of_head, axis=0).astype(lm_head.dtype)


def masked_tokens(mask: Bool[Array, "shard token"], block_size: int) -> Int32[Array, "shard slot"]:
    """Return the indices of the tokens on the mask in order, padded with an out-of-range index."""
    tokens = mask.shape[-1]
    masked = jnp.sort(jnp.where(mask, jnp.arange(tokens, dtype=jnp.int32), tokens), axis=-1)
    # Room for the last block, whole or small.
    return jnp.pad(masked, ((0, 0), (0, block_size)), constant_values=tokens)


def gather(
    per_token: Shaped[Array, "shard token *rest"], slots: Int32[Array, "shard block"]
) -> Shaped[Array, "shard block *rest"]:
    """Gather values at `slots`; out-of-range slots read 0."""
    indices = jax.lax.expand_dims(slots, range(2, per_token.ndim))
    return jnp.take_along_axis(per_token, indices, axis=1, mode="fill", fill_value=0)


def get_block(
    per_slot: Shaped[Array, "shard slot *rest"], start: Int32[Array, ""], size: int
) -> Shaped[Array, "shard block *rest"]:
    """Return the values of a block."""
    return jax.lax.dynamic_slice_in_dim(per_slot, start, size, axis=1)


def set_block(
    per_slot: Shaped[Array, "shard slot *rest"], part: Shaped[Array, "shard block *rest"], start: Int32[Array, ""]
) -> Shaped[Array, "shard slot *rest"]:
    """Replace the values of a block."""
    return jax.lax.dynamic_update_slice_in_dim(per_slot, part.astype(per_slot.dtype), start, axis=1)


def scatter(
    per_slot: Shaped[Array, "shard slot *rest"], mask: Bool[Array, "shard token"]
) -> Shaped[Array, "shard token *rest"]:
    """Move values from the first slots back to the tokens on the mask; 0 off it."""
    slot = jnp.maximum(jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
    extra = range(2, per_slot.ndim)
    values = jnp.take_along_axis(per_slot, jax.lax.expand_dims(slot, extra), axis=1, mode="clip")
    return jnp.where(jax.lax.expand_dims(mask, extra), values, 0)
