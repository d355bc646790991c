# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import re
from typing import Any, cast

import haliax as hax
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import strategies as st
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention
from levanter.models.gemma import Gemma2Config
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig
from levanter.models.mistral import MistralConfig
from levanter.models.olmo import Olmo2Config

from marin_rl.batching.attention_kernel import (
    PLATFORMS,
    SPLASH_BLOCK,
    AttentionKernel,
    GpuBackend,
    attention_kernel,
    splash_block,
)
from marin_rl.batching.packing import GroupRow

FLASH, SPLASH = AttentionBackend.JAX_FLASH, AttentionBackend.SPLASH
VANILLA, NVTE, PALLAS = AttentionBackend.VANILLA, AttentionBackend.NVTE, GpuBackend.PALLAS
GEMMA2 = Gemma2Config(attn_logit_softcapping=2.0)


def levanter_takes(kernel: AttentionKernel, length: int) -> bool:
    """Return whether levanter can trace this attention on rows of a length, in blocks of the kernel's size."""
    Head, Queries, Keys = Axis("head_size", 128), Axis("position", length), Axis("key_position", length)
    others = (Axis("batch", 1), Axis("kv_head", 1))

    def attend(query: hax.NamedArray, key: hax.NamedArray, segments: hax.NamedArray) -> hax.NamedArray:
        mask = AttentionMask.causal().with_segment_ids(segments)
        return dot_product_attention(
            Queries,
            Keys,
            Head,
            query,
            key,
            key,
            mask,
            attn_backend=kernel.backend,
            flash_block_size=kernel.block(length),
        )

    def shape(axes: tuple[Axis, ...], dtype: type) -> hax.NamedArray:
        return hax.NamedArray(jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), dtype), axes)

    query, key = (shape((*others, axis, Head), jnp.float32) for axis in (Queries, Keys))
    with jax.set_mesh(jax.make_mesh((1,), ("data",))), hax.axis_mapping({}):
        try:
            traced = jax.make_jaxpr(attend)(query, key, shape((others[0], Queries), jnp.int32))
        except (ValueError, NotImplementedError) as error:
            if not re.search("is not a multiple of|to be a multiple of 128|should divide", str(error)):
                raise
            return False
    # Some versions of levanter compute other rows in smaller blocks.
    block = min(length, kernel.block_size or SPLASH_BLOCK)
    return kernel.backend is not SPLASH or f"(block_size={block})" in str(traced)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block", [None, 384])
@pytest.mark.parametrize("backend", [FLASH, SPLASH])
def test_row_lengths_match_levanter(backend: AttentionBackend, block: int | None) -> None:
    kernel = AttentionKernel(backend, block)
    lengths = (100, 384, 512, 640, 768, 1000, 1024, 1100, 1152, 1536, 2560)
    taken = [length for length in lengths if kernel.supports_length(length)]
    assert 0 < len(taken) < len(lengths)
    assert taken == [length for length in lengths if levanter_takes(kernel, length)]


@pytest.mark.parametrize(
    ("backend", "length", "row", "block"),
    [
        # Up to 1,024 positions the length is unchanged.
        (FLASH, 12, 12, None),
        (FLASH, 1024, 1024, None),
        (FLASH, 1025, 1280, 640),
        (FLASH, 1100, 1280, 640),
        # 1,408 positions would require blocks of 128.
        (FLASH, 1408, 1536, 768),
        (FLASH, 2560, 2560, 640),
        (FLASH, 4096, 4096, 1024),
        (PALLAS, 12, 64, None),
        (PALLAS, 1100, 1152, None),
        (SPLASH, 12, 128, None),
        (SPLASH, 384, 384, None),
        (SPLASH, 513, 1024, None),
        (SPLASH, 1536, 1536, None),
        (VANILLA, 1100, 1100, None),
    ],
)
def test_row_and_block_for_a_length(
    backend: AttentionBackend | GpuBackend, length: int, row: int, block: int | None
) -> None:
    kernel = AttentionKernel(backend)
    assert (kernel.fit(length), kernel.block(row)) == (row, block)


@pytest.mark.parametrize("backend", [FLASH, SPLASH, VANILLA, PALLAS])
def test_every_length_fits_a_supported_row(backend: AttentionBackend | GpuBackend) -> None:
    kernel = AttentionKernel(backend)
    for length in range(1, 5000, 37):
        row = kernel.fit(length)
        assert length <= row <= length + 511
        assert kernel.supports_length(row)
        block = kernel.block(row)
        assert block is None or (row % block == 0 and 512 <= block <= 1024)


def test_block_size_of_the_model_is_kept() -> None:
    kernel = AttentionKernel(FLASH, 300)
    assert (kernel.fit(250), kernel.fit(301), kernel.block(600)) == (250, 600, 300)
    assert AttentionKernel(SPLASH, 256).fit(300) == 512


@pytest.mark.parametrize(
    ("backend", "block", "remedy"), [(SPLASH, 300, "set 384"), (FLASH, 0, "at least 1"), (SPLASH, -128, "at least 1")]
)
def test_unsupported_block_size_is_rejected(backend: AttentionBackend, block: int, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"model.flash_attention_block_size is {block}.*{remedy}"):
        AttentionKernel(backend, block)


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        (LlamaConfig(), [FLASH, PALLAS, SPLASH]),
        (LlamaConfig(attn_backend=AttentionBackend.DEFAULT), [FLASH, PALLAS, SPLASH]),
        (LlamaConfig(attn_backend=FLASH, flash_attention_block_size=256), [FLASH] * 3),
        (MistralConfig(use_flash_attention=False), [VANILLA] * 3),
        (Gpt2Config(), [FLASH, FLASH, SPLASH]),
        # `jax_flash` does not differentiate the cap.
        (GEMMA2, [VANILLA, PALLAS, SPLASH]),
        (dataclasses.replace(GEMMA2, attn_logit_softcapping=None), [FLASH, PALLAS, SPLASH]),
    ],
)
def test_kernel_of_a_model_on_each_platform(model: LmConfig, kernels: list[Any]) -> None:
    """Levanter would choose by the devices of this machine, such as Transformer Engine where that is installed."""
    found = [attention_kernel(model, platform) for platform in PLATFORMS]
    assert found == [AttentionKernel(each, cast(Any, model).flash_attention_block_size) for each in kernels]
    assert [cast(Any, each.configure(model, 512)).attn_backend for each in found] == kernels


