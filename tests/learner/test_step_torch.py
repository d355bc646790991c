# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The steps of a learner with settings of every step against AdamW of torch."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.learner.train_step import Learner, StepwiseAdamW
from tests.tiny_learner import make_trainer

torch = pytest.importorskip("torch", reason="needs the extra test-torch")
pytestmark = pytest.mark.torch


class Weights(eqx.Module):
    """Two parameters."""

    a: jax.Array
    b: jax.Array


@pytest.mark.medium
def test_steps_are_those_of_torch() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("a", (7, 3)), ("b", (5,)))}
    learner = Learner(make_trainer(), StepwiseAdamW(), None, num_updates=0)
    first = Weights(**jax.tree.map(jnp.asarray, weights))
    state = learner.start(first)
    parameters = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in weights.items()}
    optimizer = torch.optim.AdamW(parameters.values())
    for step in range(20):
        # From tiny to large gradients, so that epsilon and clipping matter.
        gradient = {
            name: rng.normal(scale=10.0 ** rng.uniform(-6, 2), size=array.shape).astype(np.float32)
            for name, array in weights.items()
        }
        rate, clip, eps = 10.0 ** rng.uniform(-4, -1), (0.0, 5.0)[step % 2], (1e-12, 1e-4)[step % 3 == 0]
        betas, decay = (rng.uniform(0.5, 0.95), rng.uniform(0.9, 0.999)), rng.uniform(0, 0.5)
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name])
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=betas, eps=eps, weight_decay=decay)
        optimizer.step()
        # In two parts, as from two calls of forward_backward.
        for part in (0.25, 0.75):
            total = jax.tree.map(lambda old, new, part=part: old + part * new, state.gradient, Weights(**gradient))
            state = dataclasses.replace(state, gradient=total)
        state, metrics = learner.step(state, rate, betas, eps, decay, clip)
        norm = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in gradient.values()))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        for name, parameter in parameters.items():
            np.testing.assert_allclose(
                getattr(state.state.model, name), parameter.detach().numpy(), rtol=2e-5, atol=1e-6
            )
        assert not any(leaf.any() for leaf in jax.tree.leaves(state.gradient))
