# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Per-token log-probabilities and entropy, computed in blocks and only for tokens with loss.

`[batch, position, vocab]` is never materialized. The positions on each device that predict a token with loss are
gathered, and the head runs over them in blocks. The backward pass recomputes the logits of each block instead of
storing them.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rl_example import RlExample, TokenRows, to_predictors, to_tokens
from marin_rl.learner.attention_layers import context_shards, with_attention_kernel
from marin_rl.learner.blocks import (
    Block,
    backpropagate,
    gather,
    get_block,
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
from marin_rl.models.mixture import Routing, mixture_shape, routed_activations, with_routing
from marin_rl.types import no_expert

LOGPROB_BLOCK_SIZE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""Tokens on each device whose logits are in memory at once, by platform, if the config does not set their number."""
Statistic = Callable[
    [Float32[Array, "shard block vocab"], Float32[Array, "shard block vocab"], Int[Array, "shard block"]],
    Shaped[Array, "shard block"],
]
"""Computes a value of each token of a block from its logits, their log-softmax and the target."""


def entropy(
    logits: Float32[Array, "shard block vocab"],
    logs: Float32[Array, "shard block vocab"],
    targets: Int[Array, "shard block"],
) -> Float32[Array, "shard block"]:
    """Compute the entropy of the predictive distribution (nats)."""
    # Not logsumexp(z) - Σ p z: for logits far from 0 that is the small difference of two large numbers.
    return -jnp.sum(jnp.exp(logs) * logs, axis=-1)


def is_most_likely(
    logits: Float32[Array, "shard block vocab"],
    logs: Float32[Array, "shard block vocab"],
    targets: Int[Array, "shard block"],
) -> Bool[Array, "shard block"]:
    """Return whether the target has the largest logit, the first one of equal logits."""
    return jnp.argmax(logits, axis=-1) == targets


def policy_activations(model: LmHeadModel, batch: TokenRows) -> NamedArray:
    """Run the model's trunk, without the head.

    Returns:
        `{batch, position, embed}` in the model's precision, aligned with the predicting positions: entry `t` predicts
        token `t + 1`.
    """
    return activations_and_routing(model, batch)[0]


def activations_and_routing(
    model: LmHeadModel, batch: TokenRows
) -> tuple[NamedArray, NamedArray | None, Routing | None]:
    """Run the trunk as `policy_activations`.

    A mixture of experts uses the experts in the batch, if there are any.

    Returns:
        The activations; the chosen experts of a mixture, `{batch, position, layer, top_experts}`; and the statistics of
        its router, if the batch has weights for them.
    """
    model = with_attention_kernel(model, batch)
    input_ids, position_ids = batch.to_inputs(batch.input_ids), batch.to_inputs(batch.position_ids)
    if mixture_shape(model.config) is None:
        activations = model.activations(input_ids, batch.attention_mask, key=None, pos_ids=position_ids)
        return batch.from_inputs(cast(NamedArray, activations)), None, None
    own = {"given": getattr(batch, "experts", None), "token_weights": getattr(batch, "router_weights", None)}
    own = {name: None if array is None else batch.to_inputs(array) for name, array in own.items()}
    activations, experts, routing = routed_activations(
        with_routing(model, **own), input_ids, batch.attention_mask, position_ids
    )
    return batch.from_inputs(activations), batch.from_inputs(experts, no_expert(experts.dtype)), routing


def learner_logprobs(
    model: LmHeadModel, batch: RlExample, *, temperature: float = 1.0, block_size: int = LOGPROB_BLOCK_SIZE["cpu"]
) -> NamedArray:
    """Compute log π (nats) of every scored token, `{batch, position}` float32, 0 elsewhere; see `token_logprobs`."""
    trunk = policy_activations(model, batch)
    return token_logprobs(trunk, model.get_lm_head(), batch, temperature=temperature, block_size=block_size)[0]


def token_logprobs(
    activations: NamedArray,
    lm_head: NamedArray,
    batch: RlExample,
    *,
    temperature: float,
    block_size: int,
    statistic: Statistic = entropy,
) -> tuple[NamedArray, NamedArray]:
    """Compute the log-probability of every scored token and a statistic of its predictive distribution.

    ```
    log π(x_t | x_<t)  = z[x_t] - logsumexp(z)
    H_t                = -Σ_v softmax(z)_v log softmax(z)_v       z = activations_{t-1} · lm_head / temperature
    ```

    Args:
        activations: `{batch, position, embed}`, from
            [`policy_activations`][marin_rl.learner.logprobs.policy_activations].
        lm_head: `{embed, vocab}`, the model's head.
        batch: the tokens and the mask of those to score.
        temperature: divides the logits, above 0; the temperature at which the rollouts were sampled.
        block_size: tokens per device with logits in memory at the same time, at least 1.
        statistic: second result: [`entropy`][marin_rl.learner.logprobs.entropy] or
            [`is_most_likely`][marin_rl.learner.logprobs.is_most_likely].

    Returns:
        Log-probabilities (nats) and statistics, both `{batch, position}` float32, aligned with the tokens; 0 off
        `batch.scored_mask`. The statistic carries no gradient.
    """
    axes = batch.input_ids.axes
    logprobs, statistics = blockwise_logprobs(
        *head_arrays(activations, lm_head, axes),
        to_predictors(batch.input_ids).array,
        to_predictors(batch.scored_mask).array,
        temperature=temperature,
        block_size=block_size,
        shards=shards_of(axes[0]),
        position_shards=context_shards(),
        statistic=statistic,
    )
    return to_tokens(hax.named(logprobs, axes)), to_tokens(hax.named(statistics, axes))


def blockwise_logprobs(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    targets: Int[Array, "batch position"],
    mask: Bool[Array, "batch position"],
    *,
    temperature: float,
    block_size: int,
    shards: int = 1,
    position_shards: int = 1,
    statistic: Statistic = entropy,
) -> tuple[Float32[Array, "batch position"], Float32[Array, "batch position"]]:
    """Compute log-probabilities of `targets` and a statistic on `mask`, one block of positions at a time.

    The head runs on the `n` masked positions of each shard, with `n` that of the fullest shard: in blocks of
    `block_size`, and then in blocks of an eighth of it for the rest, so that few logits are computed in vain. The
    number of blocks is computed at run time, so a new mask never triggers compilation. `block_size · vocab` logits of
    each shard are in memory at a time, forward and backward. Every block reads and writes the gradient of the head,
    `embed · vocab` numbers, once. Products are accumulated and logits reduced in
    float32 for every input dtype. The gradient of the head is rounded to the head's dtype once, after the last block.

    Args:
        activations: `[batch, position, embed]`; off the mask any value, NaN included.
        lm_head: `[embed, vocab]`.
        targets: `[batch, position]`, ids below `vocab`.
        mask: `[batch, position]`, True at positions to score.
        temperature: divides the logits; above 0.
        block_size: positions of a shard in a block, at least 1.
        shards: number of devices over which the rows are split; a divisor of `batch`. It does not change results:
            every shard sums its own gradient of the head, and only the totals are communicated.
        position_shards: number of devices over which the positions are split; a divisor of `position`.
        statistic: computes the second result of each block.

    Returns:
        Log-probabilities (nats) and statistics, `[batch, position]` float32; 0 off the mask. The log-probabilities
        support one reverse-mode differentiation; statistics are constants.
    """
    parts = shards, position_shards
    block_size = min(block_size, mask.size // (shards * position_shards))
    of_tokens = (split_tokens(array, *parts) for array in (targets, mask))
    inputs = split_tokens(activations, *parts), lm_head, *of_tokens
    logprobs, statistics = _logprobs(*inputs, temperature, block_size, statistic)
    return join_tokens(logprobs, mask.shape, *parts), join_tokens(statistics, mask.shape, *parts)


def blockwise_top_logprobs(
    activations: Float[Array, "batch position embed"],
    lm_head: Float[Array, "embed vocab"],
    mask: Bool[Array, "batch position"],
    *,
    count: int,
    block_size: int,
    shards: int = 1,
    position_shards: int = 1,
) -> tuple[Int32[Array, "batch position top"], Float32[Array, "batch position top"]]:
    """Find the likeliest tokens and their log-probabilities on `mask` at temperature 1, one block at a time.

    Args:
        activations: `[batch, position, embed]`; off the mask any value, NaN included.
        lm_head: `[embed, vocab]`.
        mask: `[batch, position]`, True at positions to score.
        count: number of tokens of each position, at most `vocab`.
        block_size: as for [`blockwise_logprobs`][marin_rl.learner.logprobs.blockwise_logprobs]; also `shards` and
            `position_shards`.
        shards: number of devices over which the rows are split.
        position_shards: number of devices over which the positions are split.

    Returns:
        Ids and log-probabilities (nats), `[batch, position, count]`, the likeliest first and the lower id first among
        equals; 0 off the mask. They cannot be differentiated.
    """
    parts = shards, position_shards
    inputs, tokens = (split_tokens(array, *parts) for array in (activations, mask))
    block_size = min(block_size, tokens.shape[1])
    slots = masked_tokens(tokens, block_size)

    def score(block: Block, results: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = head_logits(gather(inputs, block.slots), lm_head, 1.0)
        top, ids = jax.lax.top_k(logits, count)
        logs = top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return set_block(results[0], ids, block.start), set_block(results[1], logs, block.start)

    empty = jnp.zeros((*slots.shape, count), jnp.int32), jnp.zeros((*slots.shape, count), jnp.float32)
    ids, logs = over_blocks(slots, tokens, block_size, score, empty)
    return (
        join_tokens(scatter(ids, tokens), mask.shape, *parts),
        join_tokens(scatter(logs, tokens), mask.shape, *parts),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _logprobs(*arguments: Any) -> tuple[Array, Array]:
    return _forward(*arguments)[0]


def _forward(
    activations: Float[Array, "shard token embed"],
    lm_head: Float[Array, "embed vocab"],
    targets: Int[Array, "shard token"],
    mask: Bool[Array, "shard token"],
    temperature: float,
    block_size: int,
    statistic: Statistic,
) -> tuple[tuple[Float32[Array, "shard token"], Float32[Array, "shard token"]], tuple[Array, ...]]:
    slots = masked_tokens(mask, block_size)

    def score(block: Block, results: tuple[Array, ...]) -> tuple[Array, ...]:
        logits = head_logits(gather(activations, block.slots), lm_head, temperature)
        normalizers = jax.nn.logsumexp(logits, axis=-1)
        block_targets = gather(targets, block.slots)
        chosen = jnp.take_along_axis(logits, block_targets[..., None], axis=-1)[..., 0]
        logs = logits - normalizers[..., None]
        scored = (chosen - normalizers, statistic(logits, logs, block_targets), normalizers)
        return tuple(set_block(result, part, block.start) for result, part in zip(results, scored, strict=True))

    zeros = jnp.zeros(slots.shape, jnp.float32)
    logprobs, statistics, normalizers = over_blocks(slots, mask, block_size, score, (zeros,) * 3)
    residuals = (activations, lm_head, targets, mask, normalizers)
    return (scatter(logprobs, mask), scatter(statistics, mask)), residuals


def _backward(
    temperature: float,
    block_size: int,
    statistic: Statistic,
    residuals: tuple[Array, ...],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None, None]:
    activations, lm_head, targets, mask, normalizers = residuals

    def slopes(block: Block, inputs: Array) -> Array:
        logits = head_logits(inputs, lm_head, temperature)
        probabilities = jnp.exp(logits - get_block(normalizers, block.start, block.size)[..., None])
        # A comparison instead of a scatter, so that devices that shard the vocabulary need not exchange logits.
        is_target = gather(targets, block.slots)[..., None] == jnp.arange(lm_head.shape[1])
        return is_target - probabilities

    gradients = backpropagate(activations, lm_head, mask, cotangents[0], temperature, block_size, slopes)
    return *gradients, None, None


_logprobs.defvjp(_forward, _backward)
