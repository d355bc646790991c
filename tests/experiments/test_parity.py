# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionMask
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from levanter.models.qwen import Qwen3Config
from safetensors.numpy import load_file

from experiments.parity import llama_logprobs, measure
from marin_rl.config.train_config import TrainerConfig
from marin_rl.learner.devices import start_devices
from marin_rl.learner.policy_model import model_shape, save_hf_policy
from marin_rl.tokenization.load import TokenizerConfig
from tests.models.hf_checkpoint import record, write_config
from tests.models.hf_oracle.make_oracle import LINEAR

SIZES = {
    "seq_len": 64,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
LLAMA = LlamaConfig(**SIZES, rope=DefaultRotaryEmbeddingsConfig(theta=500.0))
TOKENS = (259, 50, 43, 51, 61, 257, 260, 7, 7, 99)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    """A random llama and its Hugging Face folder."""
    tokenizer = TokenizerConfig().build()
    trainer = start_devices(TrainerConfig(), rows_per_device=1, alone=True)
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(scale=0.6, size=leaf.shape), leaf.dtype),
        model_shape(LLAMA, Axis("vocab", tokenizer.vocab_size), trainer),
    )
    folder = tmp_path_factory.mktemp("llama") / "hf"
    save_hf_policy(model, tokenizer, folder, trainer)
    return model, folder


def test_the_numpy_forward_pass_is_levanters(llama) -> None:
    model, folder = llama
    logits = model(hax.named(np.array(TOKENS, np.int32), "position"), AttentionMask.causal())
    logprobs = jax.nn.log_softmax(logits.rearrange(("position", "vocab")).array)
    expected = np.asarray(logprobs)[np.arange(len(TOKENS) - 1), TOKENS[1:]]
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    found = llama_logprobs(LLAMA, weights, TOKENS, np.float64)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 1


@pytest.mark.medium
def test_sampler_and_learner_deviate_from_float64_by_rounding(llama) -> None:
    _, folder = llama
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


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    Qwen3Config(**SIZES).to_hf_config(264).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a Qwen3Config; the numpy forward pass supports llama only"):
        measure(str(tmp_path))


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
