# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The streams of the loss together, and the exact KL against its estimate from sampled tokens."""

import dataclasses
import functools
import itertools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import GroupRow
from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.objectives.distillation import distillation_advantages
from marin_rl.objectives.divergence import Divergence
from marin_rl.objectives.kl import ExactKlConfig, NoKlConfig
from marin_rl.objectives.policy_loss import ReinforceLossConfig
from tests import tiny_learner
from tests.learner.invariance_cases import Arrangement
from tests.learner.stream_cases import LOSS, make_stream_learner, pack, update

pytestmark = pytest.mark.usefixtures("compiled_quickly")


# The arrangement of the batch.


@pytest.fixture(scope="module")
def stream_learner(trainer) -> Learner:
    return make_stream_learner(trainer)


def assert_same(found, expected) -> None:
    for left, right in zip(found, expected, strict=True):
        for name, value in right.items():
            np.testing.assert_allclose(left[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.medium
def test_microbatches_packing_and_shared_prompts_change_no_stream(stream_learner: Learner) -> None:
    whole = update(stream_learner, pack(Arrangement(16)))
    assert_same(update(stream_learner, pack(Arrangement(4, packed=True, microbatches=2))), whole)
    one_sequence = update(stream_learner, pack(Arrangement(16, one_sequence=True)))
    shared = pack(Arrangement(4, packed=True, group=GroupRow(4, 3, 12), one_sequence=True))
    assert shared.layout.group is not None
    assert_same(update(stream_learner, shared), one_sequence)
    # Every stream is there.
    metrics, gradient = whole
    assert metrics["loss/ce_avg"] > 1
    assert metrics["loss/ref_kl_avg"] > 0.01
    total = metrics["loss/policy_avg"] + 0.5 * metrics["loss/ce_avg"] + 0.7 * metrics["loss/ref_kl_avg"]
    assert metrics["loss/total"] == pytest.approx(total, rel=1e-5)
    assert np.abs(one_sequence[1][next(iter(gradient))] - gradient[next(iter(gradient))]).max() > 1e-3


# The exact KL, and its estimate from sampled tokens.

VOCAB, LENGTH, TEMPERATURE = 4, 3, 0.8
SEQUENCES = np.array([(0, *rest) for rest in itertools.product(range(VOCAB), repeat=LENGTH)], np.int32)
AXES = (Axis("batch", len(SEQUENCES)), Axis("position", LENGTH + 1))


@functools.cache
def make_model(seed: int) -> LmHeadModel:
    trainer, rng = tiny_learner.make_trainer(), np.random.default_rng(seed)
    shape = PolicySpec(tiny_learner.LLAMA, VOCAB, trainer).policy
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.4, size=leaf.shape), leaf.dtype), shape)


def all_sequences(**arrays: np.ndarray) -> RlExample:
    """Return a row for each sequence of the vocabulary, with loss on all tokens but the first."""
    shape = SEQUENCES.shape
    zeros = np.zeros(shape, np.float32)
    mask = np.arange(LENGTH + 1) > 0
    per_token = {
        "input_ids": SEQUENCES,
        "loss_mask": np.broadcast_to(mask, shape),
        "segment_ids": np.ones(shape, np.int32),
        "position_ids": np.broadcast_to(np.arange(LENGTH + 1, dtype=np.int32), shape),
        "rollout_ids": np.broadcast_to(np.arange(len(SEQUENCES), dtype=np.int32)[:, None], shape),
        "importance_weights": np.broadcast_to(mask.astype(np.float32), shape),
        **dict.fromkeys(("loss_weights", "advantages", "policy_logprobs", "reference_logprobs"), zeros),
        **dict.fromkeys(("values", "returns"), zeros),
    }
    given = {name: (array * mask).astype(np.float32) for name, array in arrays.items()}
    return RlExample(**{name: hax.named(jnp.asarray(array), AXES) for name, array in (per_token | given).items()})


@eqx.filter_jit
def logprobs_of(model: LmHeadModel) -> jax.Array:
    batch, head = all_sequences(), model.get_lm_head()
    options = {"temperature": TEMPERATURE, "block_size": 64}
    return token_logprobs(policy_activations(model, batch), head, batch, **options)[0].rearrange(AXES).array


