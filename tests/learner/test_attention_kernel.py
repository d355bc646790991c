# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import re

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention
from levanter.models.llama import LlamaConfig
from levanter.models.mistral import MistralConfig

from marin_rl.learner.attention_kernel import AttentionKernel, attention_kernel

FLASH, SPLASH = AttentionBackend.JAX_FLASH, AttentionBackend.SPLASH
VANILLA, NVTE = AttentionBackend.VANILLA, AttentionBackend.NVTE


def levanter_takes(kernel: AttentionKernel, length: int) -> bool:
    """Whether levanter can trace this attention on rows of a length; compiles nothing."""
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
            jax.eval_shape(attend, query, key, shape((others[0], Queries), jnp.int32))
        except (ValueError, NotImplementedError) as error:
            if not re.search("is not a multiple of|to be a multiple of 128|should divide", str(error)):
                raise
            return False
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block", [None, 384])
@pytest.mark.parametrize("backend", [FLASH, SPLASH])
def test_the_row_lengths_are_those_that_levanter_takes(backend: AttentionBackend, block: int | None) -> None:
    kernel = AttentionKernel(backend, block)
    lengths = (100, 384, 512, 640, 768, 1000, 1024, 1100, 1152, 1536, 2560)
    taken = [length for length in lengths if kernel.takes(length)]
    assert 0 < len(taken) < len(lengths)
    assert taken == [length for length in lengths if levanter_takes(kernel, length)]


@pytest.mark.parametrize(
    ("backend", "length", "row", "block"),
    [
        # Up to 1,024 positions nothing changes.
        (FLASH, 12, 12, None),
        (FLASH, 1024, 1024, None),
        (FLASH, 1025, 1280, 640),
        (FLASH, 1100, 1280, 640),
        # 1,408 positions would have blocks of 128 only.
        (FLASH, 1408, 1536, 768),
        (FLASH, 2560, 2560, 640),
        (FLASH, 4096, 4096, 1024),
        (NVTE, 1100, 1280, 640),
        (SPLASH, 12, 128, None),
        (SPLASH, 384, 384, None),
        (SPLASH, 513, 1024, None),
        (SPLASH, 1536, 1536, None),
        (VANILLA, 1100, 1100, None),
    ],
)
def test_the_row_and_block_for_a_length(backend: AttentionBackend, length: int, row: int, block: int | None) -> None:
    kernel = AttentionKernel(backend)
    assert (kernel.fit(length), kernel.block(row)) == (row, block)


@pytest.mark.parametrize("backend", [FLASH, SPLASH, VANILLA])
def test_every_length_fits_a_row_that_is_taken(backend: AttentionBackend) -> None:
    kernel = AttentionKernel(backend)
    for length in range(1, 5000, 37):
        row = kernel.fit(length)
        assert length <= row <= length + 511
        assert kernel.takes(row)
        block = kernel.block(row)
        assert block is None or (row % block == 0 and 512 <= block <= 1024)


def test_a_block_size_of_the_model_is_kept() -> None:
    kernel = AttentionKernel(FLASH, 300)
    assert (kernel.fit(250), kernel.fit(301), kernel.block(600)) == (250, 600, 300)
    assert AttentionKernel(SPLASH, 256).fit(300) == 512


@pytest.mark.parametrize(
    ("backend", "block", "remedy"), [(SPLASH, 300, "set 384"), (FLASH, 0, "at least 1"), (SPLASH, -128, "at least 1")]
)
def test_a_block_size_that_no_kernel_takes_is_refused(backend: AttentionBackend, block: int, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"model.flash_attention_block_size is {block}.*{remedy}"):
        AttentionKernel(backend, block)


@pytest.mark.parametrize(
    ("changes", "platform", "kernel"),
    [
        ({}, "cpu", AttentionKernel(FLASH)),
        ({}, "gpu", AttentionKernel(NVTE)),
        ({}, "tpu", AttentionKernel(SPLASH)),
        ({"attn_backend": AttentionBackend.DEFAULT}, "tpu", AttentionKernel(SPLASH)),
        ({"attn_backend": FLASH, "flash_attention_block_size": 256}, "tpu", AttentionKernel(FLASH, 256)),
    ],
)
def test_the_kernel_of_a_model_on_a_platform(changes: dict, platform: str, kernel: AttentionKernel) -> None:
    assert attention_kernel(dataclasses.replace(LlamaConfig(), **changes), platform) == kernel


def test_the_older_switch_turns_kernels_off() -> None:
    assert attention_kernel(MistralConfig(), "cpu").backend is FLASH
    assert attention_kernel(MistralConfig(use_flash_attention=False), "tpu").backend is VANILLA
