# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import json
import os
import re
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.layers.attention import AttentionBackend
from levanter.models.gpt2 import Gpt2Config
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.rl_example import PER_TOKEN_DTYPES, RlExample, to_tokens
from marin_rl.learner.logprobs import (
    blockwise_logprobs,
    blockwise_top_logprobs,
    policy_activations,
    token_logprobs,
)
from marin_rl.utils.levanter_line import next_token_loss, seq_len
from tests import fork_server
from tests.cpu_host import cpu_host

BATCH, POSITIONS, EMBED, VOCAB = 2, 7, 4, 11


def inputs(positions: int = POSITIONS, seed: int = 0, *, batch: int = BATCH, embed: int = EMBED, vocab: int = VOCAB):
    rng = np.random.default_rng(seed)
    activations = rng.normal(size=(batch, positions, embed)).astype(np.float32)
    head = rng.normal(size=(embed, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab, (batch, positions)).astype(np.int32)
    pull = rng.normal(size=(batch, positions)).astype(np.float32)
    return tuple(jnp.asarray(array) for array in (activations, head, targets, pull))


def oracle(activations, head, targets, pull, temperature, mask=None):
    """Return log-probs, entropies, and the gradient of Σ pull·logprob, from full logits in float64; 0 off the mask."""
    mask = np.ones(targets.shape, bool) if mask is None else np.asarray(mask)
    activations, head, pull = (np.asarray(array, np.float64) for array in (activations, head, pull))
    activations, pull = np.where(mask[..., None], activations, 0), np.where(mask, pull, 0)
    targets = np.asarray(targets)
    logits = np.einsum("bpe,ev->bpv", activations, head) / temperature
    logits -= logits.max(-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    probabilities = np.exp(logs)
    logprobs = np.take_along_axis(logs, targets[..., None], -1)[..., 0] * mask
    entropies = -(probabilities * logs).sum(-1) * mask
    slope = (np.eye(head.shape[1])[targets] - probabilities) * pull[..., None] / temperature
    gradients = (np.einsum("bpv,ev->bpe", slope, head), np.einsum("bpe,bpv->ev", activations, slope))
    return logprobs, entropies, gradients


@functools.partial(jax.jit, static_argnames=("temperature", "block_size", "shards"))
def computed(activations, head, targets, pull, mask, temperature, block_size, shards=1):
    def find(activations, head):
        return blockwise_logprobs(
            activations, head, targets, mask, temperature=temperature, block_size=block_size, shards=shards
        )

    (logprobs, entropies), pull_back = jax.vjp(find, activations, head)
    return logprobs, entropies, pull_back((pull, jnp.full_like(entropies, jnp.nan)))  # what nobody reads


def measured(activations, head, targets, pull, temperature, block_size):
    everywhere = jnp.ones(targets.shape, bool)
    return computed(activations, head, targets, pull, everywhere, temperature, block_size)


def assert_close(found, expected, tolerance=1e-5) -> None:
    logprobs, entropies, gradients = expected
    np.testing.assert_allclose(found[0], logprobs, atol=tolerance)
    np.testing.assert_allclose(found[1], entropies, atol=tolerance)
    np.testing.assert_allclose(found[2][0], gradients[0], atol=tolerance)
    np.testing.assert_allclose(found[2][1], gradients[1], atol=tolerance)


def test_the_gradient_of_the_oracle_is_the_slope_of_its_value() -> None:
    """Compare with central differences in float64, in a random direction of activations and head."""
    activations, head, targets, pull = (np.asarray(array) for array in inputs())
    mask = np.random.default_rng(1).random(targets.shape) < 0.6
    along = [np.random.default_rng(2).normal(size=array.shape) for array in (activations, head)]
    step = 1e-5

    def value(sign: float) -> float:
        moved = activations + sign * step * along[0], head + sign * step * along[1]
        return (oracle(*moved, targets, pull, 0.7, mask)[0] * pull).sum()

    gradients = oracle(activations, head, targets, pull, 0.7, mask)[2]
    expected = sum((gradient * way).sum() for gradient, way in zip(gradients, along, strict=True))
    np.testing.assert_allclose((value(1) - value(-1)) / (2 * step), expected, rtol=1e-8)


@pytest.mark.medium
@pytest.mark.parametrize("block_size", [*range(1, POSITIONS + 2), 17, BATCH * POSITIONS, BATCH * POSITIONS + 1])
def test_any_block_size_agrees_with_full_logits(block_size: int) -> None:
    case = inputs()
    assert_close(measured(*case, 0.7, block_size), oracle(*case, 0.7))


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_any_temperature_agrees_with_full_logits(temperature: float) -> None:
    case = inputs(seed=1)
    assert_close(measured(*case, temperature, 3), oracle(*case, temperature), 4e-5)


MASKED_BATCH, MASKED_POSITIONS = 4, 9


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    """Draw any mask: each row empty, full, one contiguous range, or arbitrary."""
    rows = []
    for _ in range(MASKED_BATCH):
        start, end = sorted(draw(st.tuples(*[st.integers(0, MASKED_POSITIONS)] * 2)))
        at = np.arange(MASKED_POSITIONS)
        anything = draw(st.lists(st.booleans(), min_size=MASKED_POSITIONS, max_size=MASKED_POSITIONS))
        rows.append(draw(st.sampled_from([(at >= start) & (at < end), np.array(anything)])))
    return np.stack(rows)


@pytest.mark.medium
@settings(max_examples=100, deadline=None)
@given(
    mask=masks(),
    block_size=st.sampled_from([1, 2, 4, 16, MASKED_BATCH * MASKED_POSITIONS]),
    shards=st.sampled_from([1, 2]),
    poison=st.sampled_from([0.0, np.nan, np.inf, -np.inf, 3e38]),
)
def test_any_mask_agrees_with_full_logits_for_any_values_off_the_mask(
    mask: np.ndarray, block_size: int, shards: int, poison: float
) -> None:
    activations, head, targets, pull = inputs(MASKED_POSITIONS, batch=MASKED_BATCH)
    expected = oracle(activations, head, targets, pull, 0.7, mask)
    activations = jnp.where(mask[..., None], activations, poison)
    pull = jnp.where(mask, pull, poison)
    found = computed(activations, head, targets, pull, jnp.asarray(mask), 0.7, block_size, shards)
    assert_close(found, expected)
    assert not found[0][~mask].any()
    assert not found[1][~mask].any()
    assert not found[2][0][~mask].any()


@pytest.mark.medium
@settings(max_examples=30, deadline=None)
@given(
    mask=masks(),
    count=st.integers(1, VOCAB),
    block_size=st.sampled_from([1, 4, MASKED_BATCH * MASKED_POSITIONS]),
    shards=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
)
def test_likeliest_tokens_agree_with_full_logits_on_any_mask(
    mask: np.ndarray, count: int, block_size: int, shards: tuple[int, int]
) -> None:
    activations, head, _, _ = inputs(MASKED_POSITIONS, batch=MASKED_BATCH)
    logits = np.einsum("bpe,ev->bpv", np.float64(activations), np.float64(head))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids, logprobs = likeliest(
        jnp.where(mask[..., None], activations, jnp.nan), head, jnp.asarray(mask), count, block_size, *shards
    )
    order = np.argsort(-logs, axis=-1)[..., :count]
    np.testing.assert_array_equal(ids, np.where(mask[..., None], order, 0))
    expected = np.where(mask[..., None], np.take_along_axis(logs, order, -1), 0)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def likeliest(activations, head, mask, count, block_size, shards=1, position_shards=1):
    return blockwise_top_logprobs(
        activations,
        head,
        mask,
        count=count,
        block_size=block_size,
        shards=shards,
        position_shards=position_shards,
    )


def test_the_lower_of_equally_likely_tokens_is_first() -> None:
    activations, head, _, _ = inputs()
    ids, logprobs = likeliest(activations, jnp.zeros_like(head), jnp.ones(activations.shape[:2], bool), 5, 3)
    assert (ids == np.arange(5)).all()
    np.testing.assert_allclose(logprobs, -np.log(VOCAB), atol=1e-6)


def test_without_any_loss_token_everything_is_zero() -> None:
    activations, head, targets, pull = inputs()
    found = computed(activations * jnp.nan, head, targets, pull, jnp.zeros(targets.shape, bool), 1.0, 3)
    assert not any(np.asarray(array).any() for array in jax.tree.leaves(found))


def test_new_masks_do_not_recompile(tiny) -> None:
    activations, head, targets, pull = inputs(MASKED_POSITIONS, batch=MASKED_BATCH)

    @jax.jit
    def total(activations, head, mask):
        return (pull * blockwise_logprobs(activations, head, targets, mask, temperature=1.0, block_size=2)[0]).sum()

    program = jax.jit(jax.grad(total, argnums=(0, 1)))
    rng = np.random.default_rng(0)
    first, *others = [jnp.asarray(rng.random(targets.shape) < share) for share in (0.0, 0.1, 0.5, 1.0)]
    program(activations, head, first)
    with tiny.counted_compiles() as compiled:
        for mask in others:
            program(activations, head, mask)
    assert compiled == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("masked", "blocks"), [(0, []), (1, [2]), (5, [2, 2, 2]), (16, [16]), (19, [16, 2, 2]), (36, [16, 16, 2, 2])]
)
def test_the_head_runs_on_whole_blocks_then_on_eighths(
    monkeypatch: pytest.MonkeyPatch, masked: int, blocks: list[int]
) -> None:
    runs: list[tuple[int, ...]] = []

    def counted(subscripts, *operands, **settings):
        if subscripts == "ste,ev->stv":  # the logits
            jax.debug.callback(lambda: runs.append(operands[0].shape))
        return einsum(subscripts, *operands, **settings)

    einsum = jnp.einsum
    monkeypatch.setattr(jnp, "einsum", counted)
    activations, head, targets, pull = inputs(MASKED_POSITIONS, batch=MASKED_BATCH)
    mask = np.zeros(targets.shape, bool)
    mask.flat[np.random.default_rng(0).permutation(mask.size)[:masked]] = True

    def total(activations, head):
        found = blockwise_logprobs(activations, head, targets, jnp.asarray(mask), temperature=1.0, block_size=16)
        return (pull * found[0]).sum()

    jax.block_until_ready(jax.jit(jax.grad(total, argnums=(0, 1)))(activations, head))
    jax.effects_barrier()
    assert runs == [(1, size, EMBED) for size in blocks] * 2  # forward and backward


@pytest.mark.parametrize("block_size", [2, POSITIONS])
def test_large_logits_do_not_overflow(block_size: int) -> None:
    activations, head, targets, pull = inputs()
    case = (activations * 100, head, targets, pull)
    assert_close(measured(*case, 1.0, block_size), oracle(*case, 1.0), 1e-3)


@pytest.mark.parametrize("block_size", [2, POSITIONS])
def test_an_offset_common_to_all_logits_changes_nothing(block_size: int) -> None:
    activations, head, targets, pull = inputs(seed=3)
    # One additional embedding adds 1000 to every logit; float32 then has steps of 6e-5.
    lifted = jnp.pad(activations, ((0, 0), (0, 0), (0, 1)), constant_values=1000.0)
    found = measured(lifted, jnp.pad(head, ((0, 1), (0, 0)), constant_values=1.0), targets, pull, 1.0, block_size)
    logprobs, entropies, _ = oracle(activations, head, targets, pull, 1.0)
    np.testing.assert_allclose(found[0], logprobs, atol=5e-4)
    np.testing.assert_allclose(found[1], entropies, atol=5e-4)


@pytest.mark.medium
@pytest.mark.parametrize("block_size", [2, POSITIONS])
def test_entropy_is_true_at_its_extremes_and_carries_no_gradient(block_size: int) -> None:
    _, head, targets, _ = inputs()

    def total_entropy(activations):
        everywhere = jnp.ones(targets.shape, bool)
        return blockwise_logprobs(activations, head, targets, everywhere, temperature=1.0, block_size=block_size)[
            1
        ].sum()

    uniform = jnp.zeros((BATCH, POSITIONS, EMBED))
    value, gradient = jax.value_and_grad(total_entropy)(uniform)
    np.testing.assert_allclose(value, BATCH * POSITIONS * np.log(VOCAB), rtol=1e-6)
    assert not gradient.any()
    certain = jnp.full((BATCH, POSITIONS, EMBED), 1e4)
    np.testing.assert_allclose(total_entropy(certain), 0.0, atol=1e-6)


LONG = 96


@pytest.mark.medium
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("block_size", [1, 32, LONG])
def test_bfloat16_inputs_accumulate_in_float32(block_size: int, share: float) -> None:
    activations, head, targets, pull = inputs(LONG, seed=2)
    mask = np.random.default_rng(4).random(targets.shape) < share
    rounded = jnp.asarray(activations, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    logprobs, entropies, gradients = computed(*rounded, targets, pull, jnp.asarray(mask), 1.0, block_size)
    expected = oracle(*rounded, targets, pull, 1.0, mask)
    assert logprobs.dtype == entropies.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-5)
    np.testing.assert_allclose(entropies, expected[1], atol=1e-5)
    for found, wanted in zip(gradients, expected[2], strict=True):
        assert found.dtype == jnp.bfloat16
        error = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
        assert error < 2**-8, found.shape  # one rounding to bfloat16


def shapes(text: str) -> set[tuple[int, ...]]:
    return {tuple(int(size) for size in found.split(",")) for found in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)}


