# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The optimizer of the Tinker API against torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl.serving.tinker.adam import adam_step, new_state
from marin_rl.serving.tinker.records import AdamParams

torch = pytest.importorskip("torch", reason="needs the extra test-torch")
pytestmark = pytest.mark.torch


@pytest.mark.medium
def test_adam_is_that_of_torch() -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("a", (7, 3)), ("b", (5,)))}
    state = new_state(jax.tree.map(jnp.asarray, weights))
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
            total = jax.tree.map(lambda old, new, part=part: old + part * new, state.gradient, gradient)
            state = type(state)(state.trained, state.mean, state.square, state.steps, total)
        state, metrics = adam_step(state, AdamParams(*map(np.float32, (rate, *betas, eps, decay, clip))))
        norm = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in gradient.values()))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        for name, parameter in parameters.items():
            np.testing.assert_allclose(state.trained[name], parameter.detach().numpy(), rtol=2e-5, atol=1e-6)
        assert not any(leaf.any() for leaf in jax.tree.leaves(state.gradient))
