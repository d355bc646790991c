# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Every architecture samples from the distribution of its full forward pass."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator

import jax
import levanter.tracker
import pytest
from levanter.models.lm_model import LmHeadModel
from levanter.tracker import NoopTracker

from marin_rl.models.model_settings import MODEL_TYPES
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.types import Generation
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests import fork_server
from tests.cpu_host import cpu_host
from tests.sampling.families import FAMILIES, random_model
from tests.sampling.test_group_sampler import (
    LENGTHS,
    OBSERVATIONS,
    largest_error,
    make_requests,
    make_sampler,
    run_conversation,
)

pytestmark = [
    pytest.mark.both_lines,
    pytest.mark.medium,
    # Levanter's mixture of experts calls a function that haliax has renamed.
    pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly() -> Iterator[None]:
    """Compile without most optimizations, as compilation takes longer than execution here."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module", autouse=True)
def clear_compiled_programs() -> Iterator[None]:
    yield
    jax.clear_caches()


def error_on_mesh(model: LmHeadModel, requests: list[SampleRequest], generations: list[Generation]) -> float:
    """Return the largest error; the forward pass of a mixture of experts needs a mesh and a tracker."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(TrainerConfig(require_accelerator=False).use_device_mesh())
        stack.enter_context(levanter.tracker.current_tracker(NoopTracker()))
        return largest_error(model, requests, generations)


def test_every_architecture_is_sampled():
    assert tuple(FAMILIES) == MODEL_TYPES


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_the_full_forward_pass(name: str):
    """Also in refilled slots, in a further turn, and under new weights."""
    model, other = (random_model(FAMILIES[name], seed) for seed in range(2))
    sampler = make_sampler(model)
    requests = make_requests(LENGTHS)
    assert error_on_mesh(model, requests, sampler.sample(requests)) < 1e-5
    sampler.update_weights(other, 1)
    turns, generations = run_conversation(sampler, "episode", OBSERVATIONS[:2])
    assert error_on_mesh(other, turns, generations) < 1e-5


def test_experts_of_a_token_do_not_depend_on_the_rest_of_the_batch():
    sampler = make_sampler(random_model(FAMILIES["mixtral"]))
    requests = make_requests([3, 9, 17, 30])
    assert [sampler.sample([request])[0] for request in requests] == sampler.sample(requests)


def test_parity_with_heads_on_two_devices():
    environment = {**os.environ, **cpu_host(2), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = fork_server.run([sys.executable, "-m", "tests.sampling.sharded_families"], environment)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured.keys() == {"gpt2", "mixtral", "olmo2", "qwen3"}
    for name, (sharded_arrays, error) in measured.items():
        assert sharded_arrays >= 4, name
        assert error < 1e-5, name