# Sizes of which no smaller product is as large as batch x position x vocab.
WIDE = {"batch": 2, "positions": 16, "embed": 8, "vocab": 1021}


@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_batch_position_vocab_is_never_materialised(block_size: int) -> None:
    found = compiled_shapes(block_size)
    full = WIDE["batch"] * WIDE["positions"] * WIDE["vocab"]
    assert max(np.prod(shape) for shape in found) < full
    # The logits of one block are present, so the text is that of the program.
    assert any(np.prod(shape) == block_size * WIDE["vocab"] for shape in found)


def test_the_search_for_materialised_logits_finds_them() -> None:
    full = WIDE["batch"] * WIDE["positions"] * WIDE["vocab"]
    assert max(np.prod(shape) for shape in compiled_shapes(WIDE["batch"] * WIDE["positions"])) >= full


def compiled_shapes(block_size: int) -> set[tuple[int, ...]]:
    """Return the shapes of all arrays in the program of loss and gradient, compiled and traced."""
    batch, positions, embed, vocab = WIDE.values()

    def total(activations, head, targets, mask):
        logprobs, entropies = blockwise_logprobs(
            activations, head, targets, mask, temperature=1.0, block_size=block_size
        )
        return logprobs.sum() + entropies.sum()

    program = jax.value_and_grad(total, argnums=(0, 1))
    arguments = (
        jax.ShapeDtypeStruct((batch, positions, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, positions), jnp.int32),
        jax.ShapeDtypeStruct((batch, positions), jnp.bool_),
    )
    compiled = jax.jit(program).lower(*arguments).compile().as_text()
    traced = str(jax.make_jaxpr(program)(*arguments))
    return shapes(compiled) | shapes(traced)


