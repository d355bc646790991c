# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import numpy as np
import pytest

from marin_rl.sampling.sampler import SampleRequest
from tests.tiny_run import copy_of
from tests.training.reopened_run import reopen

REQUEST = SampleRequest((259, 50, 257, 260), seed=5, max_new_tokens=3)


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    return reopen(copy_of(finished_run, tmp_path_factory.mktemp("sampler")))


def test_generations_record_the_version_of_the_weights(run):
    assert [g.first_version for g in run.publisher.sampler.sample([REQUEST])] == [run.state.progress.step]
    run.publisher.sampler.update_weights(run.trainer_state.model, 99)
    assert [g.last_version for g in run.publisher.sampler.sample([REQUEST])] == [99]
    run.publisher.publish(run.trainer_state.model, run.state.progress.step)
    assert [g.last_version for g in run.publisher.sampler.sample([REQUEST])] == [run.state.progress.step]


def test_update_changes_samples_and_old_weights_restore_them(run):
    before = run.publisher.sampler.sample([REQUEST])
    run.publisher.sampler.update_weights(jax.tree.map(np.zeros_like, run.trainer_state.model), 100)
    (uniform,) = run.publisher.sampler.sample([REQUEST])
    np.testing.assert_allclose(uniform.logprobs, -np.log(264), rtol=1e-5)
    run.publisher.publish(run.trainer_state.model, run.state.progress.step)
    assert run.publisher.sampler.sample([REQUEST]) == before