def gradient_of(loss: RlLoss, batch: RlExample) -> np.ndarray:
    def compute(model: LmHeadModel) -> jax.Array:
        return loss(model, batch, Frozen(teacher=make_model(1)))[0]

    leaves = jax.tree.leaves(eqx.filter_jit(eqx.filter_grad(compute))(make_model(0)))
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])


@functools.cache
def enumerated() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log-probs of all sequences under policy and teacher, and the probability of each sequence."""
    policy, teacher = (np.asarray(logprobs_of(make_model(seed)), np.float64) for seed in (0, 1))
    probabilities = np.exp(policy.sum(axis=1, keepdims=True))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)
    return policy, teacher, probabilities


def sampled_gradient(advantages: np.ndarray) -> np.ndarray:
    """Return the expected gradient of REINFORCE: the sum over all sequences, weighted with their probability."""
    policy, _, probabilities = enumerated()
    batch = all_sequences(
        loss_weights=np.broadcast_to(probabilities, policy.shape), advantages=advantages, policy_logprobs=policy
    )
    return gradient_of(RlLoss(ReinforceLossConfig().per_token, NoKlConfig(), TEMPERATURE, 64), batch)


@functools.cache
def exact_gradient(divergence: Divergence) -> np.ndarray:
    """Return the gradient of the expected sum over tokens of an exact divergence, of which states are constants."""
    policy, _, probabilities = enumerated()
    batch = all_sequences(ref_kl_weights=np.broadcast_to(probabilities, policy.shape))
    return gradient_of(RlLoss(None, ExactKlConfig(1.0, divergence), TEMPERATURE, 64), batch)


def advantages_of(policy: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    return distillation_advantages(policy.ravel(), teacher.ravel(), 1.0).reshape(policy.shape)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.medium
def test_the_sampled_estimator_has_the_gradient_of_the_exact_kl() -> None:
    """The average over all 64 sequences of the vocabulary, and not over some samples of it."""
    policy, teacher, _ = enumerated()
    advantages = advantages_of(policy, teacher)
    expected = exact_gradient(Divergence.REVERSE)
    assert np.linalg.norm(expected) > 0.1
    assert relative(sampled_gradient(advantages), expected) < 1e-5
    # A constant per position is a baseline, which does not change the expectation.
    assert relative(sampled_gradient(advantages + np.arange(LENGTH + 1)), expected) < 1e-4


@pytest.mark.medium
@pytest.mark.parametrize("wrong", ["one token late", "one token early", "wrong direction", "forward KL"])
def test_wrong_estimators_have_another_gradient(wrong: str) -> None:
    policy, teacher, _ = enumerated()
    advantages, divergence = advantages_of(policy, teacher), Divergence.REVERSE
    match wrong:
        case "one token late":
            advantages = np.roll(advantages, 1, axis=1)
        case "one token early":
            advantages = np.roll(advantages, -1, axis=1)
        case "wrong direction":
            advantages = advantages_of(teacher, policy)
        case "forward KL":
            divergence = Divergence.FORWARD
    assert relative(sampled_gradient(advantages), exact_gradient(divergence)) > 0.1


@pytest.mark.medium
@pytest.mark.parametrize("divergence", Divergence)
def test_a_policy_is_at_no_distance_from_itself(divergence: Divergence) -> None:
    """To the rounding of two compiled trunks; of equal activations it is exactly 0, see test_divergence.py."""
    _, _, probabilities = enumerated()
    batch = all_sequences(ref_kl_weights=np.broadcast_to(probabilities, SEQUENCES.shape))
    loss = dataclasses.replace(LOSS, policy_loss=None, kl=ExactKlConfig(1.0, divergence))

    def compute(model: LmHeadModel, teacher: LmHeadModel) -> jax.Array:
        return loss(model, batch, Frozen(teacher=teacher))[0]

    value, gradient = eqx.filter_jit(eqx.filter_value_and_grad(compute))(make_model(0), make_model(0))
    assert abs(float(value)) < 1e-6
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-6
