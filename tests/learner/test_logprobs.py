# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import re

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.lm_model import compute_next_token_loss

from marin_rl.batching.alignment import to_tokens
from marin_rl.learner.logprobs import blockwise_logprobs, token_logprobs

BATCH, POSITIONS, EMBED, VOCAB = 2, 7, 4, 11


def inputs(positions: int = POSITIONS, seed: int = 0):
    rng = np.random.default_rng(seed)
    activations = rng.normal(size=(BATCH, positions, EMBED)).astype(np.float32)
    head = rng.normal(size=(EMBED, VOCAB)).astype(np.float32)
    targets = rng.integers(0, VOCAB, (BATCH, positions)).astype(np.int32)
    pull = rng.normal(size=(BATCH, positions)).astype(np.float32)
    return tuple(jnp.asarray(array) for array in (activations, head, targets, pull))


def oracle(activations, head, targets, pull, temperature):
    """Log-probs, entropies, and the gradient of Σ pull · logprob, from full logits in float64."""
    activations, head, pull = (np.asarray(array, np.float64) for array in (activations, head, pull))
    targets = np.asarray(targets)
    logits = np.einsum("bpe,ev->bpv", activations, head) / temperature
    logits -= logits.max(-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    probabilities = np.exp(logs)
    logprobs = np.take_along_axis(logs, targets[..., None], -1)[..., 0]
    entropies = -(probabilities * logs).sum(-1)
    slope = (np.eye(head.shape[1])[targets] - probabilities) * pull[..., None] / temperature
    gradients = (np.einsum("bpv,ev->bpe", slope, head), np.einsum("bpe,bpv->ev", activations, slope))
    return logprobs, entropies, gradients


def measured(activations, head, targets, pull, temperature, block_size):
    def pulled(activations, head):
        logprobs, entropies = blockwise_logprobs(
            activations, head, targets, temperature=temperature, block_size=block_size
        )
        return jnp.sum(pull * logprobs), (logprobs, entropies)

    run = jax.jit(jax.value_and_grad(pulled, argnums=(0, 1), has_aux=True))
    (_, (logprobs, entropies)), gradients = run(activations, head)
    return logprobs, entropies, gradients


def assert_close(found, expected, tolerance=1e-5) -> None:
    logprobs, entropies, gradients = expected
    np.testing.assert_allclose(found[0], logprobs, atol=tolerance)
    np.testing.assert_allclose(found[1], entropies, atol=tolerance)
    np.testing.assert_allclose(found[2][0], gradients[0], atol=tolerance)
    np.testing.assert_allclose(found[2][1], gradients[1], atol=tolerance)


@pytest.mark.parametrize("block_size", range(1, POSITIONS + 2))
def test_any_block_size_agrees_with_full_logits(block_size: int) -> None:
    case = inputs()
    assert_close(measured(*case, 0.7, block_size), oracle(*case, 0.7))


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_any_temperature_agrees_with_full_logits(temperature: float) -> None:
    case = inputs(seed=1)
    assert_close(measured(*case, temperature, 3), oracle(*case, temperature), 4e-5)


@pytest.mark.parametrize("block_size", [2, POSITIONS])
def test_logits_too_large_for_exp_are_no_problem(block_size: int) -> None:
    activations, head, targets, pull = inputs()
    case = (activations * 100, head, targets, pull)
    assert_close(measured(*case, 1.0, block_size), oracle(*case, 1.0), 1e-3)


@pytest.mark.parametrize("block_size", [2, POSITIONS])
def test_an_offset_common_to_all_logits_changes_nothing(block_size: int) -> None:
    activations, head, targets, pull = inputs(seed=3)
    # One more embedding adds 1000 to every logit, for which float32 has steps of 6e-5.
    lifted = jnp.pad(activations, ((0, 0), (0, 0), (0, 1)), constant_values=1000.0)
    found = measured(lifted, jnp.pad(head, ((0, 1), (0, 0)), constant_values=1.0), targets, pull, 1.0, block_size)
    logprobs, entropies, _ = oracle(activations, head, targets, pull, 1.0)
    np.testing.assert_allclose(found[0], logprobs, atol=5e-4)
    np.testing.assert_allclose(found[1], entropies, atol=5e-4)


@pytest.mark.parametrize("block_size", [2, POSITIONS])
def test_entropy_is_true_at_its_extremes_and_carries_no_gradient(block_size: int) -> None:
    _, head, targets, _ = inputs()

    def total_entropy(activations):
        return blockwise_logprobs(activations, head, targets, temperature=1.0, block_size=block_size)[1].sum()

    uniform = jnp.zeros((BATCH, POSITIONS, EMBED))
    value, gradient = jax.value_and_grad(total_entropy)(uniform)
    np.testing.assert_allclose(value, BATCH * POSITIONS * np.log(VOCAB), rtol=1e-6)
    assert not gradient.any()
    certain = jnp.full((BATCH, POSITIONS, EMBED), 1e4)
    np.testing.assert_allclose(total_entropy(certain), 0.0, atol=1e-6)


LONG = 96


@pytest.mark.parametrize("block_size", [1, 32, LONG])
def test_bfloat16_inputs_accumulate_in_float32(block_size: int) -> None:
    activations, head, targets, pull = inputs(LONG, seed=2)
    rounded = jnp.asarray(activations, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    logprobs, entropies, gradients = measured(*rounded, targets, pull, 1.0, block_size)
    expected = oracle(*rounded, targets, pull, 1.0)
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
    # The logits of one block are there: the text is that of the program.
    assert any(
        sorted(shape) == sorted((WIDE["batch"], block_size, WIDE["vocab"]))
        or np.prod(shape) == WIDE["batch"] * block_size * WIDE["vocab"]
        for shape in found
    )


def test_the_search_for_materialised_logits_finds_them() -> None:
    full = WIDE["batch"] * WIDE["positions"] * WIDE["vocab"]
    assert max(np.prod(shape) for shape in compiled_shapes(WIDE["positions"])) >= full


def compiled_shapes(block_size: int) -> set[tuple[int, ...]]:
    """Shapes of all arrays in the program of loss and gradient, as compiled and as traced."""
    batch, positions, embed, vocab = WIDE.values()

    def total(activations, head, targets):
        logprobs, entropies = blockwise_logprobs(activations, head, targets, temperature=1.0, block_size=block_size)
        return logprobs.sum() + entropies.sum()

    program = jax.value_and_grad(total, argnums=(0, 1))
    arguments = (
        jax.ShapeDtypeStruct((batch, positions, embed), jnp.float32),
        jax.ShapeDtypeStruct((embed, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, positions), jnp.int32),
    )
    compiled = jax.jit(program).lower(*arguments).compile().as_text()
    traced = str(jax.make_jaxpr(program)(*arguments))
    return shapes(compiled) | shapes(traced)


def test_the_model_is_asked_at_the_right_positions(tiny, trainer, model) -> None:
    """Log-probs against the model's own logits, one token at a time."""
    example = tiny.make_example()
    axes = example.input_ids.axes
    with trainer.use_device_mesh():
        logits = hax.named_jit(lambda m, e: m(e.input_ids, e.attention_mask))(model, example)
        found = hax.named_jit(lambda m, e: token_logprobs(m, e, temperature=0.8, block_size=5))(model, example)
    logits = np.asarray(logits.rearrange((*axes, "vocab")).array, np.float64) / 0.8
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    logprobs, entropies = (np.asarray(values.rearrange(axes).array) for values in found)
    mask = np.asarray(example.loss_mask.array)
    assert not logprobs[~mask].any()
    assert not entropies[~mask].any()
    for row, position in np.argwhere(mask):
        said = logs[row, position - 1]
        token = int(example.input_ids.array[row, position])
        np.testing.assert_allclose(logprobs[row, position], said[token], atol=1e-5)
        np.testing.assert_allclose(entropies[row, position], -(np.exp(said) * said).sum(), atol=1e-5)


def test_levanters_own_loss_means_the_same_tokens(tiny, trainer, model) -> None:
    example = tiny.make_example()
    axes = example.input_ids.axes

    def both(model, example):
        logprobs, _ = token_logprobs(model, example, temperature=1.0, block_size=5)
        return logprobs, compute_next_token_loss(model, example.to_lm_example(), reduction=None)

    with trainer.use_device_mesh():
        logprobs, loss = hax.named_jit(both)(model, example)
    ours = -np.asarray(logprobs.rearrange(axes).array)
    theirs = np.asarray(to_tokens(loss).rearrange(axes).array)
    mask = np.asarray(example.loss_mask.array)
    assert mask.sum() > 20
    np.testing.assert_allclose(theirs[mask], ours[mask], atol=1e-5)
    assert not theirs[~mask].any()
    assert (ours[mask] > 0).all()