def test_memory_at_a_large_vocabulary_is_that_of_a_block() -> None:
    batch, positions, embed, vocab, block_size = 2, 256, 8, 50_000, 8
    arguments = (
        jax.ShapeDtypeStruct((batch, positions, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, positions), jnp.int32),
        jax.ShapeDtypeStruct((batch, positions), jnp.float32),
        jax.ShapeDtypeStruct((batch, positions), jnp.bool_),
    )
    program = computed.lower(*arguments, temperature=1.0, block_size=block_size).compile()
    logits, of_head, of_activations = (4 * block_size * vocab, 4 * embed * vocab, 4 * batch * positions * embed)
    bound = 3 * logits + 2 * of_head + 4 * of_activations
    assert program.memory_analysis().temp_size_in_bytes < bound < 4 * batch * positions * vocab / 10


def test_memory_of_the_likeliest_tokens_is_that_of_a_block() -> None:
    batch, positions, embed, vocab, block_size, count = 2, 256, 8, 50_000, 8, 16
    arguments = (
        jax.ShapeDtypeStruct((batch, positions, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, positions), jnp.bool_),
    )
    program = likeliest.lower(*arguments, count, block_size).compile()
    bound = 4 * block_size * vocab * 4 + 4 * 8 * batch * positions * count
    assert program.memory_analysis().temp_size_in_bytes < bound < 4 * batch * positions * vocab / 10


