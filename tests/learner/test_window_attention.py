# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Attention windows in every kernel; log-probabilities and gradients of transformers are in test_policy_model."""

import dataclasses
import functools
import re
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend
from levanter.models.gemma import Gemma2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel

from marin_rl.attention_windows import layer_windows, windows_within
from marin_rl.batching.packing import GroupRow
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample
from marin_rl.learner import logprobs
from marin_rl.learner.attention_kernel import AttentionKernel, attention_kernel
from marin_rl.learner.gpu_attention import GpuBackend, with_gpu_attention
from marin_rl.learner.group_attention import kernel_of
from marin_rl.learner.logprobs import policy_activations
from marin_rl.levanter_line import seq_len
from marin_rl.models.olmo3 import Olmo3Config
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig
from tests.absent_gpu import absent_mesh
from tests.sampling.families import FAMILIES, VOCAB, random_model

pytestmark = pytest.mark.usefixtures("compiled_quickly")

WINDOW = 20
LENGTHS = (80, 40)
GEMMA = dataclasses.replace(FAMILIES["gemma2"], sliding_window=WINDOW, attn_logit_softcapping=None)
MISTRAL = dataclasses.replace(FAMILIES["mistral"], sliding_window=WINDOW)


def example(rows: list[list[int]], positions: int) -> RlExample:
    """Return rows of sequences with these lengths; the first tokens are those of the first sequence, and so on."""
    ids = np.random.default_rng(0).integers(2, VOCAB, sum(LENGTHS)).astype(np.int32)
    arrays = {name: np.zeros((len(rows), positions), dtype) for name, dtype in PER_TOKEN_DTYPES.items()}
    first = 0
    for row, lengths in enumerate(rows):
        start = 0
        for segment, length in enumerate(lengths, 1):
            place = (row, slice(start, start + length))
            arrays["input_ids"][place] = ids[first : first + length]
            arrays["segment_ids"][place] = segment
            arrays["position_ids"][place] = np.arange(length)
            first, start = first + length, start + length
    axes = (Axis("batch", len(rows)), Axis("position", positions))
    return RlExample(**{name: hax.named(jnp.asarray(array), axes) for name, array in arrays.items()})


def activations_and_gradient(model: LmHeadModel, batch: RlExample) -> list[np.ndarray]:
    """Return the activations of the tokens of all sequences, and the gradient of a function of them."""

    def loss(model: LmHeadModel, batch: RlExample) -> tuple[jax.Array, jax.Array]:
        activations = policy_activations(model, batch)
        kept = hax.sin(activations) * (batch.segment_ids > 0)
        return hax.sum(kept).scalar(), activations.rearrange(("batch", "position", ...)).array

    (_, found), gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model, batch)
    return [np.asarray(found)[batch.segment_ids.array > 0], *map(np.asarray, jax.tree.leaves(gradient))]


@pytest.mark.medium
@pytest.mark.parametrize("config", [GEMMA, MISTRAL], ids=["every other layer", "all layers"])
@pytest.mark.parametrize(
    ("backend", "block"), [(AttentionBackend.JAX_FLASH, 32), (GpuBackend.PALLAS, None)], ids=["jax_flash", "pallas"]
)
def test_packed_rows_equal_rows_of_their_own(config: Any, backend: Any, block: int | None, monkeypatch: Any):
    """Windows and blocks are shorter than the sequences."""
    monkeypatch.setattr(logprobs, "with_gpu_attention", functools.partial(with_gpu_attention, interpret=True))
    model = random_model(dataclasses.replace(config, attn_backend=backend, flash_attention_block_size=block))
    found = activations_and_gradient(model, example([list(LENGTHS)], 128))
    plain = random_model(dataclasses.replace(config, attn_backend=AttentionBackend.VANILLA))
    expected = activations_and_gradient(plain, example([[length] for length in LENGTHS], LENGTHS[0]))
    without = random_model(dataclasses.replace(config, sliding_window=128, attn_backend=AttentionBackend.VANILLA))
    other = activations_and_gradient(without, example([[length] for length in LENGTHS], LENGTHS[0]))
    assert np.abs(expected[0] - other[0]).max() > 0.1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


def test_a_token_depends_on_the_tokens_in_the_windows_of_its_layers_only():
    """Two layers with a window reach twice as far, less their own position."""
    model, batch = random_model(MISTRAL), example([[80]], 80)
    at = batch.input_ids.resolve_axis("position")

    def changes(token: int) -> np.ndarray:
        ids = batch.input_ids.updated_slice({at: token}, hax.full((Axis("batch", 1), at.resize(1)), 1, dtype=jnp.int32))
        runs = [
            policy_activations(model, dataclasses.replace(batch, input_ids=each)) for each in (batch.input_ids, ids)
        ]
        first, second = (run.rearrange(("batch", "position", ...)).array[0] for run in runs)
        return np.flatnonzero(np.abs(np.asarray(first - second)).max(axis=-1))

    assert changes(10).tolist() == list(range(10, 10 + 2 * WINDOW - 1))