@pytest.mark.parametrize(
    ("backend", "length", "takes"),
    [("jax_flash", 1101, False), ("jax_flash", 1104, True), ("splash", 256, False), ("splash", 2048, True)],
)
def test_split_positions_need_rows_that_every_device_can_take(backend: str, length: int, takes: bool) -> None:
    kernel = AttentionKernel(AttentionBackend(backend), context_shards=4)
    assert kernel.supports_length(length) == takes
    assert kernel.supports_length(kernel.fit(length))
    assert not kernel.supports_shared_prompts(LlamaConfig())


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            dataclasses.replace(GEMMA2, attn_backend=FLASH),
            "attn_backend is jax_flash.*cap of the attention logits.*2.0",
        ),
        (LlamaConfig(attn_backend=NVTE), "attn_backend is nvte.*does not read segment ids.*set it to null"),
        (
            MistralConfig(use_flash_attention=False, attn_backend=FLASH),
            "use_flash_attention is false, but .* jax_flash",
        ),
    ],
)
def test_incompatible_kernel_is_rejected(model: LmConfig, problem: str) -> None:
    for platform in PLATFORMS:
        with pytest.raises(ValueError, match=problem):
            attention_kernel(model, platform)


@pytest.mark.medium
def test_the_gradient_of_capped_attention_equals_finite_differences() -> None:
    length, size, cap = 8, 4, 1.0
    model = Gemma2Config(attn_logit_softcapping=cap, flash_attention_block_size=4)
    config = cast(Gemma2Config, attention_kernel(model, "cpu").configure(model, length))
    query, key, value, weight = np.random.default_rng(0).normal(size=(4, length, size)) * 2

    def attend(query: np.ndarray) -> float:
        logits = cap * np.tanh(query @ key.T / np.sqrt(size) / cap)
        shares = np.tril(np.exp(logits))
        return float((shares / shares.sum(axis=1, keepdims=True) @ value * weight).sum())

    step = 1e-6
    steps = step * np.eye(length * size).reshape(-1, length, size)
    expected = np.array([attend(query + each) - attend(query - each) for each in steps]).reshape(query.shape) / 2 / step

    Queries, Keys, Head = Axis("position", length), Axis("key_position", length), Axis("head_size", size)
    keys, values = (hax.named(jnp.asarray(array), (Keys, Head)) for array in (key, value))

    def levanter(query: jax.Array) -> jax.Array:
        attended = dot_product_attention(
            *(Queries, Keys, Head, hax.named(query, (Queries, Head)), keys, values, AttentionMask.causal()),
            attn_backend=config.attn_backend,
            flash_block_size=config.flash_attention_block_size,
            logits_soft_cap=config.attn_logit_softcapping,
        )
        return jnp.sum(attended.rearrange((Queries, Head)).array * weight.astype(np.float32))

    np.testing.assert_allclose(jax.grad(levanter)(jnp.asarray(query)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model", [Olmo2Config(), Gpt2Config(), MistralConfig(use_flash_attention=False), GEMMA2])
def test_levanter_accepts_the_configured_kernel(model: LmConfig) -> None:
    """Levanter rejects `use_flash_attention: true` with `vanilla`, and most models read only `attn_backend`."""
    vanilla = dataclasses.replace(cast(Any, model), attn_backend=VANILLA)
    for given in (vanilla, *((model,) if attention_kernel(model, "cpu").backend is VANILLA else ())):
        configured = cast(Any, attention_kernel(given, "cpu").configure(given, 1100))
        assert (configured.attn_backend, configured.use_flash_attention) == (VANILLA, None)
    plain = MistralConfig(attn_backend=FLASH)
    assert attention_kernel(plain, "cpu").configure(plain, 512) == plain


@pytest.mark.parametrize(
    ("model", "kinds"), [(LlamaConfig(), {FLASH, SPLASH, VANILLA, PALLAS}), (Gpt2Config(), {FLASH})]
)
def test_kernels_that_support_shared_prompts(model: LmConfig, kinds: set) -> None:
    """`splash`, as GPT-2 calls it, compares segment ids only."""
    candidates = [AttentionKernel(kind) for kind in kinds | {SPLASH}]
    for group in (None, GroupRow(64, 2, 64)):
        assert {kernel.backend for kernel in candidates if kernel.supports_shared_prompts(model, group)} == kinds


@hypothesis.given(
    prompt=st.integers(1, 5000), answer=st.integers(2, 5000), block=st.sampled_from([None, 128, 256, 384, 1024])
)
def test_places_of_shared_prompts_are_multiples_of_efficient_blocks(
    prompt: int, answer: int, block: int | None
) -> None:
    places = AttentionKernel(SPLASH, block).fit_group(prompt, answer)
    assert places is not None
    most = block or SPLASH_BLOCK
    assert all(needed <= place < needed + most + 256 for needed, place in zip((prompt, answer), places, strict=True))
    for length in (*places, sum(places)):
        assert length % splash_block(length, most) == 0
        assert splash_block(length, most) >= min(length, most // 2)
