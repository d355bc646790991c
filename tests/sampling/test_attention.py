# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.experimental.pallas import tpu as pallas_tpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import MultiPageAsyncCopyDescriptor
from levanter.layers.attention import AttentionConfig

from marin_rl.sampling.attention import (
    PADDING,
    AttentionForm,
    BlockAttention,
    DenseAttention,
    LayerCache,
    PagedAttention,
    Tokens,
    attention_form,
)
from marin_rl.sampling.decoding import copy_slots
from tests.absent_gpu import H100

SLOTS = 3
CONTEXT = 300
HEAD_SIZE = 64
KV_HEADS = 2


def attention_config(
    soft_cap: float | None = None, group: int = 2, kv_heads: int = KV_HEADS, head_size: int = HEAD_SIZE
) -> AttentionConfig:
    return AttentionConfig(
        Axis("embed", kv_heads * group * head_size),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_size,
        logits_soft_cap=soft_cap,
    )


class Case:
    """Runs a form on random queries, keys and values, next to a float64 oracle."""

    def __init__(self, form: AttentionForm, config: AttentionConfig, window: int | None = None) -> None:
        self.config, self.window = config, window
        self.group = config.num_heads // config.num_kv_heads
        self.rng = np.random.default_rng(0)
        self.history: list[list[np.ndarray]] = [[] for _ in range(SLOTS)]
        self.cache: LayerCache = tuple(
            jnp.zeros([axis.size for axis in axes]) for axes in form.cache_axes(config, SLOTS, CONTEXT)
        )
        self._attend = jax.jit(
            lambda query, key, value, cache, tokens, all_slots: form.attend(
                query, key, value, cache, tokens, config, all_slots=all_slots, window=window
            ),
            static_argnums=5,
        )

    def add(self, counts: list[tuple[int, int]], chunk: int, *, all_slots: bool = False) -> float:
        """Add a number of tokens to slots, one slot a row; return the largest error of their outputs."""
        rows = len(counts)
        positions = np.full((rows, chunk), PADDING, np.int32)
        for row, (slot, count) in enumerate(counts):
            start = len(self.history[slot]) if slot < SLOTS else 0
            positions[row, :count] = start + np.arange(count)
        heads = self.config.num_kv_heads
        query = self.rng.normal(size=(rows, chunk, heads, self.group, HEAD_SIZE)).astype(np.float32)
        key_value = self.rng.normal(size=(2, rows, chunk, heads, HEAD_SIZE)).astype(np.float32)
        slots = np.array([slot for slot, _ in counts], np.int32)
        tokens = Tokens(jnp.zeros((rows, chunk), jnp.int32), jnp.asarray(slots), jnp.asarray(positions))
        output, self.cache = self._attend(query, *key_value, self.cache, tokens, all_slots)
        errors = [0.0]
        for row, (slot, count) in enumerate(counts):
            for offset in range(count):
                self.history[slot].append(key_value[:, row, offset].astype(np.float64))
                expected = self._expected(query[row, offset].astype(np.float64), self.history[slot])
                errors.append(np.abs(np.asarray(output[row, offset]) - expected).max())
        return max(errors)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a slot's cache, as for the samples of one prompt."""
        arguments = (jnp.array([number]) for number in (source, target, 1))
        (self.cache,) = copy_slots((self.cache,), *arguments)
        self.history[target] = self.history[source].copy()

    def _expected(self, query: np.ndarray, history: list[np.ndarray]) -> np.ndarray:
        keys, values = np.stack(history[-(self.window or CONTEXT) :], axis=1)
        scale = self.config.scaling_factor or HEAD_SIZE**-0.5
        scores = np.einsum("hgd,chd->hgc", query, keys) * scale
        if self.config.logits_soft_cap is not None:
            scores = self.config.logits_soft_cap * np.tanh(scores / self.config.logits_soft_cap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.einsum("hgc,chd->hgd", weights / weights.sum(axis=-1, keepdims=True), values)


FORMS: dict[str, AttentionForm] = {
    "cpu": DenseAttention(),
    "gpu": BlockAttention(interpret=True),
    "tpu": PagedAttention(2, 16),
}


def store_where(reference: jax.Ref, value: jax.Array, *, mask: jax.Array) -> None:
    reference[...] = jnp.where(mask, value, reference[...])


@pytest.fixture
def form(platform: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionForm]:
    """The form of a platform, with its kernels interpreted."""
    if platform != "tpu":
        yield FORMS[platform]
        return
    # jax's interpreter for TPUs does not support reshaped references, and masks stores of several axes wrongly.
    wait = MultiPageAsyncCopyDescriptor.wait
    monkeypatch.setattr(MultiPageAsyncCopyDescriptor, "wait", lambda copy: wait(copy)[...])
    monkeypatch.setattr(pallas_tpu, "store", store_where)
    with cast(AbstractContextManager, pallas_tpu.force_tpu_interpret_mode()):
        yield FORMS[platform]


@pytest.mark.parametrize("platform", ["cpu", "gpu", pytest.param("tpu", marks=pytest.mark.medium)])
@pytest.mark.parametrize(("soft_cap", "group", "kv_heads"), [(None, 2, 2), (3.0, 3, 2), (None, 1, 3)])
def test_output_equals_float64_attention(form: AttentionForm, soft_cap: float | None, group: int, kv_heads: int):
    """Chunks of several lengths, rows in any order, a row of padding, a copied slot, and an empty slot."""
    case = Case(form, attention_config(soft_cap, group, kv_heads))
    calls = [[(1, 64), (0, 7)], [(2, 3), (1, 64)], [(1, 9), (SLOTS, 0)]]
    errors = [case.add(counts, 64) for counts in calls]
    case.copy_slot(1, 0)
    errors += [case.add([(0, 1), (1, 1), (2, step)], 1, all_slots=True) for step in range(2)]
    assert [len(history) for history in case.history] == [64 + 64 + 9 + 2, 64 + 64 + 9 + 2, 3 + 1]
    assert max(errors) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize("platform", ["cpu", "gpu", pytest.param("tpu", marks=pytest.mark.medium)])
@pytest.mark.parametrize("window", [1, 40, 200])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_window_limits_attention_to_the_last_positions(form: AttentionForm, soft_cap: float | None, window: int):
    """Windows within a chunk, over chunks, and over blocks of the context, also with whole blocks before them."""
    case = Case(form, attention_config(soft_cap), window)
    errors = [case.add(counts, 64) for counts in [[(1, 64), (0, 7)], [(2, 3), (1, 64)], [(1, 64)], [(1, 64), (0, 9)]]]
    case.copy_slot(1, 2)
    errors += [case.add([(0, 1), (1, 1), (2, step)], 1, all_slots=True) for step in range(2)]
    assert max(errors) < 1e-5


@pytest.mark.parametrize(("heads", "shards", "allocated"), [(8, 1, 8), (3, 1, 4), (6, 2, 8), (12, 1, 16), (8, 8, 8)])
def test_tpu_cache_has_a_number_of_heads_that_the_kernel_supports(heads: int, shards: int, allocated: int):
    [axes] = PagedAttention(4, 16).cache_axes(attention_config(kv_heads=heads), SLOTS, CONTEXT, shards)
    assert [axis.size for axis in axes if axis.name == "kv_head"] == [2 * allocated]


def test_sampler_uses_the_form_of_the_platform():
    expected = {
        ("cpu", "cpu"): DenseAttention(),
        ("gpu", "NVIDIA H100 80GB HBM3"): BlockAttention(),
        ("tpu", "TPU v5"): PagedAttention(4, 16),
        ("tpu", "TPU v5 lite"): PagedAttention(4, 16),
        ("tpu", "TPU v6 lite"): PagedAttention(8, 32),
        ("tpu", "a later chip"): PagedAttention(4, 16),
    }
    for (platform, kind), form in expected.items():
        assert attention_form(platform, kind) == form


def empty_cache(form: AttentionForm, config: AttentionConfig, context: int, dtype: type = jnp.bfloat16) -> LayerCache:
    """Return the shapes of a layer's cache."""
    shapes = form.cache_axes(config, SLOTS, context)
    return tuple(jax.ShapeDtypeStruct([axis.size for axis in axes], dtype) for axes in shapes)


def trace_decode(
    form: AttentionForm, config: AttentionConfig, context: int, dtype: type = jnp.bfloat16
) -> jax.stages.Traced:
    """Trace a decode step of attention."""
    head_size = config.HeadSize.size
    query = jax.ShapeDtypeStruct((SLOTS, 1, KV_HEADS, 2, head_size), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((SLOTS, 1, KV_HEADS, head_size), jnp.bfloat16)
    integers = jax.ShapeDtypeStruct((SLOTS, 1), jnp.int32)
    tokens = Tokens(integers, jax.ShapeDtypeStruct((SLOTS,), jnp.int32), integers)
    attend = jax.jit(lambda *arguments: form.attend(*arguments, config, all_slots=True))
    return attend.trace(query, new, new, empty_cache(form, config, context, dtype), tokens)


def lower_gpu_decode(config: AttentionConfig, context: int) -> str:
    """Return a decode step, lowered for a GPU that is absent: none compiles or runs it here."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("device",), abstract_device=H100)):
        return trace_decode(BlockAttention(), config, context).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("head_size", "has_kernel"), [(HEAD_SIZE, True), (80, False)])
def test_gpu_decode_has_a_kernel_for_head_sizes_that_triton_loads(head_size: int, has_kernel: bool):
    """Powers of two."""
    assert ("triton" in lower_gpu_decode(attention_config(head_size=head_size), CONTEXT)) == has_kernel


@pytest.mark.parametrize(("context", "splits", "blocks"), [(300, 3, 3), (2100, 9, 18), (4096, 16, 32), (4224, 11, 33)])
def test_gpu_decode_splits_contexts_that_are_no_powers_of_two(context: int, splits: int, blocks: int):
    config = attention_config()
    for array in empty_cache(BlockAttention(), config, context):
        assert array.shape == (SLOTS, KV_HEADS, 128 * blocks, HEAD_SIZE)
    # The outputs of all splits, which are then combined.
    assert f"tensor<{SLOTS}x{KV_HEADS}x{splits}x2x{HEAD_SIZE}x" in lower_gpu_decode(config, context)


@pytest.mark.parametrize(("head_size", "dtype", "loaded"), [(128, jnp.float32, 128), (256, jnp.float32, 64)])
def test_gpu_decode_loads_tiles_that_fit_shared_memory(head_size: int, dtype: type, loaded: int):
    """128 keys of 256 float32 numbers exceed the shared memory of an H100."""
    kernel = str(trace_decode(BlockAttention(), attention_config(head_size=head_size), CONTEXT, dtype).jaxpr)
    assert f"shape=({loaded},)" in kernel
    assert f"shape=({192 - loaded},)" not in kernel


def test_tpu_decode_keeps_the_cache_in_main_memory():
    """XLA may otherwise copy the cache to on-chip memory and back in every step."""
    traced = trace_decode(PagedAttention(4, 16), attention_config(head_size=128), CONTEXT)
    assert "with_memory_space_constraint[memory_space=hbm]" in str(traced.jaxpr)