def program(config: Any, positions: int) -> str:
    """Return the jaxpr of the activations and their gradient."""
    axes = (Axis("batch", 2), Axis("position", positions))
    arrays = {
        name: NamedArray(jax.ShapeDtypeStruct((2, positions), dtype), axes) for name, dtype in PER_TOKEN_DTYPES.items()
    }
    model = eqx.filter_eval_shape(lambda: config.build(Axis("vocab", VOCAB), key=jax.random.PRNGKey(0)))
    run = jax.grad(lambda model, batch: jnp.sum(policy_activations(model, batch).array))
    return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(model, RlExample(**arrays))))


def test_a_window_of_the_row_or_more_does_not_change_the_program():
    without = program(dataclasses.replace(MISTRAL, sliding_window=None), 48)
    assert program(dataclasses.replace(MISTRAL, sliding_window=48), 48) == without
    assert program(MISTRAL, WINDOW) == program(dataclasses.replace(MISTRAL, sliding_window=None), WINDOW)
    assert program(MISTRAL, 48) != without


def test_windows_that_make_a_difference():
    assert layer_windows(GEMMA) == (WINDOW, None)
    assert windows_within(GEMMA, WINDOW + 1) == (WINDOW, None)
    assert windows_within(GEMMA, WINDOW) is None
    assert windows_within(LlamaConfig(), 10**6) is None
    # The rotary embeddings of layers with a window differ at any length.
    yarn = YarnRotaryConfig(factor=4.0)
    sizes = {"num_layers": 2, "layer_types": ("sliding_attention", "full_attention")}
    assert windows_within(Olmo3Config(**sizes), 48) is None
    assert windows_within(Olmo3Config(**sizes, rope=yarn), 48) == (4096, None)


@pytest.mark.medium
def test_rotary_embeddings_of_layers_with_a_window_are_not_scaled():
    plain = dataclasses.replace(FAMILIES["olmo3"], layer_types=("sliding_attention",) * 2)
    expected, *scaled = (
        eqx.filter_jit(policy_activations)(random_model(config), example([[80]], 80)).array
        for config in (
            plain,
            dataclasses.replace(plain, rope=LinearRotaryConfig(factor=4.0)),
            dataclasses.replace(plain, rope=YarnRotaryConfig(factor=4.0)),
        )
    )
    for found in scaled:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", [AttentionBackend.SPLASH, GpuBackend.PALLAS])
def test_kernels_that_know_no_positions_do_not_share_prompts_beyond_the_window(backend: Any):
    kernel = AttentionKernel(backend)
    short, long = GroupRow(64, 2, 64), GroupRow(64, 2, 65)
    model = dataclasses.replace(MISTRAL, sliding_window=128)
    assert [kernel.supports_shared_prompts(model, group) for group in (short, long, None)] == [True, False, True]
    assert AttentionKernel(AttentionBackend.JAX_FLASH).supports_shared_prompts(model, long)
    config = dataclasses.replace(model.attention_config(), attn_backend=backend)
    with pytest.raises(NotImplementedError, match=r"windows \(128 positions\) .* set rollouts.share_prompts to false"):
        kernel_of(config, 1.0, 128)


@pytest.mark.medium
@pytest.mark.parametrize(("platform", "lowered_for", "kernel"), [("tpu", "tpu", "splash"), ("gpu", "cuda", "mha")])
def test_training_is_lowered_for_accelerators_that_are_absent(platform: str, lowered_for: str, kernel: str) -> None:
    """Layers without the window use the kernel, and no layer has the scores of a row."""
    sizes = {"hidden_dim": 256, "intermediate_dim": 80, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    config = Gemma2Config(
        **{**sizes, **seq_len(1024)},
        num_layers=2,
        sliding_window=300,
        query_pre_attn_scalar=64,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    config = attention_kernel(config, platform).configure(config, 1024)
    axes = (Axis("batch", 2), Axis("position", 1024))
    arrays = {
        name: NamedArray(jax.ShapeDtypeStruct((2, 1024), dtype), axes) for name, dtype in PER_TOKEN_DTYPES.items()
    }

    def loss(model: Any, batch: RlExample) -> jax.Array:
        with hax.axis_mapping({"batch": "data", "kv_head": "model"}):
            return jnp.sum(policy_activations(model, batch).array)

    model = eqx.filter_eval_shape(lambda: config.build(Axis("vocab", 512), key=jax.random.PRNGKey(0)))
    with absent_mesh(platform, (2, 2)):
        traced = jax.jit(jax.grad(loss)).trace(model, RlExample(**arrays))
        text = traced.lower(lowering_platforms=(lowered_for,)).as_text()
    assert len(set(re.findall(rf"{kernel}_(?:mha_)?(?:fwd|dkv|dq|forward|backward)", text))) >= 2
    assert "1024x1024" not in text