@pytest.mark.medium
def test_any_mesh_gives_equal_results_and_loops_exchange_only_vocabulary_reductions(
    tmp_path: Path,
) -> None:
    batch, positions, embed, vocab = 16, 12, 16, 264
    activations, head, targets, pull = inputs(positions, batch=batch, embed=embed, vocab=vocab)
    ids = np.roll(np.asarray(targets), 1, axis=1)
    loss_mask = np.random.default_rng(5).random(ids.shape) < 0.4
    loss_mask[:, 0] = loss_mask[3] = False
    np.savez(
        tmp_path / "inputs.npz",
        activations=activations,
        lm_head=head,
        input_ids=ids,
        loss_mask=loss_mask,
        pull=np.roll(pull, 1, axis=1),
    )
    command = [sys.executable, "-m", "tests.learner.logprobs_on_meshes", str(tmp_path)]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    expected = oracle(activations, head, targets, pull, 0.7, np.roll(loss_mask, -1, axis=1))
    for case in ("data8", "data4-model2"):
        found = np.load(tmp_path / f"{case}.npz")
        aligned = (np.roll(found[name], -1, axis=1) for name in ("logprobs", "entropies"))
        assert_close((*aligned, (found["of_activations"], found["of_head"])), expected, 2e-5)
    assert facts["devices"] == 8
    # The gather is of the head, which is sharded along its embedding. It is not kept from one microbatch to the next.
    assert facts["data8"] == {"in_loops": [], "gathers": 1, "gathers_before_loop": 0}
    split = facts["data4-model2"]
    assert (split["gathers"], split["gathers_before_loop"]) == (1, 0)
    assert split["in_loops"]  # at least the normalizers, so the search works
    assert max(split["in_loops"]) <= batch // 4 * 4 * embed  # no logits, and no gradient of the head


