# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention on GPUs: its kernel is interpreted or only lowered here, because there is no GPU."""

import dataclasses
import re
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import Attention, AttentionConfig, AttentionMask
from levanter.models.gemma import Gemma2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.qwen import Qwen3Config

from marin_rl.batching.packing import GroupRow
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample
from marin_rl.learner import gpu_attention
from marin_rl.learner.attention_kernel import attention_kernel
from marin_rl.learner.gpu_attention import attend_in_segments, block_attention, segment_attention, with_gpu_attention
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.levanter_line import seq_len
from tests.absent_gpu import absent_mesh
from tests.sampling.families import FAMILIES, random_model

POSITIONS = 256
SEGMENTS = np.zeros((2, POSITIONS), np.int32)
"""A row of two segments, of which one crosses a tile, and of padding; and a row that is one segment."""
SEGMENTS[0, :100], SEGMENTS[0, 100:230], SEGMENTS[1] = 1, 2, 1


def oracle(query: jax.Array, keys: jax.Array, values: jax.Array, soft_cap: float | None) -> jax.Array:
    """Attend with all scores in memory."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, keys, precision="highest") * query.shape[-1] ** -0.5
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    visible = same & np.tril(np.ones((POSITIONS, POSITIONS), bool))
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, values, precision="highest")


def random_arrays(kv_heads: int, group: int, size: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Return queries, keys, values, and weights of a loss, which are 0 for padding."""
    rng = np.random.default_rng(0)
    shapes = ((kv_heads, group, size), (kv_heads, size), (kv_heads, size), (kv_heads, group, size))
    arrays = [rng.normal(size=(2, POSITIONS, *shape)).astype(np.float32) for shape in shapes]
    arrays[-1][SEGMENTS == 0] = 0
    return tuple(jnp.asarray(array).astype(dtype) for array in arrays)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kv_heads", "group", "size", "dtype", "soft_cap", "error"),
    [
        (2, 2, 64, jnp.float32, None, 1e-6),
        (1, 4, 128, jnp.float32, None, 1e-6),
        (1, 2, 128, jnp.bfloat16, None, 1e-2),
        (2, 2, 64, jnp.float32, 1.5, 1e-6),
        (1, 2, 128, jnp.bfloat16, 1.5, 1e-2),
    ],
)
def test_value_and_gradient_equal_those_of_the_full_scores(
    kv_heads: int, group: int, size: int, dtype: Any, soft_cap: float | None, error: float, monkeypatch: Any
):
    # Several blocks of a row.
    monkeypatch.setattr(gpu_attention, "QUERY_BLOCK", 128)

    def kernel(*arrays: jax.Array) -> jax.Array:
        segments = jnp.asarray(SEGMENTS)
        if soft_cap is not None:
            return block_attention(*arrays, segments, segments, scale=size**-0.5, soft_cap=soft_cap)
        return segment_attention(*arrays, segments, scale=size**-0.5, interpret=True)

    def exact(*arrays: jax.Array) -> jax.Array:
        return oracle(*arrays, soft_cap)

    def value_and_gradient(function: Any, arrays: tuple[jax.Array, ...]) -> list[np.ndarray]:
        *inputs, weights = arrays
        attended, pull_back = jax.vjp(function, *inputs)
        return [attended, *pull_back(weights)]

    arrays = random_arrays(kv_heads, group, size, dtype)
    found = value_and_gradient(kernel, arrays)
    expected = value_and_gradient(exact, tuple(array.astype(jnp.float32) for array in arrays))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        used = jnp.asarray(SEGMENTS > 0).reshape(2, POSITIONS, *[1] * (theirs.ndim - 2))
        difference = jnp.where(used, ours.astype(jnp.float32) - theirs, 0)
        assert jnp.linalg.norm(difference) / jnp.linalg.norm(jnp.where(used, theirs, 0)) < error


def example(prompts: bool = False) -> RlExample:
    """Return a microbatch with the segments above."""
    starts = np.zeros_like(SEGMENTS)
    starts[0, 100:230] = 100
    arrays = {name: np.zeros(SEGMENTS.shape, dtype) for name, dtype in PER_TOKEN_DTYPES.items()}
    arrays |= {
        "input_ids": np.random.default_rng(0).integers(0, 60, SEGMENTS.shape).astype(np.int32),
        "loss_mask": SEGMENTS > 0,
        "segment_ids": SEGMENTS,
        "position_ids": np.where(SEGMENTS > 0, np.arange(POSITIONS, dtype=np.int32) - starts, 0),
    }
    if prompts:
        arrays["prompt_segment_ids"] = np.minimum(SEGMENTS, 1)
    axes = (Axis("batch", 2), Axis("position", POSITIONS))
    group = GroupRow(100, 1, POSITIONS - 101) if prompts else None
    return RlExample(**{name: hax.named(jnp.asarray(array), axes) for name, array in arrays.items()}, group=group)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["gemma2", "llama", "olmo2", "qwen3"])
