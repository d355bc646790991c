# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lower bounds of the time of each phase of a step: rooflines of compute, main memory and links.

`seconds = max(flops / peak, bytes / memory bandwidth, sent / interconnect, sent / network, copied / host link)`

All quantities are those of one chip. The bound assumes that compute, memory and communication overlap, and that each
runs at its peak. A CPU runs one operation after another, so its terms are added. Source: Williams, Waterman and
Patterson 2009, Roofline; Austin et al. 2025, How to Scale Your Model, chapter 1.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import haliax.nn as hnn
import jax
import jax.numpy as jnp

from marin_rl.chips import Chip, Number
from marin_rl.planning.compiling import Measured
from marin_rl.planning.programs import RunShapes, own_scorings
from marin_rl.sampling.prefill import PrefillShape
from marin_rl.sampling.sizes import SamplerSizes


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one chip."""

    flops: Number = 0.0
    """Floating-point operations of matrix products."""
    traffic: Number = 0.0
    """Bytes from and to main memory."""
    interconnect: Number = 0.0
    """Bytes sent within the slice."""
    network: Number = 0.0
    """Bytes sent to other slices."""
    host: Number = 0.0
    """Bytes copied to or from the host."""

    def times(self, count: Number) -> "Work":
        """Return the work of several executions."""
        return Work(*(count * value for value in dataclasses.astuple(self)))


class Bound(NamedTuple):
    """The least time of some work on a chip."""

    seconds: float
    """The largest term."""
    limit: str
    """Name of the largest term."""


def bound(work: Work, chip: Chip) -> Bound:
    """Return the roofline of some work; for a CPU the sum of all terms.

    >>> from marin_rl.chips import CHIPS
    >>> bound(Work(flops=197e12, traffic=1638e9), CHIPS["v5e"])
    Bound(seconds=2.0, limit='memory')
    """
    terms = {
        "compute": work.flops / chip.flops,
        "memory": work.traffic / chip.memory_bandwidth,
        "interconnect": work.interconnect / chip.interconnect,
        "network": work.network / chip.network,
        "host link": work.host / chip.host_link,
    }
    limit = max(terms, key=lambda name: terms[name])
    return Bound(math.fsum(terms.values()) if chip.platform == "cpu" else terms[limit], limit)


class StepSize(NamedTuple):
    """Rollouts of a step, all of one length."""

    groups: int
    """Number of prompts."""
    rollouts: int
    """Number of rollouts."""
    prompt_tokens: int
    """Tokens of a prompt."""
    answer_tokens: int
    """Sampled tokens of a rollout."""
    microbatches: int
    """Microbatches of all updates of a step."""
    updates: int
    """Updates of a step."""


class ModelWork(NamedTuple):
    """Matrix products of a model."""

    linear: float
    """Parameters of the linear layers that a token uses."""
    head: int
    """Parameters of the output head."""
    attention: int
    """Layers x heads x head size: attention to one position costs four times this in flops."""

    def forward(self, tokens: Number, positions: Number, head_tokens: Number) -> Number:
        """Return the flops of a forward pass.

        Args:
            tokens: number of tokens.
            positions: mean number of positions that a token attends to.
            head_tokens: number of tokens whose logits are computed.
        """
        return 2 * self.linear * tokens + 4 * self.attention * tokens * positions + 2 * self.head * head_tokens


def model_work(run: RunShapes, all_experts: bool = False) -> ModelWork:
    """Count the matrix products of a run's policy.

    Args:
        run: the run.
        all_experts: whether a token uses all experts of a mixture, as in the sampler.
    """
    policy, config = cast(Any, run.policy), cast(Any, run.config.model)

    def is_product(node: Any) -> bool:
        return isinstance(node, hnn.Linear | hnn.MoELinear)

    layers = [node for node in jax.tree.leaves(policy.transformer, is_leaf=is_product) if is_product(node)]
    linear = 0.0
    for node in layers:
        is_chosen = isinstance(node, hnn.MoELinear) and not all_experts
        share = config.num_experts_per_tok / config.n_routed_experts if is_chosen else 1
        linear += share * math.prod(node.weight.array.shape)
    head_size = getattr(config, "head_dim", None) or config.Embed.size // config.num_heads
    return ModelWork(linear, math.prod(policy.get_lm_head().array.shape), run.num_layers * config.num_heads * head_size)


def update_work(run: RunShapes, step: StepSize, measured: Measured | None) -> Work:
    """Return the work of all updates of a step.

    A backward pass costs two forward passes, and recomputed activations a third. Padding counts. The head is computed
    for tokens of answers, and again in the backward pass. A critic's separate trunk costs as much as the policy's.

    Args:
        run: the run.
        step: size of the step.
        measured: the compiled update, with the traffic of all microbatches of one update; None if it does not compile.
    """
    model, layout = model_work(run), run.layout
    chips = run.trainer.device_mesh.size
    tokens = step.microbatches * layout.rows_per_microbatch * layout.row_length
    recomputed = getattr(run.config.model, "gradient_checkpointing", True) is not False
    answers = step.rollouts * step.answer_tokens * run.config.updates.epochs
    layers = (4 if recomputed else 3) * _trunks(run) * model.forward(tokens, layout.attended, 0)
    flops = (layers + 4 * model.forward(0, 0, answers)) / chips
    return _with_traffic(flops, measured, step.updates)


def score_work(run: RunShapes, step: StepSize, measured: Measured | None) -> Work:
    """Return the work of all forward passes over the rollouts of a step, by the reference and the learner."""
    model, layout, own = model_work(run), run.layout, own_scorings(run.config)
    tokens = step.microbatches / run.config.updates.epochs * layout.rows_per_microbatch * layout.row_length
    count = own + run.config.kl.needs_reference
    layers = (count + own * (_trunks(run) - 1)) * model.forward(tokens, layout.attended, 0)
    flops = layers + count * model.forward(0, 0, step.rollouts * step.answer_tokens)
    return _with_traffic(flops / run.trainer.device_mesh.size, measured, count)


def model_flops(run: RunShapes, step: StepSize) -> Number:
    """Return the flops that the updates of a step need, of all chips: no padding, nothing computed twice.

    A prompt that rollouts share in a row counts once.
    """
    length, epochs = step.prompt_tokens + step.answer_tokens, run.config.updates.epochs
    prompts = step.rollouts if run.layout.group is None else step.rollouts / run.layout.group.answers
    answers = step.rollouts * step.answer_tokens * epochs
    tokens = prompts * step.prompt_tokens * epochs + answers
    model = model_work(run)
    return 3 * (_trunks(run) * model.forward(tokens, length / 2, 0) + model.forward(0, 0, answers))


def _trunks(run: RunShapes) -> int:
    critic = run.config.critic
    return 1 if critic is None or critic.shared_trunk else 2


def prefill_work(run: RunShapes, step: StepSize, measured: Measured | None) -> Work:
    """Return the work of the long calls for all prompts of a step, each processed once."""
    return _prefill_work(run, step, measured, run.sizes.prefill.long, _long_tokens(run, step))


def short_prefill_work(run: RunShapes, step: StepSize, measured: Measured | None) -> Work:
    """Return the work of the short calls for all prompts of a step."""
    return _prefill_work(run, step, measured, run.sizes.prefill.short, step.prompt_tokens - _long_tokens(run, step))


def _long_tokens(run: RunShapes, step: StepSize) -> int:
    return run.sizes.prefill.long_tokens(step.prompt_tokens)


def _prefill_work(
    run: RunShapes, step: StepSize, measured: Measured | None, shape: PrefillShape, tokens: Number
) -> Work:
    """Return the work of processing `tokens` of each prompt in calls of a shape."""
    sizes = run.sizes
    groups = math.ceil(step.groups / (sizes.shards * sizes.hosts))
    calls = math.ceil(groups * math.ceil(tokens / shape.chunk) / shape.rows)
    flops = model_work(run, all_experts=True).forward(shape.positions, step.prompt_tokens / 2, 0) / _model_axis(sizes)
    return _of_a_call(run, flops, measured, shape.rows * step.prompt_tokens / 2).times(calls)


def decode_work(run: RunShapes, step: StepSize, measured: Measured | None) -> Work:
    """Return the work of sampling all answers of a step, with on average half of an answer in the cache."""
    sizes, positions = run.sizes, step.prompt_tokens + step.answer_tokens / 2
    model_axis = _model_axis(sizes)
    flops = model_work(run, all_experts=True).forward(sizes.shard_slots, positions, sizes.shard_slots) / model_axis
    return _of_a_call(run, flops, measured, sizes.shard_slots * positions).times(decode_steps(step, sizes))


def _of_a_call(run: RunShapes, flops: Number, measured: Measured | None, cached: Number) -> Work:
    """Return the work of a program of the sampler that attends to `cached` tokens in the cache of a data shard.

    Accelerators read no other tokens of the cache; a CPU reads all of it.
    """
    work = _with_traffic(flops, measured, 1)
    if measured is None or run.trainer.device_mesh.devices.flat[0].platform == "cpu":
        return work
    unread = measured.cache * (1 - min(cached / (run.sizes.shard_slots * run.config.rollouts.max_length), 1))
    return dataclasses.replace(work, traffic=max(work.traffic - unread, measured.weights))


def decode_steps(step: StepSize, sizes: SamplerSizes) -> int:
    """Return the decode steps of a training step, if all slots are refilled at once."""
    return math.ceil(step.rollouts / (sizes.slots * sizes.hosts)) * step.answer_tokens


def _model_axis(sizes: SamplerSizes) -> int:
    """Return the chips that share the work of a data shard."""
    return 1 if sizes.mesh is None else sizes.mesh.size // sizes.shards


def once(measured: Measured | None, host: Number = 0.0) -> Work:
    """Return the work of a program without matrix products that runs once in a step."""
    return dataclasses.replace(_with_traffic(0.0, measured, 1), host=host)


def _with_traffic(flops: Number, measured: Measured | None, count: Number) -> Work:
    if measured is None:
        return Work(flops)
    sent = measured.collectives
    return Work(flops, count * measured.traffic, count * sent.interconnect, count * sent.network)


def measure_cpu(chip: Chip, devices: int) -> Chip:
    """Return a CPU device with the measured rates of this machine, divided by the number of devices.

    Matrix products in float32 of 1,024 x 1,024, and copies of 4 MiB, at the best of 30 times: the arrays of a
    program on a CPU are mostly of such sizes, and stay in its caches.
    """
    square, long = jnp.ones((1024, 1024), jnp.float32), jnp.ones(2**20, jnp.float32)
    flops = 2 * 1024**3 / _best(jax.jit(jnp.matmul), square, square)
    bandwidth = 2 * long.nbytes / _best(jax.jit(lambda array: array + 1), long)
    return dataclasses.replace(
        chip,
        flops=flops / devices,
        memory_bandwidth=bandwidth / devices,
        interconnect=bandwidth / devices,
        network=bandwidth / devices,
        host_link=bandwidth / devices,
    )


def _best(function: Callable[..., jax.Array], *arguments: jax.Array, repeats: int = 30) -> float:
    function(*arguments).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*arguments).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
