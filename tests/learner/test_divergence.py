# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Exact divergences in blocks, against full logits in float64, TRL and torch."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.learner.divergence import blockwise_divergence
from marin_rl.objectives.divergence import Divergence

BATCH, POSITIONS, EMBED, TEACHER_EMBED, VOCAB = 2, 8, 4, 6, 11
TEMPERATURE = 0.7
KINDS = [
    (Divergence.FORWARD, 0.5),
    (Divergence.REVERSE, 0.5),
    (Divergence.JENSEN_SHANNON, 0.5),
    (Divergence.JENSEN_SHANNON, 0.1),
]
pytestmark = pytest.mark.usefixtures("compiled_quickly")
SEVERAL = pytest.mark.parametrize(("divergence", "mixture"), KINDS)


def inputs(seed: int = 0, *, scale: float = 1.0, vocab: int = VOCAB, teacher_vocab: int = VOCAB):
    """Return activations and heads of policy and teacher, a mask, and the cotangents of the divergences."""
    rng = np.random.default_rng(seed)
    mask = rng.random((BATCH, POSITIONS)) < 0.6
    assert mask.any()
    return (
        scale * rng.normal(size=(BATCH, POSITIONS, EMBED)).astype(np.float32),
        rng.normal(size=(EMBED, vocab)).astype(np.float32),
        scale * rng.normal(size=(BATCH, POSITIONS, TEACHER_EMBED)).astype(np.float32),
        rng.normal(size=(TEACHER_EMBED, teacher_vocab)).astype(np.float32),
        mask,
        rng.normal(size=(BATCH, POSITIONS)).astype(np.float32),
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def kl(logs: np.ndarray, others: np.ndarray) -> np.ndarray:
    return (np.exp(logs) * (logs - others)).sum(-1)


def mixed(mixture: float, logs: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    return np.logaddexp(np.log(mixture) + teacher, np.log(1 - mixture) + logs)


def defined(divergence: Divergence, mixture: float, logs: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Compute a divergence from its definition."""
    if divergence is Divergence.FORWARD:
        return kl(teacher, logs)
    if divergence is Divergence.REVERSE:
        return kl(logs, teacher)
    middle = mixed(mixture, logs, teacher)
    return mixture * kl(teacher, middle) + (1 - mixture) * kl(logs, middle)


def differences(measure, logits: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Compute slopes as central differences of the definition."""
    ahead, behind = (
        np.stack([measure(log_softmax(logits + step), teacher) for step in size * np.eye(logits.shape[-1])], axis=-1)
        for size in (1e-5, -1e-5)
    )
    return (ahead - behind) / 2e-5


def derived(divergence: Divergence, mixture: float, logits: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Compute slopes by the derivatives in the table of `objectives/divergence.py`, which are also exact where tiny."""
    logs = log_softmax(logits)
    if divergence is Divergence.FORWARD:
        return np.exp(logs) - np.exp(teacher)
    other = teacher if divergence is Divergence.REVERSE else mixed(mixture, logs, teacher)
    factor = 1.0 if divergence is Divergence.REVERSE else 1 - mixture
    return factor * np.exp(logs) * (logs - other - kl(logs, other)[..., None])


def oracle(divergence, mixture, activations, head, teacher_activations, teacher_head, mask, pull):
    """Return divergences and the gradient of Σ pull·divergence from full logits in float64."""
    arrays = (activations, head, teacher_activations, teacher_head, pull)
    activations, head, teacher_activations, teacher_head, pull = (np.asarray(array, np.float64) for array in arrays)
    teacher = log_softmax(teacher_activations @ teacher_head / TEMPERATURE)
    logits = activations @ head / TEMPERATURE
    measure = functools.partial(defined, divergence, mixture)
    slopes = derived(divergence, mixture, logits, teacher)
    if np.abs(logits).max() < 20:
        np.testing.assert_allclose(slopes, differences(measure, logits, teacher), atol=1e-7)
    slopes *= (pull * mask)[..., None] / TEMPERATURE
    values = measure(log_softmax(logits), teacher) * mask
    return values, np.einsum("bpv,ev->bpe", slopes, head), np.einsum("bpe,bpv->ev", activations, slopes)


@functools.partial(jax.jit, static_argnames=("divergence", "mixture", "block_size", "shards", "position_shards"))
def computed(
    activations, head, teacher_activations, teacher_head, mask, pull, *, divergence, mixture, block_size=5, **parts
):
    def find(activations, head):
        return blockwise_divergence(
            activations,
            head,
            teacher_activations,
            teacher_head,
            mask,
            divergence=divergence,
            mixture=mixture,
            temperature=TEMPERATURE,
            block_size=block_size,
            **parts,
        )

    found, pull_back = jax.vjp(find, activations, head)
    return found, *pull_back(pull)


def assert_close(found, expected, tolerance: float = 1e-5) -> None:
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance)


@SEVERAL
@pytest.mark.parametrize("block_size", [1, 3, BATCH * POSITIONS + 1])
def test_any_block_size_agrees_with_full_logits(divergence, mixture, block_size: int) -> None:
    arrays = inputs()
    found = computed(*arrays, divergence=divergence, mixture=mixture, block_size=block_size)
    assert_close(found, oracle(divergence, mixture, *arrays))
    assert (np.asarray(found[0])[arrays[4]] > 0.01).all()


def test_divergences_differ_pairwise() -> None:
    arrays = inputs()
    values = [oracle(divergence, mixture, *arrays)[0] for divergence, mixture in KINDS]
    assert min(np.abs(left - right).max() for i, left in enumerate(values) for right in values[:i]) > 0.1


@pytest.mark.torch
@pytest.mark.medium
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_trl_and_torch_give_the_same_values_and_gradients(beta: float) -> None:
    """TRL's `beta` is the teacher's share of the mixture; 0 is the forward KL, and 1 the reverse KL."""
    torch = pytest.importorskip("torch", reason="needs the extra test-torch")
    gkd = pytest.importorskip("trl.experimental.gkd", reason="needs the extra test-torch")
    kind = {0.0: Divergence.FORWARD, 1.0: Divergence.REVERSE}.get(beta, Divergence.JENSEN_SHANNON)
    arrays = inputs(seed=3)
    found = computed(*arrays, divergence=kind, mixture=beta if 0 < beta < 1 else 0.5)
    activations, head, teacher_activations, teacher_head, mask, pull = (
        torch.tensor(array, dtype=torch.float64) for array in arrays
    )
    activations.requires_grad_()
    head.requires_grad_()
    # One token at a time, because TRL reduces.
    values = torch.zeros(mask.shape, dtype=torch.float64)
    for place in np.argwhere(arrays[4]).tolist():
        row, position = place
        values[row, position] = gkd.GKDTrainer.generalized_jsd_loss(
            (activations[row, position] @ head)[None, None],
            (teacher_activations[row, position] @ teacher_head)[None, None],
            beta=beta,
            temperature=TEMPERATURE,
            reduction="sum",
        )
    (values * pull).sum().backward()
    assert_close(found, [values.detach().numpy(), activations.grad.numpy(), head.grad.numpy()])


@SEVERAL
def test_a_teacher_equal_to_the_policy_has_no_divergence(divergence, mixture) -> None:
    activations, head, _, _, mask, pull = inputs(scale=3.0)
    arguments = activations, head, activations, head, mask, pull
    value, of_activations, of_head = computed(*arguments, divergence=divergence, mixture=mixture)
    assert not np.any(value)
    assert np.abs(of_activations).max() < 1e-6
    assert np.abs(of_head).max() < 1e-5


@pytest.mark.medium
@SEVERAL
def test_padding_of_either_vocabulary_changes_nothing(divergence, mixture) -> None:
    arrays = inputs()
    expected = computed(*arrays, divergence=divergence, mixture=mixture)
    for index in (1, 3):
        padded = list(arrays)
        padded[index] = np.pad(arrays[index], ((0, 0), (0, 5)), constant_values=3.0)
        found = computed(*padded, divergence=divergence, mixture=mixture)
        assert_close((*found[:2], found[2][:, :VOCAB]), expected, 1e-6)
        assert not np.any(found[2][:, VOCAB:])


@pytest.mark.medium
@SEVERAL
def test_shards_and_values_off_the_mask_change_nothing(divergence, mixture) -> None:
    arrays = inputs()
    expected = computed(*arrays, divergence=divergence, mixture=mixture)
    activations, head, teacher, teacher_head, mask, pull = arrays
    spoiled = [np.where(mask[..., None], array, np.nan) for array in (activations, teacher)]
    arguments = spoiled[0], head, spoiled[1], teacher_head, mask, np.where(mask, pull, 7)
    for shards, position_shards in ((1, 4), (2, 2)):
        found = computed(
            *arguments, divergence=divergence, mixture=mixture, shards=shards, position_shards=position_shards
        )
        assert_close(found, expected, 1e-6)
    nothing = computed(*arguments[:4], np.zeros_like(mask), pull, divergence=divergence, mixture=mixture, block_size=5)
    assert not any(np.any(array) for array in nothing)


@SEVERAL
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_extreme_logits_are_finite_and_right(divergence, mixture, dtype) -> None:
    """Policy and teacher have logits of ±80 before the temperature, in agreement and against each other."""
    rng = np.random.default_rng(4)
    signs = rng.choice([-1.0, 1.0], (1, POSITIONS, EMBED))
    policy = np.concatenate([signs, -signs])
    head = np.zeros((EMBED, VOCAB))
    head[rng.integers(0, EMBED, VOCAB), np.arange(VOCAB)] = rng.choice([-80.0, 80.0], VOCAB)
    teacher = np.concatenate([signs, signs])
    mask, pull = np.ones((BATCH, POSITIONS), bool), rng.normal(size=(BATCH, POSITIONS)).astype(np.float32)
    arrays = [jnp.asarray(array, dtype) for array in (policy, head, teacher, head)]
    assert (np.abs(policy @ head).max(-1) == 80).all()
    found = computed(*arrays, mask, pull, divergence=divergence, mixture=mixture)
    exact = [np.asarray(array, np.float64) for array in (policy, head, teacher, head)]
    # Log-probabilities of up to 2 · 80 / 0.7 nats in float32, times the heads or summed over the tokens. In bfloat16
    # the slopes and the gradients are rounded once each.
    rounding = np.finfo(np.float32).eps * 2 * 80 / TEMPERATURE * np.array([1, 80, BATCH * POSITIONS])
    relative = 2**-7 if dtype == jnp.bfloat16 else 1e-5
    for array, wanted, absolute in zip(found, oracle(divergence, mixture, *exact, mask, pull), rounding, strict=True):
        error = np.abs(np.asarray(array, np.float64) - wanted).max()
        assert error <= relative * np.abs(wanted).max() + absolute


@SEVERAL
def test_batch_position_vocab_is_never_materialised(divergence, mixture) -> None:
    batch, positions, embed, vocab, block_size = 2, 16, 8, 1021, 4

    def total(activations, head, teacher, teacher_head, mask):
        options = {"divergence": divergence, "mixture": mixture, "block_size": block_size}
        return blockwise_divergence(activations, head, teacher, teacher_head, mask, **options).sum()

    trunk, heads = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((batch, positions, embed), (embed, vocab)))
    arguments = trunk, heads, trunk, heads, jax.ShapeDtypeStruct((batch, positions), jnp.bool_)
    program = str(jax.make_jaxpr(jax.value_and_grad(total, argnums=(0, 1)))(*arguments))
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program)
    sizes = {int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes}
    assert block_size * vocab in sizes
    assert max(sizes) < batch * positions * vocab
