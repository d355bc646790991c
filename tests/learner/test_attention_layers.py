# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows with shared prompts, windows, and the kernels of TPUs and GPUs, which are interpreted or lowered only.

Positions that are split over devices are in test_context_attention; log-probabilities and gradients of transformers in
test_policy_model.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, AttentionConfig, AttentionMask, dot_product_attention
from levanter.models.gemma import Gemma2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel
from levanter.models.qwen import Qwen3Config

from marin_rl.batching.attention_kernel import AttentionKernel, GpuBackend, attention_kernel
from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample, SharedPromptMask, pack_batch
from marin_rl.batching.rollout_batch import join_batches
from marin_rl.learner import attention_layers, logprobs
from marin_rl.learner.attention_layers import kernel_of, with_attention_kernel
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.models.attention_windows import layer_windows, windows_within
from marin_rl.models.olmo3 import Olmo3Config
from marin_rl.models.rotary import LinearRotaryConfig, YarnRotaryConfig
from marin_rl.objectives.aggregation import TokenMeanConfig
from marin_rl.utils.levanter_line import max_positions, seq_len
from tests.absent_gpu import absent_mesh
from tests.sampling.families import FAMILIES, VOCAB, random_model

pytestmark = pytest.mark.usefixtures("compiled_quickly")

