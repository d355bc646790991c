# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import jax
import numpy as np
import pytest

from marin_rl.sampling.sampler import SampleRequest
from tests.runtime.reopened_run import reopen
from tests.tiny_run import copy_of

REQUEST = SampleRequest((259, 50, 257, 260), seed=5, max_new_tokens=3)


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    return reopen(copy_of(finished_run, tmp_path_factory.mktemp("sampler")))


def test_generations_carry_the_version_of_the_weights_that_were_handed_over(run):
    assert [g.first_version for g in run.sampler.sample([REQUEST])] == [run.progress.step]
    run.sampler.update(run.state.model, 99)
    assert [g.last_version for g in run.sampler.sample([REQUEST])] == [99]
    run.publish()
    assert [g.last_version for g in run.sampler.sample([REQUEST])] == [run.progress.step]


def test_new_weights_are_sampled_from_and_old_ones_give_the_old_answer_again(run):
    before = run.sampler.sample([REQUEST])
    run.sampler.update(jax.tree.map(np.zeros_like, run.state.model), 100)
    (uniform,) = run.sampler.sample([REQUEST])
    np.testing.assert_allclose(uniform.logprobs, -np.log(264), rtol=1e-5)
    run.publish()
    assert run.sampler.sample([REQUEST]) == before
