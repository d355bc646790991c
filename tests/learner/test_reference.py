# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import haliax as hax
import numpy as np
import pytest

from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.batching.rl_example import BatchShape, make_batch
from marin_rl.learner.logprobs import token_logprobs
from marin_rl.learner.reference import ReferencePolicy
from marin_rl.objectives.aggregation import TokenMeanConfig

TEMPERATURE = 0.8


def make_rollouts(tiny) -> list[ProcessedRollout]:
    """Rollouts of one, two, no, and one row; rows of a batch are left over."""
    example = tiny.make_example()
    arrays = {name: np.asarray(value.array) for name, value in vars(example).items()}
    rollouts = []
    for index, rows in enumerate([slice(0, 1), slice(1, 3), slice(3, 3), slice(3, 4)]):
        rollouts.append(
            ProcessedRollout(
                source="test",
                id=str(index),
                input_ids=arrays["input_ids"][rows],
                loss_mask=arrays["loss_mask"][rows],
                segment_ids=arrays["segment_ids"][rows],
                policy_logprobs=arrays["policy_logprobs"][rows],
                reference_logprobs=np.zeros_like(arrays["policy_logprobs"][rows]),
                returns=np.ones(rows.stop - rows.start, np.float32),
            )
        )
    return rollouts


@pytest.fixture(scope="module")
def reference(tiny, trainer, model) -> ReferencePolicy:
    shape = BatchShape(tiny.ROWS, tiny.POSITIONS)
    return ReferencePolicy(model, trainer, shape=shape, temperature=TEMPERATURE, block_size=5)


def test_scores_are_the_learners_logprobs_of_the_same_weights(tiny, trainer, model, reference) -> None:
    rollouts = make_rollouts(tiny)
    batch = make_batch(rollouts, [0.0] * 4, TokenMeanConfig(), BatchShape(tiny.ROWS, tiny.POSITIONS))
    with trainer.use_device_mesh():
        expected, _ = hax.named_jit(lambda m, b: token_logprobs(m, b, temperature=TEMPERATURE, block_size=12))(
            model, batch
        )
    expected = np.asarray(expected.rearrange(batch.input_ids.axes).array)
    scored = reference.score(rollouts)
    found = np.concatenate([rollout.reference_logprobs for rollout in scored])
    mask = np.concatenate([rollout.loss_mask for rollout in scored])
    assert mask.sum() > 10
    np.testing.assert_allclose(found, expected[:4], atol=1e-6)
    assert (found[mask] < 0).all()
    assert not found[~mask].any()


def test_nothing_but_the_scores_changes(tiny, reference) -> None:
    rollouts = make_rollouts(tiny)
    for before, after in zip(rollouts, reference.score(rollouts), strict=True):
        for field in dataclasses.fields(before):
            if field.name != "reference_logprobs":
                assert np.array_equal(getattr(after, field.name), getattr(before, field.name)), field.name


def test_a_rollouts_score_does_not_depend_on_its_neighbours(tiny, reference) -> None:
    rollouts = make_rollouts(tiny)
    together = reference.score(rollouts)
    (alone,) = reference.score(rollouts[1:2])
    np.testing.assert_allclose(alone.reference_logprobs, together[1].reference_logprobs, atol=1e-6)


def test_no_rollouts_no_scores(reference) -> None:
    assert reference.score([]) == []


def test_more_rows_than_a_batch_has_is_an_error(tiny, trainer, model) -> None:
    small = ReferencePolicy(model, trainer, shape=BatchShape(2, tiny.POSITIONS), temperature=1.0, block_size=5)
    with pytest.raises(ValueError, match="need 4 rows, the batch has 2"):
        small.score(make_rollouts(tiny))
