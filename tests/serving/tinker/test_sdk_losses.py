# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Losses through the SDK of Tinker against torch in float64: log-probs, loss, metrics, and the weights after a step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.serving.tinker.records import ModelSpec
from marin_rl.serving.tinker.trainer import JaxTrainer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.serving.tinker.test_sdk import PYTHON, python, run
from tests.serving.tinker.wire import serving
from tests.tiny_learner import make_model, make_trainer

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="the package tinker is not installed"),
    pytest.mark.medium,
]
CASES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "ppo thresholds", "cispo thresholds")
CUSTOM = ("quadratic", "dpo")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    """Return what `sdk_losses` found of each loss, and the weights of the server."""
    if python("-c", "from importlib.metadata import version; version('torch'), version('transformers')").returncode:
        pytest.skip("the Python with the package tinker has no torch or no transformers")
    folder, trainer, tokenizer = tmp_path_factory.mktemp("losses"), make_trainer(), ChatTokenizer(byte_tokenizer())
    save_hf_policy(make_model(trainer), tokenizer, folder / "model", trainer)
    options = {"max_context": 16, "max_seqs": 8, "call_seconds": 0.1}
    server = JaxTrainer(str(folder / "model"), tokenizer, trainer, **options)
    with serving(folder / "served", server) as (url, _):
        run("sdk_losses.py", url, str(folder / "model"), str(folder / "found.npz"))
    found: dict[str, dict[str, Any]] = {}
    for key, value in np.load(folder / "found.npz").items():
        name, _, part = key.partition("/")
        found.setdefault(name, {})[part] = value
    for name, values in found.items():
        server.create(ModelSpec(0, 0, True, True, True))
        server.load(folder / "served" / str(values["path"]).removeprefix("tinker://"), optimizer=True)
        save_hf_policy(server._state.state.model, tokenizer, folder / name, trainer)
        values["server"] = load_file(folder / name / "model.safetensors")
    return found


@pytest.mark.parametrize("name", CASES + CUSTOM)
def test_a_step_is_that_of_torch(steps: Mapping[str, Mapping[str, Any]], name: str) -> None:
    found = steps[name]
    np.testing.assert_allclose(*found["logprobs"], rtol=1e-6, atol=1e-6)
    for given, expected in found["metrics"]:
        np.testing.assert_allclose(given, expected, rtol=1e-6)
    for key, weights in found["server"].items():
        expected, start = found[f"weights/{key}"], found[f"start/{key}"]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6, err_msg=key)
        assert np.linalg.norm(weights - expected) < 1e-6 * np.linalg.norm(expected - start), key