LLAMA = LlamaConfig(
    **seq_len(16),
    hidden_dim=16,
    intermediate_dim=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    gradient_checkpointing=False,
    attn_backend=AttentionBackend.VANILLA,
)
# Learned positions: unlike rotary ones, they do not cancel if a whole sequence moves.
GPT2 = Gpt2Config(
    **seq_len(16),
    hidden_dim=16,
    num_layers=2,
    num_heads=2,
    gradient_checkpointing=False,
    attn_backend=AttentionBackend.VANILLA,
)
MODEL_VOCAB = Axis("vocab", 40)


@functools.cache
def make_model(config: LmConfig) -> LmHeadModel:
    """Return random weights from numpy, which avoids compiling initializers; wide, so that errors are visible."""
    rng = np.random.default_rng(0)
    shape = eqx.filter_eval_shape(lambda: config.build(MODEL_VOCAB, key=jax.random.PRNGKey(0)))

    def fill(leaf: object) -> object:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)

    return jax.tree.map(fill, shape)


def make_batch(sequences: list[list[tuple[np.ndarray, np.ndarray]]], positions: int = 14) -> RlExample:
    """Return rows of sequences, each with tokens and a loss mask."""
    arrays = {name: np.zeros((len(sequences), positions), dtype) for name, dtype in PER_TOKEN_DTYPES.items()}
    for row, own in enumerate(sequences):
        start = 0
        for segment, (tokens, mask) in enumerate(own, 1):
            span = slice(start, start + len(tokens))
            arrays["input_ids"][row, span] = tokens
            arrays["loss_mask"][row, span] = mask
            arrays["segment_ids"][row, span] = segment
            arrays["position_ids"][row, span] = np.arange(len(tokens))
            start = span.stop
    axes = (Axis("batch", len(sequences)), Axis("position", positions))
    return RlExample(**{name: hax.named(array, axes) for name, array in arrays.items()})


