# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
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

from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import RlExample, SharedPromptMask, pack_to_score
from marin_rl.learner.group_attention import group_attention
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from tests.sampling.families import FAMILIES, VOCAB, random_model

pytestmark = pytest.mark.usefixtures("compiled_quickly")

GROUP = GroupRow(prompt_length=4, answers=3, answer_length=5)
Batch, Position = Axis("batch", 2), Axis("position", GROUP.row_length)
CONFIG = AttentionConfig(Embed=Axis("embed", 24), num_heads=4, num_kv_heads=2, head_dim=6)
SEGMENTS = [
    # A shorter prompt, a full answer, a shorter one and none; a full prompt, and an answer that does not share it.
    [1, 1, 0, 0, 2, 2, 2, 2, 2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 2, 2, 2, 0, 0, 3, 0, 0, 0, 0, 4, 4, 4, 4, 0],
]
PROMPTS = [
    [1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 4, 4, 4, 4, 0],
]


def make_mask() -> SharedPromptMask:
    segments, prompts = (hax.named(jnp.array(rows), (Batch, Position)) for rows in (SEGMENTS, PROMPTS))
    return SharedPromptMask(
        is_causal=True,
        segment_ids=(segments, segments),
        prompt_segment_ids=prompts,
        position_ids=hax.zeros_like(segments),
        group=GROUP,
    )


def make_inputs(dtype: jnp.dtype) -> tuple[NamedArray, NamedArray, NamedArray]:
    """Return query, keys and values, in different orders of axes."""
    heads = (CONFIG.KVHeads, CONFIG.QHeadsPerGroup)
    orders = [(Batch, Position, *heads, CONFIG.HeadSize), (CONFIG.KVHeads, Batch, Position, CONFIG.HeadSize)]
    axes = [orders[0], orders[1], (Batch, Position, CONFIG.KVHeads, CONFIG.HeadSize)]
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(hax.random.normal(key, own).astype(dtype) for key, own in zip(keys, axes, strict=True))


def attend_to_all_pairs(inputs: tuple[NamedArray, ...], mask: SharedPromptMask, config: AttentionConfig) -> NamedArray:
    query, keys, values = (array.astype(jnp.float32) if config.upcast_attn else array for array in inputs)
    keys, values = (array.rename({"position": "key_position"}) for array in (keys, values))
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
    )


@pytest.mark.parametrize(
    ("changes", "dtype", "tolerance"),
    [
        ({}, jnp.float32, 1e-5),
        ({"logits_soft_cap": 1.5, "scaling_factor": 0.7}, jnp.float32, 1e-5),
        ({"upcast_attn": True}, jnp.bfloat16, 1e-5),
        ({}, jnp.bfloat16, 5e-2),
    ],
    ids=["float32", "cap and scale", "upcast", "bfloat16"],
)
def test_equals_attention_to_all_pairs_with_the_mask(changes: dict, dtype: jnp.dtype, tolerance: float) -> None:
    config, mask, inputs = dataclasses.replace(CONFIG, **changes), make_mask(), make_inputs(dtype)
    tokens = hax.named(jnp.array(SEGMENTS) > 0, (Batch, Position))
    weights = hax.random.normal(jax.random.key(1), inputs[0].axes) * tokens

    def value_and_gradient(attend) -> list[np.ndarray]:
        def loss(inputs):
            attended = attend(inputs).astype(jnp.float32)
            return hax.sum(attended * weights).scalar(), attended * tokens

        (_, attended), gradients = jax.value_and_grad(loss, has_aux=True)(inputs)
        return [
            np.asarray(array.rearrange(inputs[0].axes if i == 0 else inputs[i - 1].axes).array, np.float32)
            for i, array in enumerate([attended, *gradients])
        ]

    found = value_and_gradient(lambda inputs: group_attention(*inputs, mask, config))
    expected = value_and_gradient(lambda inputs: attend_to_all_pairs(inputs, mask, config))
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def test_padding_gives_finite_numbers() -> None:
    mask = make_mask()
    attended = group_attention(*make_inputs(jnp.float32), mask, CONFIG)
    assert np.isfinite(attended.array).all()


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_gives_the_same_logprobs_and_gradient(name: str, tiny) -> None:
    """Prompts are shorter and longer than their place, and one answer does not share its prompt."""
    trainer = tiny.make_trainer()
    model = random_model(dataclasses.replace(cast(Any, FAMILIES[name]), num_layers=1))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size=size).tolist() for size in (5, 4, 7)]
    rollouts = [
        tokens_of(prompts[prompt] + rng.integers(2, VOCAB, size=size).tolist(), len(prompts[prompt]))
        for prompt, size in ((0, 4), (0, 1), (1, 3), (0, 2), (2, 1), (2, 2), (1, 4), (1, 4), (1, 1))
    ]
    alone = RowLayout(12, len(rollouts), packed=False)
    groups = RowLayout(GROUP.row_length, 4, packed=True, group=GROUP)
    shared = dataclasses.replace(alone, row_cost=1.0, alternatives=(groups,))

    def logprobs_and_gradient(layout: RowLayout) -> tuple[np.ndarray, list[np.ndarray]]:
        batch = pack_to_score(rollouts, layout, pad_token_id=0)
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
        by_rollout = batch.unpack([np.asarray(logprobs)])
        return np.concatenate([r[rollout.loss_mask] for r, rollout in zip(by_rollout, rollouts, strict=True)]), [
            np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(gradient, eqx.is_array))
        ]

    (found, gradient), (expected, right) = logprobs_and_gradient(shared), logprobs_and_gradient(alone)
    assert np.unique(expected).size == expected.size == 22
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for ours, theirs in zip(gradient, right, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


def tokens_of(ids: list[int], prompt: int) -> ProcessedRollout:
    """Return a rollout of one sequence whose tokens after the prompt have loss."""
    count = len(ids)
    mask = np.arange(count)[None] >= prompt
    zeros = np.zeros((1, count), np.float32)
    return ProcessedRollout(
        source="test",
        id="test",
        input_ids=np.array([ids], np.int32),
        loss_mask=mask,
        segment_ids=np.ones((1, count), np.int32),
        policy_logprobs=zeros,
        reference_logprobs=zeros,
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        values=zeros,
    )
