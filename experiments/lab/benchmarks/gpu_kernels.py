# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Errors and times of the attention kernels for GPUs, for `gpu_parts`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.layers.attention import AttentionConfig

from experiments.lab.benchmarks.measurement import timed
from marin_rl.batching.attention_kernel import GpuBackend
from marin_rl.batching.packing import GroupRow
from marin_rl.learner import flash_attention
from marin_rl.learner.attention_layers import kernel_of
from marin_rl.learner.flash_attention import block_attention, pallas_attention
from marin_rl.sampling.attention import PADDING, BlockAttention, Tokens

SCALE, SOFT_CAP = 0.125, 2.0
REPEATS = 10


class KernelCase(NamedTuple):
    """One problem of attention, for a kernel and for plain attention."""

    run: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    """The kernel: a function of queries, keys and values."""
    visible: np.ndarray
    """Whether each query sees each key: `[batch, query, key]`."""
    used: np.ndarray
    """Whether the output of each query is compared: `[batch, query]`."""
    soft_cap: float | None = None
    """Cap of the scores."""
    differentiable: bool = True
    """Whether gradients are compared."""


def plain_attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, visible: np.ndarray, soft_cap: float | None
) -> jax.Array:
    """Attend with all scores in memory."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, keys) * SCALE
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, values)


def kernel_errors(
    name: str, positions: int, heads: int, group: int, size: int, dtype: str
) -> tuple[dict[str, float], list[float]]:
    """Compare a kernel with plain attention in float64: output, and gradients where there are any.

    Args:
        name: one of `gpu.KERNELS`.
        positions: keys of each sequence.
        heads: heads of keys.
        group: heads of queries for each of them.
        size: size of a head.
        dtype: type of the inputs.

    Returns:
        Relative errors (norms) by name, and the seconds of calls, of which the first compiles.
    """
    case = kernel_case(name, positions, heads, group, size, dtype, interpret=jax.devices()[0].platform == "cpu")
    rng = np.random.default_rng(0)
    shapes = ((*case.used.shape, heads, group, size), *[(len(case.used), positions, heads, size)] * 2)
    inputs = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    used = case.used[..., None, None, None]
    cotangent = jnp.asarray(rng.normal(size=shapes[0]) * used, dtype)
    run = jax.jit(functools.partial(_pull_back, case.run, case.differentiable))
    seconds = [timed(lambda: jax.block_until_ready(run(inputs, cotangent))) for _ in range(1 + REPEATS)]
    found = [np.asarray(array, np.float64) for array in run(inputs, cotangent)]
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        *exact, weights = (jnp.asarray(np.asarray(array, np.float64)) for array in (*inputs, cotangent))
        plain = functools.partial(plain_attention, visible=case.visible, soft_cap=case.soft_cap)
        expected = [np.asarray(array) for array in _pull_back(plain, case.differentiable, exact, weights)]
    # The output at padding is arbitrary.
    found[0], expected[0] = found[0] * used, expected[0] * used
    both = zip(("output", "query", "keys", "values"), found, expected, strict=False)
    errors = {name: float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)) for name, ours, theirs in both}
    return errors, seconds


def attention_rates(positions: int) -> dict[str, float | None]:
    """Return the TFLOP/s of attention and its gradient in bfloat16, of two rows of one segment and 16 heads of 128.

    Counted are the two products of the forward pass and the five of the backward pass, each over half of the pairs.
    cuDNN's attention has no segments, so it is a bound and not a choice; None if it fails.
    """
    rng = np.random.default_rng(0)
    query, keys, values, cotangent = (jnp.asarray(rng.normal(size=(2, positions, 16, 128)), "bfloat16") for _ in "qkvc")
    segments = np.ones((2, positions), np.int32)

    def pallas(*arrays: jax.Array) -> jax.Array:
        query, keys, values = arrays
        attend = functools.partial(pallas_attention, scale=SCALE, interpret=jax.devices()[0].platform == "cpu")
        return _with_segments(attend, segments)(query[:, :, :, None], keys, values)[:, :, :, 0]

    def measure(attend: Callable[..., jax.Array], wgmma: bool | None = None) -> float:
        patch = mock.patch.object(flash_attention, "has_wgmma", return_value=wgmma) if wgmma is not None else None
        with patch or contextlib.nullcontext():
            run = jax.jit(functools.partial(_pull_back, attend, True))
            inputs = (query, keys, values)
            seconds = min(timed(lambda: jax.block_until_ready(run(inputs, cotangent))) for _ in range(1 + REPEATS))
        return 7 * 2 * positions**2 / 2 * 128 * 16 * 2 / seconds / 1e12

    rates: dict[str, float | None] = {f"wgmma {value}": measure(pallas, value) for value in (False, True)}
    cudnn = functools.partial(jax.nn.dot_product_attention, scale=SCALE, is_causal=True, implementation="cudnn")
    try:
        rates["cudnn"] = measure(cudnn)
    # Not every machine has it.
    except (RuntimeError, NotImplementedError) as error:
        print(error)
        rates["cudnn"] = None
    return rates


def _pull_back(
    run: Callable[..., jax.Array], differentiable: bool, inputs: Sequence[jax.Array], cotangent: jax.Array
) -> list[jax.Array]:
    """Return the output of a function, and the gradients of its inputs if there are any."""
    if not differentiable:
        return [run(*inputs)]
    output, backward = jax.vjp(run, *inputs)
    return [output, *backward(cotangent)]


def kernel_case(
    name: str, positions: int, heads: int, group: int, size: int, dtype: str, *, interpret: bool
) -> KernelCase:
    """Return the problem of one kernel; a few tokens are padding."""
    at = np.arange(positions)
    causal = at[:, None] >= at
    segments = np.stack([np.searchsorted([positions * 3 // 8, positions * 7 // 8], at, side="right") + 1, 0 * at + 1])
    segments[0, positions * 7 // 8 :] = 0
    config = AttentionConfig(Axis("embed", heads * group * size), heads * group, heads, head_dim=size)
    config = dataclasses.replace(config, scaling_factor=SCALE, attn_backend=cast(Any, GpuBackend.PALLAS))
    same = causal & (segments[:, :, None] == segments[:, None, :])
    attend: Callable[..., jax.Array]
    match name:
        case "packed rows":
            attend = functools.partial(pallas_attention, scale=SCALE, interpret=interpret)
            return KernelCase(_with_segments(attend, segments), same, segments > 0)
        case "capped scores":
            attend = functools.partial(block_attention, scale=SCALE, soft_cap=SOFT_CAP)
            return KernelCase(_with_segments(attend, segments), same, segments > 0, SOFT_CAP)
        case "shared prompts":
            row = GroupRow(positions // 2, 2, positions // 4)
            own = np.where(at < row.prompt_length, -1, (at - row.prompt_length) // row.answer_length)
            visible = np.stack([causal & ((own == -1) | (own[:, None] == own))] * 2)
            attend = kernel_of(config, SCALE, group=row, interpret=interpret)
            ones = np.ones((2, positions), np.int32)
            return KernelCase(_with_segments(attend, ones), visible, ones > 0)
    return _cached_case(name, positions, config, dtype, interpret)


def _with_segments(attend: Callable[..., jax.Array], segments: np.ndarray) -> Callable[..., jax.Array]:
    ids = segments.astype(np.int32)
    return lambda query, keys, values: attend(query, keys, values, jnp.asarray(ids))


def _cached_case(name: str, positions: int, config: AttentionConfig, dtype: str, interpret: bool) -> KernelCase:
    """Return the problem of the sampler's kernel: the last tokens of sequences of several lengths."""
    lengths = np.array([[1], [7], [positions // 2 + 3], [positions]])
    queries = 1 if name == "decode" else positions // 4
    # Padding follows a row's tokens.
    at = np.maximum(lengths - queries, 0) + np.arange(queries)
    used = at < lengths
    rows = np.arange(len(lengths))
    form = BlockAttention(interpret=interpret)

    def run(query: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        axes = form.cache_axes(config, len(lengths), positions)
        cache = tuple(
            jnp.zeros([axis.size for axis in array], dtype).at[:, :, :positions].set(jnp.swapaxes(content, 1, 2))
            for array, content in zip(axes, (keys, values), strict=True)
        )
        tokens = Tokens(jnp.zeros(used.shape, jnp.int32), jnp.asarray(rows), jnp.asarray(np.where(used, at, PADDING)))
        new_keys, new_values = (array[rows[:, None], at] for array in (keys, values))
        output, _ = form.attend(query, new_keys, new_values, cache, tokens, config, all_slots=name == "decode")
        return output

    return KernelCase(run, np.arange(positions) <= at[:, :, None], used, differentiable=False)
