# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The kernels of GPUs, which are interpreted here; those of all devices are in test_attention_layers."""

import jax.numpy as jnp
import pytest

from experiments.lab.benchmarks import gpu_kernels
from marin_rl.learner import flash_attention
from marin_rl.learner.flash_attention import pallas_attention


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "heads", "group", "size", "dtype", "error", "wgmma"),
    [
        ("packed rows", 2, 2, 64, "float32", 1e-6, False),
        ("packed rows", 1, 4, 128, "float32", 1e-6, False),
        ("packed rows", 1, 2, 128, "bfloat16", 1e-2, False),
        ("packed rows", 1, 2, 128, "bfloat16", 1e-2, True),
        ("packed rows", 1, 2, 64, "float16", 1e-3, True),
        ("shared prompts", 1, 2, 64, "float16", 1e-3, True),
        ("capped scores", 2, 2, 64, "float32", 1e-6, False),
        ("capped scores", 1, 2, 128, "bfloat16", 1e-2, False),
        ("shared prompts", 2, 2, 64, "float32", 1e-6, False),
    ],
)
def test_value_and_gradient_equal_those_in_float64(
    name: str, heads: int, group: int, size: int, dtype: str, error: float, wgmma: bool, monkeypatch: pytest.MonkeyPatch
):
    """A row of two segments, of which one crosses a tile, and of padding; and a row that is one segment."""
    monkeypatch.setattr(gpu_kernels, "REPEATS", 0)
    monkeypatch.setattr(flash_attention, "has_wgmma", lambda: wgmma)
    # Several blocks of a row.
    monkeypatch.setattr(flash_attention, "QUERY_BLOCK", 128)
    errors, _ = gpu_kernels.kernel_errors(name, 256, heads, group, size, dtype)
    assert errors.keys() == {"output", "query", "keys", "values"}
    assert 0 < min(errors.values()) <= max(errors.values()) < error


def test_rows_are_multiples_of_a_tile():
    query, keys = jnp.zeros((1, 200, 1, 1, 64)), jnp.zeros((1, 200, 1, 64))
    with pytest.raises(ValueError, match="a row has 200 positions, but attention on GPU takes multiples of 64"):
        pallas_attention(query, keys, keys, jnp.zeros((1, 200), jnp.int32), scale=1.0, interpret=True)
