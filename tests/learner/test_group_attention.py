# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import re
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, AttentionConfig, dot_product_attention
from levanter.models.lm_model import LmHeadModel
from levanter.models.qwen import Qwen3Config

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample, SharedPromptMask, pack_batch
from marin_rl.batching.rollout_batch import join_batches
from marin_rl.learner.attention_kernel import attention_kernel
from marin_rl.learner.gpu_attention import GpuBackend
from marin_rl.learner.group_attention import group_attention, kernel_of
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.levanter_line import seq_len
from marin_rl.objectives.aggregation import TokenMeanConfig
from tests.absent_gpu import absent_mesh
from tests.sampling.families import FAMILIES, VOCAB, random_model

pytestmark = pytest.mark.usefixtures("compiled_quickly")

GROUP = GroupRow(prompt_length=4, answers=3, answer_length=4)
Batch = Axis("batch", 2)
CONFIG = AttentionConfig(Embed=Axis("embed", 24), num_heads=4, num_kv_heads=2, head_dim=6)
SPLASH, PALLAS = AttentionBackend.SPLASH, GpuBackend.PALLAS


def segments_and_prompts(group: GroupRow) -> tuple[np.ndarray, np.ndarray]:
    """Return the segments of two rows, and the segments of their prompts.

    A shorter prompt, a full answer, a shorter one and none; a full prompt, two answers, of which one has one token, and
    an answer that does not share the prompt.
    """
    prompt, _, answer = group
    lengths = [[prompt // 2, answer, answer // 2, 0], [prompt, answer // 2 + 1, 1, answer - 1]]
    segments = np.zeros((2, group.row_length), np.int32)
    starts = [0, *range(prompt, group.row_length, answer)]
    for row, own in enumerate(lengths):
        for segment, (start, length) in enumerate(zip(starts, own, strict=True), 1):
            segments[row, start : start + length] = segment
    prompts = np.minimum(segments, 1)
    prompts[1, starts[-1] :] = segments[1, starts[-1] :]
    return segments, prompts


def make_mask(group: GroupRow) -> SharedPromptMask:
    axes = (Batch, Axis("position", group.row_length))
    segments, prompts = (hax.named(jnp.array(rows), axes) for rows in segments_and_prompts(group))
    return SharedPromptMask(
        is_causal=True,
        segment_ids=(segments, segments),
        prompt_segment_ids=prompts,
        position_ids=hax.zeros_like(segments),
        group=group,
    )


def make_inputs(group: GroupRow, dtype: jnp.dtype) -> tuple[NamedArray, NamedArray, NamedArray]:
    """Return query, keys and values."""
    rows = (Batch, Axis("position", group.row_length))
    query = (*rows, CONFIG.KVHeads, CONFIG.QHeadsPerGroup, CONFIG.HeadSize)
    of_keys = (*rows, CONFIG.KVHeads, CONFIG.HeadSize)
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        hax.random.normal(key, own).astype(dtype) for key, own in zip(keys, (query, of_keys, of_keys), strict=True)
    )


def attend_to_all_pairs(inputs: tuple[NamedArray, ...], mask: SharedPromptMask, config: AttentionConfig) -> NamedArray:
    query, keys, values = (array.astype(jnp.float32) for array in inputs)
    keys, values = (array.rename({"position": "key_position"}) for array in (keys, values))
    Position = query.resolve_axis("position")
    return dot_product_attention(
        "position",
        "key_position",
        "head_size",
        query,
        keys,
        values,
        mask.materialize(Position, Position.alias("key_position")),
        attn_backend=AttentionBackend.VANILLA,
        scaling_factor=config.scaling_factor,
        logits_soft_cap=config.logits_soft_cap,
    ).rearrange(query.axes)


def attend_in_parts(inputs: tuple[NamedArray, ...], mask: SharedPromptMask, config: AttentionConfig) -> NamedArray:
    query, keys, values = inputs
    attend = kernel_of(config, config.scaling_factor or config.HeadSize.size**-0.5, interpret=True)
    ids = mask.prompt_segment_ids.array
    attended = group_attention(query.array, keys.array, values.array, ids, group=mask.group, attend=attend)
    return hax.named(attended, query.axes)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("backend", "group", "capped", "dtype", "tolerance"),
    [
        (None, GROUP, False, jnp.float32, 1e-5),
        (None, GROUP, True, jnp.float32, 1e-5),
        (None, GROUP, False, jnp.bfloat16, 5e-2),
        (SPLASH, GroupRow(128, 3, 256), True, jnp.float32, 1e-5),
        (SPLASH, GroupRow(128, 3, 128), False, jnp.bfloat16, 5e-2),
        (PALLAS, GroupRow(64, 3, 64), False, jnp.float32, 1e-5),
        (PALLAS, GroupRow(64, 3, 128), True, jnp.float32, 1e-5),
    ],
)
def test_equals_attention_to_all_pairs_with_the_mask(
    backend: Any, group: GroupRow, capped: bool, dtype: jnp.dtype, tolerance: float
) -> None:
    """The kernels are interpreted, with several blocks of keys. Their gradient on a mesh is in test_train_step."""
    changes = {"logits_soft_cap": 1.5, "scaling_factor": 0.7} if capped else {}
    config = dataclasses.replace(CONFIG, attn_backend=backend, flash_attention_block_size=128, **changes)
    mask, inputs = make_mask(group), make_inputs(group, dtype)
    tokens = hax.named(jnp.array(segments_and_prompts(group)[0]) > 0, inputs[0].axes[:2])
    weights = hax.random.normal(jax.random.key(1), inputs[0].axes) * tokens

    def value_and_gradient(attend: Any) -> list[np.ndarray]:
        def loss(inputs: tuple[NamedArray, ...]) -> tuple[jax.Array, NamedArray]:
            attended = attend(inputs, mask, config)
            return hax.sum(attended.astype(jnp.float32) * weights).scalar(), attended

        (_, attended), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
        # Padding has any finite value.
        assert np.isfinite(attended.array).all()
        return [np.asarray(array.array, np.float32) for array in (attended * tokens, *gradients)]

    for one, other in zip(value_and_gradient(attend_in_parts), value_and_gradient(attend_to_all_pairs), strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"num_layers": 1}) for name in FAMILIES),
        *((name, {"sliding_window": 3}) for name in ("mistral", "gemma2")),
    ],
)
def test_each_family_gives_the_same_logprobs_and_gradient(name: str, changes: dict[str, int], tiny) -> None:
    """Prompts are shorter and longer than their place, answers fill theirs, and one does not share its prompt."""
    trainer = tiny.make_trainer()
    model = random_model(dataclasses.replace(cast(Any, FAMILIES[name]), **changes))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size=size).tolist() for size in (5, 4, 7)]
    sequences = [
        tiny.one_sequence(prompts[prompt] + rng.integers(2, VOCAB, size=size).tolist(), len(prompts[prompt]))
        for prompt, size in ((0, 4), (0, 1), (1, 3), (0, 2), (2, 1), (2, 2), (1, 4), (1, 4), (1, 1))
    ]
    rollouts = join_batches(sequences)
    alone = RowLayout(12, len(sequences), packed=False)
    groups = RowLayout(GROUP.row_length, 4, packed=True, group=GROUP)
    shared = dataclasses.replace(alone, row_cost=1.0, alternatives=(groups,))

    def logprobs_and_gradient(layout: RowLayout) -> tuple[np.ndarray, list[np.ndarray]]:
        batch = pack_batch(rollouts, TokenMeanConfig(), layout, pad_token_id=0)
        (example,) = batch.microbatches

        def loss(model: LmHeadModel, example: RlExample) -> tuple[jax.Array, jax.Array]:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                activations = policy_activations(model, example)
                logprobs, _ = token_logprobs(activations, model.get_lm_head(), example, temperature=1.0, block_size=64)
            return hax.sum(hax.sin(logprobs)).scalar(), logprobs.array

        with trainer.use_device_mesh():
            differentiate = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
            (_, logprobs), gradient = differentiate(model, jax.tree.map(jnp.asarray, example))
        assert (example.group is None) == (layout is alone)
        return batch.unpack(np.asarray(logprobs)[None])[rollouts.loss_mask], [
            np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(gradient, eqx.is_array))
        ]

    (found, gradient), (expected, right) = logprobs_and_gradient(shared), logprobs_and_gradient(alone)
    assert np.unique(expected).size == expected.size == 22
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for ours, theirs in zip(gradient, right, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.medium
@pytest.mark.parametrize(("platform", "lowered_for", "kernel"), [("tpu", "tpu", "splash"), ("gpu", "cuda", "mha")])
def test_training_is_lowered_for_accelerators_that_are_absent(platform: str, lowered_for: str, kernel: str) -> None:
    """The program has the kernel and its gradient, and no scores of a part of a row."""
    heads = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    config = Qwen3Config(hidden_dim=48, intermediate_dim=80, num_layers=1, **seq_len(1024), **heads)
    attention = attention_kernel(config, platform)
    config = attention.configure(config, 1024)
    places = attention.fit_group(300, 512)
    assert places is not None
    group = GroupRow(places[0], 2, places[1])
    Rows, Position = Axis("batch", 2), Axis("position", group.tokens)
    arrays = {
        name: NamedArray(jax.ShapeDtypeStruct((2, group.tokens), dtype), (Rows, Position))
        for name, dtype in (PER_TOKEN_DTYPES | {"prompt_segment_ids": jnp.int32}).items()
    }

    def loss(model: Any, batch: RlExample) -> jax.Array:
        with hax.axis_mapping({"batch": "data", "kv_head": "model"}):
            return jnp.sum(policy_activations(model, batch).array)

    model = eqx.filter_eval_shape(lambda: config.build(Axis("vocab", 512), key=jax.random.PRNGKey(0)))
    with absent_mesh(platform, (2, 2)):
        traced = jax.jit(jax.grad(loss)).trace(model, RlExample(**arrays, group=group))
        text = traced.lower(lowering_platforms=(lowered_for,)).as_text()
    names = set(re.findall(rf"{kernel}_(?:mha_)?(?:fwd|dkv|dq|forward|backward)", text))
    assert len(names) >= 2, names
    prompt, _, answer = group
    scores = {(prompt, prompt), (answer, answer), (answer, prompt + answer), (prompt + answer, prompt + answer)}
    assert not [pair for pair in scores if f"{pair[0]}x{pair[1]}x" in text]
