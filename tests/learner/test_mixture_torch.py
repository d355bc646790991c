# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The gradient of a mixture with given experts is that of transformers' model with these experts, in float64."""

import dataclasses
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.models.hf_tensors import to_tensors
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.learner.test_policy_model import oracle_batch
from tests.models.hf_checkpoint import write_checkpoint
from tests.models.hf_oracle.make_oracle import loss_weights, token_ids

torch = pytest.importorskip("torch", reason="needs the extra test-torch")
pytestmark = [pytest.mark.torch, pytest.mark.medium]

LAYERS, EXPERTS, TOP = 2, 4, 2


def torch_gradient(checkpoint: str, experts: np.ndarray, monkeypatch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return log-probs and the gradient of their weighted sum, with experts `[batch, position, layer, top]`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").double()
    given = iter([torch.tensor(experts[:, :, layer].reshape(-1, TOP).astype(np.int64)) for layer in range(LAYERS)])

    def fixed(probabilities, count: int, dim: int = -1):
        chosen = next(given)
        assert chosen.shape == (len(probabilities), count)
        return probabilities.gather(dim, chosen), chosen

    with monkeypatch.context() as patch:
        patch.setattr(torch, "topk", fixed)
        logits = model(torch.tensor(token_ids().astype(np.int64))).logits
    assert next(given, None) is None
    logs = torch.log_softmax(logits[:, :-1], dim=-1)
    logprobs = logs.gather(-1, torch.tensor(token_ids()[:, 1:, None].astype(np.int64)))[..., 0]
    (logprobs * torch.tensor(loss_weights())).sum().backward()
    return logprobs.detach().numpy(), {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def test_gradients_with_given_experts_are_those_of_transformers(tmp_path: Path, tiny, trainer, monkeypatch) -> None:
    checkpoint = write_checkpoint(tmp_path, "mixtral")
    model = load_hf_policy(checkpoint, ChatTokenizer(byte_tokenizer()), trainer, None)
    batch = oracle_batch(tiny)
    scores = np.random.default_rng(0).uniform(size=(*token_ids().shape, LAYERS, EXPERTS))
    experts = np.argsort(scores, axis=-1)[..., :TOP].astype(np.uint8)
    axes = *batch.input_ids.axes, Axis("layer", LAYERS), Axis("top_experts", TOP)
    batch = dataclasses.replace(batch, experts=hax.named(experts, axes))
    factors = np.pad(loss_weights(), ((0, 0), (1, 0)))

    def loss(model, batch: RlExample):
        trunk = policy_activations(model, batch)
        scored, _ = token_logprobs(trunk, model.get_lm_head(), batch, temperature=1.0, block_size=48)
        return jnp.sum(scored.array * factors), scored.array

    with trainer.use_device_mesh():
        differentiate = hax.named_jit(eqx.filter_grad(loss, has_aux=True), axis_resources=trainer.compute_axis_mapping)
        gradient, logprobs = differentiate(model, batch)
        found = jax.device_get(to_tensors(gradient))
    expected_logprobs, expected = torch_gradient(checkpoint, experts, monkeypatch)
    np.testing.assert_allclose(np.asarray(logprobs)[:, 1:], expected_logprobs, rtol=0, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.linalg.norm(found[name] - array) <= 1e-5 * np.linalg.norm(array), name
