# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Per-token log-probabilities and entropy, computed blockwise.

`[batch, position, vocab]` is never made: positions are taken a block at a time, and the backward pass
computes a block's logits again instead of keeping them.
"""

import functools

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Float, Int
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.alignment import to_predictors, to_tokens
from marin_rl.batching.rl_example import RlExample


def token_logprobs(
    model: LmHeadModel, batch: RlExample, *, temperature: float, block_size: int
) -> tuple[NamedArray, NamedArray]:
    """Log-probability of every loss token given those before it, and the entropy of what was predicted there.

    ```
    log π(x_t | x_<t)  = z[x_t] - logsumexp(z)
    H_t                = -Σ_v softmax(z)_v log softmax(z)_v       z = logits_{t-1} / temperature
    ```

    Args:
        model: a language model; its activations and head are used, never its full logits.
        batch: the tokens, their segments and their loss mask.
        temperature: divides the logits, above 0; the temperature at which the rollouts were sampled.
        block_size: positions of a row whose logits exist at the same time.

    Returns:
        Log-probabilities and entropies (nats), both `{batch, position}` float32, aligned with the tokens
        (`marin_rl.batching.alignment`); 0 off the loss mask. The entropy carries no gradient.
    """
    activations = model.activations(batch.input_ids, batch.attention_mask, key=None)
    if isinstance(activations, tuple):  # mixture-of-experts models also return a balancing loss
        activations = activations[0]
    Batch, Pos = batch.input_ids.axes
    targets = to_predictors(batch.input_ids)
    # What the model finds where nothing is asked may overflow, and 0 · inf is NaN in the gradient of the head.
    activations = hax.where(to_predictors(batch.loss_mask), activations, 0)
    logprobs, entropies = blockwise_logprobs(
        activations.rearrange((Batch, Pos, model.Embed)).array,
        model.get_lm_head().rearrange((model.Embed, model.Vocab)).array,
        targets.array,
        temperature=temperature,
        block_size=block_size,
    )

    def on_the_mask(values: Array) -> NamedArray:
        return hax.where(batch.loss_mask, to_tokens(hax.named(values, (Batch, Pos))), 0.0)

    return on_the_mask(logprobs), on_the_mask(entropies)


def blockwise_logprobs(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch position"],
    *,
    temperature: float,
    block_size: int,
) -> tuple[Float[Array, "batch position"], Float[Array, "batch position"]]:
    """Log-probabilities of `targets` and entropies, `block_size` positions at a time.

    Peak memory of the logits is `batch · block_size · vocab` floats, forward and backward. Logits are
    accumulated and reduced in float32 whatever the inputs are.

    Args:
        activations: `[batch, position, embed]`.
        lm_head: `[embed, vocab]`.
        targets: `[batch, position]`, ids below `vocab`.
        temperature: divides the logits; above 0.
        block_size: positions in a block, at least 1; the last block may be smaller.

    Returns:
        Log-probabilities and entropies (nats), `[batch, position]` float32.
    """
    # The head's gradient is a sum over blocks: in float32 here, it is rounded to the head's dtype only once.
    score = functools.partial(_score_block, lm_head.astype(jnp.float32), lm_head.dtype, temperature)
    positions = activations.shape[1]
    if block_size >= positions:
        return score((activations, targets))
    padding = -positions % block_size
    blocks = (
        _split_into_blocks(jnp.pad(activations, ((0, 0), (0, padding), (0, 0))), block_size),
        _split_into_blocks(jnp.pad(targets, ((0, 0), (0, padding))), block_size),
    )
    logprobs, entropies = jax.lax.map(jax.checkpoint(score), blocks)
    return _join_blocks(logprobs)[:, :positions], _join_blocks(entropies)[:, :positions]


def _score_block(
    lm_head: Float[Array, "embed vocab"],
    dtype: jnp.dtype,
    temperature: float,
    block: tuple[Float[Array, "batch block embed"], Int[Array, "batch block"]],
) -> tuple[Float[Array, "batch block"], Float[Array, "batch block"]]:
    activations, targets = block
    products = jnp.einsum("bpe,ev->bpv", activations, lm_head.astype(dtype), preferred_element_type=jnp.float32)
    logits = products / temperature
    normalizers = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    # Not logsumexp(z) - Σ p z, which for logits far from 0 is the small difference of two large numbers.
    frozen = jax.lax.stop_gradient(logits - normalizers[..., None])
    entropies = -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)
    return chosen - normalizers, entropies


def _split_into_blocks(array: Array, block_size: int) -> Array:
    batch, positions, *rest = array.shape
    return jnp.moveaxis(array.reshape(batch, positions // block_size, block_size, *rest), 1, 0)


def _join_blocks(array: Array) -> Array:
    blocks, batch, block_size = array.shape
    return jnp.moveaxis(array, 0, 1).reshape(batch, blocks * block_size)