def test_models_train_as_with_levanters_attention(name: str):
    batch = example()

    def loss(model: Any) -> jax.Array:
        activations = policy_activations(model, batch)
        logprobs, _ = token_logprobs(activations, model.get_lm_head(), batch, temperature=1.0, block_size=64)
        return jnp.sum(jnp.sin(logprobs.array))

    config = dataclasses.replace(cast(Any, FAMILIES[name]), num_layers=1)
    model = random_model(attention_kernel(config, "cpu").configure(config, POSITIONS))
    differentiate = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    expected = differentiate(model)
    interpreted = with_gpu_attention(model, interpret=True)
    for ours, theirs in zip(*map(jax.tree.leaves, (differentiate(interpreted), expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(theirs).max())))


@pytest.mark.parametrize(
    "mask",
    [
        example(prompts=True).attention_mask,
        AttentionMask.causal(),
        AttentionMask.causal(offset=1).with_segment_ids(example().segment_ids),
    ],
)
def test_masks_that_the_kernel_does_not_support_are_refused(mask: AttentionMask):
    model = with_gpu_attention(random_model(FAMILIES["llama"]), interpret=True)
    with pytest.raises(NotImplementedError, match=f"not {type(mask).__name__}; set model.attn_backend: JAX_FLASH"):
        jax.eval_shape(lambda ids: model.activations(ids, mask, key=None), example().input_ids)


@pytest.mark.parametrize(("upcast", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_upcast_attn_gives_float32_to_the_kernel(upcast: bool, dtype: Any):
    Embed = Axis("embed", 32)
    config = AttentionConfig(Embed=Embed, num_heads=4, num_kv_heads=2, upcast_attn=upcast)
    dtypes = []

    def attend(query: hax.NamedArray, keys: jax.Array, values: jax.Array, *_: Any) -> jax.Array:
        dtypes.extend(array.dtype for array in (query.array, keys, values))
        return query.array

    def run(x: hax.NamedArray, segments: hax.NamedArray) -> hax.NamedArray:
        attention = jmp.get_policy("c=bfloat16").cast_to_compute(Attention.init(config, key=jax.random.PRNGKey(0)))
        return attend_in_segments(attention, x, segments, None, attend)

    axes = (Axis("batch", 2), Axis("position", 8))
    x, segments = hax.zeros((*axes, Embed), jnp.bfloat16), hax.zeros(axes, jnp.int32)
    assert jax.eval_shape(run, x, segments).dtype == jnp.bfloat16
    assert dtypes == [dtype] * 3


def test_rows_are_multiples_of_a_tile():
    query, keys = jnp.zeros((1, 200, 1, 1, 64)), jnp.zeros((1, 200, 1, 64))
    with pytest.raises(ValueError, match="a row has 200 positions, but attention on GPU takes multiples of 64"):
        segment_attention(query, keys, keys, jnp.zeros((1, 200), jnp.int32), scale=1.0, interpret=True)


MODELS: dict[str, LmConfig] = {
    "Qwen3-0.6B": Qwen3Config(
        hidden_dim=1024, intermediate_dim=3072, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    "Llama-3.2-1B": LlamaConfig(
        hidden_dim=2048, intermediate_dim=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64
    ),
    "Llama-3-8B": LlamaConfig(hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8),
    "Gemma-2-2B": Gemma2Config(
        hidden_dim=2304, intermediate_dim=9216, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize(("name", "mesh"), [*((name, (1, 1)) for name in MODELS), ("Llama-3-8B", (2, 2))])
def test_training_is_lowered_for_gpus_that_are_absent(name: str, mesh: tuple[int, int]):
    """The program has no `[position, position]` array. Without a cap it has the kernel and its gradient in bfloat16."""
    positions = 3456  # no other axis of the models has this size
    config = dataclasses.replace(cast(Any, MODELS[name]), **seq_len(positions))
    config = attention_kernel(config, "gpu").configure(config, positions)
    Batch, Position = Axis("batch", 2 * mesh[0]), Axis("position", positions)
    arrays = {
        field: hax.NamedArray(jax.ShapeDtypeStruct((Batch.size, positions), dtype), (Batch, Position))
        for field, dtype in PER_TOKEN_DTYPES.items()
    }

    def loss(model: Any, batch: RlExample) -> jax.Array:
        with hax.axis_mapping({"batch": "data", "kv_head": "model"}):
            model = jmp.get_policy("c=bfloat16").cast_to_compute(model)
            return jnp.sum(policy_activations(model, batch).array.astype(jnp.float32))

    model = eqx.filter_eval_shape(lambda: config.build(Axis("vocab", 512), key=jax.random.PRNGKey(0)))
    with absent_mesh("gpu", mesh):
        lowered = jax.jit(jax.grad(loss)).trace(model, RlExample(**arrays)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert f"{positions}x{positions}" not in text
    if config.attention_config().logits_soft_cap is None:
        assert {"mha_forward", "mha_backward"} <= set(re.findall(r"mha_(?:forward|backward)", text))
        heads, size = config.num_heads // mesh[1], config.attention_config().HeadSize.size
        assert f"2x{positions}x{heads}x{size}xbf16" in text