def random_sequences(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(sum(lengths))
    pairs = []
    for length in lengths:
        mask = rng.random(length) < 0.6
        mask[0] = False
        pairs.append((rng.integers(0, MODEL_VOCAB.size, length), mask))
    return pairs


@eqx.filter_jit
def scored(model: LmHeadModel, batch: RlExample, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    found = token_logprobs(
        policy_activations(model, batch), model.get_lm_head(), batch, temperature=temperature, block_size=5
    )
    return tuple(values.rearrange(batch.input_ids.axes).array for values in found)


@pytest.mark.medium
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_logprobs_use_the_right_positions(config: LmConfig) -> None:
    """Compare log-probs with the model's logits, one token at a time."""
    model, batch = make_model(config), make_batch([[pair] for pair in random_sequences(14, 9, 11)] + [[]])
    logits = eqx.filter_jit(lambda m, e: m(e.input_ids, e.attention_mask))(model, batch)
    logits = np.asarray(logits.rearrange(("batch", "position", "vocab")).array, np.float64) / 0.8
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs, entropies = (np.asarray(values) for values in scored(model, batch, 0.8))
    mask = np.asarray(batch.loss_mask.array)
    assert mask.sum() > 10
    assert not logprobs[~mask].any()
    assert not entropies[~mask].any()
    for row, position in np.argwhere(mask):
        said = logs[row, position - 1]
        token = int(batch.input_ids.array[row, position])
        np.testing.assert_allclose(logprobs[row, position], said[token], atol=1e-5)
        np.testing.assert_allclose(entropies[row, position], -(np.exp(said) * said).sum(), atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_packed_sequences_are_scored_like_separate_rows(config: LmConfig) -> None:
    first, second, third = random_sequences(5, 9, 8)
    model = make_model(config)
    alone = [np.asarray(values) for values in scored(model, make_batch([[first], [second], [third]]))]
    together = [np.asarray(values) for values in scored(model, make_batch([[first, second], [third]]))]
    assert np.abs(alone[0]).sum() > 10
    for own, shared in zip(alone, together, strict=True):
        np.testing.assert_allclose(shared[0, :5], own[0, :5], atol=1e-5)
        np.testing.assert_allclose(shared[0, 5:14], own[1, :9], atol=1e-5)
        np.testing.assert_allclose(shared[1], own[2], atol=1e-5)


@pytest.mark.medium
def test_levanters_loss_uses_the_same_tokens() -> None:
    model, batch = make_model(LLAMA), make_batch([[pair] for pair in random_sequences(14, 9, 11)])
    loss = eqx.filter_jit(lambda m, e: next_token_loss(m, e.to_lm_example()))(model, batch)
    ours = -np.asarray(scored(model, batch)[0])
    theirs = np.asarray(to_tokens(loss).rearrange(batch.input_ids.axes).array)
    mask = np.asarray(batch.loss_mask.array)
    assert mask.sum() > 10
    np.testing.assert_allclose(theirs[mask], ours[mask], atol=1e-5)
    assert not theirs[~mask].any()
    assert (ours[mask] > 0).all()
