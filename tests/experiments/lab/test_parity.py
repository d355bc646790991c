# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from levanter.models.qwen import Qwen3Config
from safetensors.numpy import load_file

from experiments.lab.parity import float64_gradient, llama_logprobs, measure
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import seq_len
from tests.models.hf_checkpoint import record, write_config
from tests.models.hf_oracle.make_oracle import LINEAR

SIZES = {
    **seq_len(64),
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
ROPE = DefaultRotaryEmbeddingsConfig(theta=500.0)
MODELS = {
    "llama": LlamaConfig(**SIZES, rope=ROPE),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, rope=ROPE, tie_word_embeddings=True),
}
TOKENS = (259, 50, 43, 51, 61, 257, 260, 7, 7, 99)


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A random model and its Hugging Face folder."""
    config = MODELS[request.param]
    tokenizer = TokenizerConfig().build()
    trainer = start_devices(TrainerConfig(), rows_per_device=1, alone=True)
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(scale=0.6, size=leaf.shape), leaf.dtype),
        PolicySpec(config, tokenizer.vocab_size, trainer).policy,
    )
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    save_hf_policy(model, tokenizer, folder, trainer)
    return model, folder


def test_the_numpy_forward_pass_is_levanters(saved) -> None:
    model, folder = saved
    logits = model(hax.named(np.array(TOKENS, np.int32), "position"), AttentionMask.causal())
    logprobs = jax.nn.log_softmax(logits.rearrange(("position", "vocab")).array)
    expected = np.asarray(logprobs)[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    found = llama_logprobs(model.config, weights, TOKENS, np.float64)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 1


@pytest.mark.medium
def test_sampler_and_learner_deviate_from_float64_by_rounding(saved) -> None:
    _, folder = saved
    differences = measure(str(folder), prompts=("12+3=", "a"), max_new_tokens=4)
    assert list(differences) == [
        "sampler - learner",
        "sampler - float64",
        "learner - float64",
        "numpy float32 - float64",
    ]
    for values in differences.values():
        assert values.size > 2
        assert values.max() < 1e-5
    assert differences["numpy float32 - float64"].max() > 0


def test_the_float64_gradient_is_that_of_finite_differences(saved) -> None:
    model, folder = saved
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    sequences = [(TOKENS, 4), (TOKENS[:6], 1)]

    def loss(scale: float, direction: dict[str, np.ndarray]) -> float:
        moved = {name: array + scale * direction[name] for name, array in weights.items()}
        scored = [llama_logprobs(model.config, moved, tokens, np.float64)[at - 1 :] for tokens, at in sequences]
        return -np.concatenate(scored).mean()

    gradient = float64_gradient(model.config, weights, sequences)
    rng = np.random.default_rng(0)
    direction = {name: rng.normal(size=array.shape) for name, array in weights.items()}
    expected = (loss(1e-5, direction) - loss(-1e-5, direction)) / 2e-5
    found = sum(float((gradient[name] * direction[name]).sum()) for name in weights)
    assert all(array.dtype == np.float64 for array in gradient.values())
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": LINEAR}, "has rope_scaling in config.json"),
        ({"hidden_act": "gelu"}, "has the hidden_act 'gelu', expected 'silu'"),
        ({}, "has no model.safetensors; save the checkpoint again"),
    ],
)
def test_a_llama_that_the_numpy_forward_pass_does_not_compute_is_refused(tmp_path: Path, changes: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        measure(write_config(tmp_path, {**record("llama")["config"], **changes}))
