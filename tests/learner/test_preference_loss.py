# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import math
import os
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask

from marin_rl.batching.rl_example import pack_batch
from marin_rl.learner.scoring import Scorer
from marin_rl.objectives.aggregation import SequenceMeanConfig
from tests import fork_server
from tests.cpu_host import cpu_host
from tests.learner.preference_cases import ALL, CONFIGS, LAYOUTS, LENGTHS, OF_MESH, make_pairs, update

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def updates():
    return {name: update(config, LAYOUTS["one microbatch"]) for name, config in CONFIGS.items()}


def assert_same(found, expected, case):
    (metrics, gradient), (expected_metrics, expected_gradient) = found, expected
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), (case, name)
    for name, array in expected_gradient.items():
        np.testing.assert_allclose(gradient[name], array, rtol=0, atol=1e-6 * max(1, np.abs(array).max()), err_msg=case)


@pytest.fixture(scope="module")
def answers(tiny, trainer):
    """Sums of the log-probs of each answer `[pairs, 2]`, from whole logits, and the function from their cotangents to
    that of the model.
    """
    pairs = make_pairs(CONFIGS["plain"])
    sequences = np.split(pairs.input_ids, pairs.sequence_offsets[1:-1])
    longest = max(map(len, sequences))
    ids = np.stack([np.pad(sequence, (0, longest - len(sequence))) for sequence in sequences])
    prompts, lengths = np.repeat([row[0] for row in LENGTHS], 2), np.array([row[1:] for row in LENGTHS]).ravel()
    at = np.arange(longest - 1)[None] + 1
    mask = (at >= prompts[:, None]) & (at < (prompts + lengths)[:, None])

    def sums(model):
        axes = hax.Axis("batch", len(ids)), hax.Axis("position", longest)
        logits = model(hax.named(ids, axes), attn_mask=AttentionMask.causal()).rearrange((*axes, model.Vocab)).array
        logs = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(mask, logs, 0), axis=1).reshape(-1, 2)

    with trainer.use_device_mesh():
        found, pull = jax.vjp(jax.jit(sums), tiny.make_model(trainer))
    return np.array(found, np.float64), pull


@pytest.mark.medium
@pytest.mark.parametrize("name", CONFIGS)
def test_update_matches_one_answer_after_another(tiny, trainer, updates, answers, name):
    config, (logprobs, pull) = CONFIGS[name], answers
    pairs = make_pairs(config)
    reference = np.add.reduceat(pairs.reference_logprobs.astype(np.float64), pairs.sequence_offsets[:-1]).reshape(-1, 2)
    lengths = np.array([row[1:] for row in LENGTHS]) if config.length_normalized else 1
    ratios = logprobs - reference
    margins = (ratios / lengths) @ (1, -1)
    smoothing, probability = config.label_smoothing, 1 / (1 + np.exp(-config.beta * margins))
    losses = -(1 - smoothing) * np.log(probability) - smoothing * np.log(1 - probability)
    chosen, rejected = config.beta * ratios.T
    assert 0 < (chosen > rejected).mean() < 1
    expected = {
        "loss/total": losses.mean(),
        "loss/dpo": losses.mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "logps/chosen": logprobs[:, 0].mean(),
        "logps/rejected": logprobs[:, 1].mean(),
    }
    metrics, found = updates[name]
    for metric, number in expected.items():
        assert metrics[metric] == pytest.approx(number, rel=1e-5, abs=1e-5), metric
    slopes = config.beta * (probability - (1 - smoothing)) / len(LENGTHS)
    with trainer.use_device_mesh():
        (gradient,) = pull(jnp.array(slopes[:, None] * np.array([1, -1]) / lengths, jnp.float32))
    for path, array in tiny.arrays_by_path(gradient).items():
        assert np.abs(array).max() > 1e-3
        np.testing.assert_allclose(found[path], array, rtol=0, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one microbatch"])
def test_layouts_do_not_change_an_update(updates, layout):
    assert_same(update(CONFIGS[ALL], LAYOUTS[layout]), updates[ALL], layout)


@pytest.mark.medium
def test_eight_devices_do_not_change_an_update(updates, tmp_path):
    command = [sys.executable, "-m", "tests.learner.preference_cases", str(tmp_path / "found.npz")]
    done = fork_server.run(command, {**os.environ, **cpu_host(8)})
    assert done.returncode == 0, done.stderr[-4000:]
    found = np.load(tmp_path / "found.npz")
    for mesh in OF_MESH:
        of_mesh = [{name: found[f"{mesh}/{name}"] for name in values} for values in updates[ALL]]
        assert_same(of_mesh, updates[ALL], mesh)


@pytest.mark.medium
def test_split_pairs_change_an_update(updates):
    """Shows that the tests above can fail."""
    scattered = dataclasses.replace(LAYOUTS["packed microbatches"], whole_rollouts=False)
    metrics, _ = update(CONFIGS["plain"], scattered)
    assert abs(metrics["loss/total"] - updates["plain"][0]["loss/total"]) > 1e-3


@pytest.mark.medium
@pytest.mark.parametrize("name", ["plain", ALL])
def test_first_loss_is_log_2_and_the_update_raises_the_chosen_answer(tiny, trainer, name):
    config, layout = CONFIGS[name], LAYOUTS["one microbatch"]
    scorer = Scorer(trainer, layout, pad_token_id=0, temperature=1.0, block_size=5, capacity=8)
    pairs = make_pairs(config)
    reference = scorer.score(tiny.make_model(trainer), pairs).logprobs
    pairs = dataclasses.replace(pairs, reference_logprobs=reference)
    metrics, gradient = update(config, layout, pairs=pairs)
    assert metrics["loss/dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(0, abs=1e-5)
    model = tiny.make_model(trainer)
    step = jax.tree.unflatten(jax.tree.structure(model), [0.01 * g for g in gradient.values()])
    moved = scorer.score(jax.tree.map(lambda weight, change: weight - change, model, step), pairs).logprobs - reference
    changes = np.add.reduceat(moved * pairs.advantages, pairs.token_offsets[:-1])
    assert changes.mean() > 0


def test_weights_of_pairs_are_one_over_their_number():
    packed = pack_batch(make_pairs(CONFIGS["plain"]), SequenceMeanConfig(), LAYOUTS["packed"], pad_token_id=0)
    total = sum(float(np.asarray(batch.loss_weights.array).sum()) for batch in packed.microbatches)
    assert total == pytest.approx(1, rel=1e-6)