GROUP = GroupRow(prompt_length=4, answers=3, answer_length=4)
Batch = Axis("batch", 2)
CONFIG = AttentionConfig(Embed=Axis("embed", 24), num_heads=4, num_kv_heads=2, head_dim=6)
FLASH, VANILLA = AttentionBackend.JAX_FLASH, AttentionBackend.VANILLA
SPLASH, PALLAS = AttentionBackend.SPLASH, GpuBackend.PALLAS
WINDOW = 20
LENGTHS = (80, 40)
GEMMA = dataclasses.replace(FAMILIES["gemma2"], sliding_window=WINDOW, attn_logit_softcapping=None)
MISTRAL = dataclasses.replace(FAMILIES["mistral"], sliding_window=WINDOW)


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
    scale = config.scaling_factor or config.HeadSize.size**-0.5
    attend = kernel_of(config, scale, group=mask.group, interpret=True)
    return hax.named(attend(query.array, keys.array, values.array, mask.prompt_segment_ids.array), query.axes)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("backend", "group", "capped", "dtype", "tolerance"),
    [
        (None, GROUP, False, jnp.float32, 1e-5),
        (None, GROUP, True, jnp.float32, 1e-5),
        (None, GROUP, False, jnp.bfloat16, 5e-2),
        (SPLASH, GroupRow(128, 3, 256), True, jnp.float32, 1e-5),
        (SPLASH, GroupRow(128, 3, 128), False, jnp.bfloat16, 5e-2),
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
@pytest.mark.parametrize(
    ("config", "backend", "block"),
    [
        (GEMMA, FLASH, 32),
        (MISTRAL, FLASH, 32),
        (GEMMA, PALLAS, None),
        (MISTRAL, PALLAS, None),
        *((FAMILIES[name], PALLAS, None) for name in ("gemma2", "llama", "olmo2", "qwen3")),
    ],
)
def test_packed_rows_equal_rows_of_their_own(config: Any, backend: Any, block: int | None, monkeypatch: Any):
    """Windows and blocks are shorter than the sequences; the kernel of GPUs is interpreted."""
    interpreted = functools.partial(with_attention_kernel, interpret=True)
    monkeypatch.setattr(logprobs, "with_attention_kernel", interpreted)
    model = random_model(dataclasses.replace(config, attn_backend=backend, flash_attention_block_size=block))
    found = activations_and_gradient(model, example([list(LENGTHS)], 128))
    plain = cast(Any, AttentionKernel(VANILLA).configure(config, LENGTHS[0]))
    own_rows = example([[length] for length in LENGTHS], LENGTHS[0])
    expected = activations_and_gradient(random_model(plain), own_rows)
    if layer_windows(config)[0] is not None:
        without = activations_and_gradient(random_model(dataclasses.replace(plain, sliding_window=128)), own_rows)
        assert np.abs(expected[0] - without[0]).max() > 0.1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.medium
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


@pytest.mark.medium
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


@pytest.mark.parametrize("backend", [SPLASH, PALLAS])
def test_kernels_that_know_no_positions_do_not_share_prompts_beyond_the_window(backend: Any):
    kernel = AttentionKernel(backend)
    short, long = GroupRow(64, 2, 64), GroupRow(64, 2, 65)
    model = dataclasses.replace(MISTRAL, sliding_window=128)
    assert [kernel.supports_shared_prompts(model, group) for group in (short, long, None)] == [True, False, True]
    assert AttentionKernel(FLASH).supports_shared_prompts(model, long)
    config = dataclasses.replace(model.attention_config(), attn_backend=backend)
    with pytest.raises(NotImplementedError, match=r"windows \(128 positions\) .* set rollouts.share_prompts to false"):
        kernel_of(config, 1.0, 128, group=long)


@pytest.mark.parametrize(
    ("mask", "shards"),
    [
        (AttentionMask.causal(), 1),
        (AttentionMask.causal(offset=1).with_segment_ids(example([[80]], 80).segment_ids), 1),
        (make_mask(GROUP), 2),
    ],
)
def test_masks_that_are_not_supported_are_refused(mask: AttentionMask, shards: int):
    batch = example([[80]], 80)
    split = contextlib.nullcontext() if shards == 1 else hax.axis_mapping({"position": "model"})
    with absent_mesh("gpu", (1, shards)), split:
        model = with_attention_kernel(random_model(dataclasses.replace(FAMILIES["llama"], attn_backend=PALLAS)), batch)
        with pytest.raises(NotImplementedError, match=f"not {type(mask).__name__}; set model.attn_backend: JAX_FLASH"):
            jax.eval_shape(lambda ids: model.activations(ids, mask, key=None), batch.input_ids)


@pytest.mark.parametrize(("upcast", "dtype"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_upcast_attn_gives_float32_to_the_kernel(upcast: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch):
    given = []

    def attend(query: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array) -> jax.Array:
        given.extend(array.dtype for array in (query, keys, values))
        return query

    monkeypatch.setattr(attention_layers, "kernel_of", lambda *_, **__: attend)
    config = dataclasses.replace(FAMILIES["llama"], attn_backend=PALLAS, upcast_attn=upcast)
    model = jmp.get_policy("c=bfloat16").cast_to_compute(random_model(config))
    assert jax.eval_shape(policy_activations, model, example([[80]], 80)).dtype == jnp.bfloat16
    assert given == [dtype] * 3


# No other axis of the models has this size.
LONG = 3456
SMALL: dict[str, Any] = {**seq_len(1024), "hidden_dim": 256, "intermediate_dim": 80}
GEMMA_2B = Gemma2Config(
    hidden_dim=2304, intermediate_dim=9216, num_layers=26, num_heads=8, num_kv_heads=4, head_dim=256, **seq_len(LONG)
)
LLAMA_1B = LlamaConfig(
    hidden_dim=2048, intermediate_dim=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, **seq_len(LONG)
)
LLAMA_8B = LlamaConfig(
    hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, **seq_len(LONG)
)
QWEN = Qwen3Config(**SMALL, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=64)
WINDOWED = Gemma2Config(
    **{**SMALL, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64},
    sliding_window=300,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("config", "platform", "mesh", "shared"),
    [
        (LLAMA_1B, "gpu", (1, 1), False),
        (LLAMA_8B, "gpu", (2, 2), False),
        (dataclasses.replace(GEMMA_2B, sliding_window=LONG), "gpu", (1, 1), False),
        *((config, platform, (2, 2), config is QWEN) for config in (QWEN, WINDOWED) for platform in ("tpu", "gpu")),
    ],
)
def test_training_is_lowered_for_devices_that_are_absent(
    config: Any, platform: str, mesh: tuple[int, int], shared: bool
):
    """The program has the kernel and its gradient in bfloat16, and no array of the scores of a row or of its parts."""
    attention, positions, group = attention_kernel(config, platform), max_positions(config), None
    config = attention.configure(config, positions)
    sizes = {positions}
    if shared:
        places = attention.fit_group(300, 512)
        assert places is not None
        group = GroupRow(places[0], 2, places[1])
        positions, sizes = group.tokens, {*places, sum(places)}
    axes = (Axis("batch", 2 * mesh[0]), Axis("position", positions))
    dtypes = PER_TOKEN_DTYPES | ({"prompt_segment_ids": jnp.int32} if shared else {})
    arrays = {
        name: NamedArray(jax.ShapeDtypeStruct((axes[0].size, positions), dtype), axes) for name, dtype in dtypes.items()
    }

    def loss(model: Any, batch: RlExample) -> jax.Array:
        with hax.axis_mapping({"batch": "data", "kv_head": "model"}):
            model = jmp.get_policy("c=bfloat16").cast_to_compute(model)
            return jnp.sum(policy_activations(model, batch).array.astype(jnp.float32))

    model = eqx.filter_eval_shape(lambda: config.build(Axis("vocab", 512), key=jax.random.PRNGKey(0)))
    with absent_mesh(platform, mesh):
        traced = jax.jit(jax.grad(loss)).trace(model, RlExample(**arrays, group=group))
        text = traced.lower(lowering_platforms=({"tpu": "tpu", "gpu": "cuda"}[platform],)).as_text()
    assert not [size for size in sizes if any(f"{other}x{size}x" in text for other in sizes)]
    kernel = {"tpu": "splash", "gpu": "mha"}[platform]
    found = set(re.findall(rf"{kernel}_(?:mha_)?(?:fwd|dkv|dq|forward|backward)", text))
    own = config.attention_config()
    assert (len(found) >= 2) == (own.logits_soft_cap is None), found
    if found and platform == "gpu" and not shared:
        assert f"2x{positions}x{config.num_heads // mesh[1]}x{own.HeadSize.size}xbf16" in text
