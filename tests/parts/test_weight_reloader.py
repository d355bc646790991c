# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.models.lm_model import LmHeadModel

from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.models.lora import init_adapter, with_adapter
from marin_rl.models.peft_format import load_peft_adapter
from marin_rl.parts.weight_reloader import WeightReloader
from marin_rl.sampling.config import ReloadConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.user_code import UserFileError

Parts = tuple[LmHeadModel, ChatTokenizer, TrainerConfig]

URL = "http://localhost:1/v1"

HOOK = """
    import json

    def reload(folder, version, base_url):
        present = sorted(path.name for path in folder.parent.iterdir())
        whole = (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
        with open({log!r}, "a") as log:
            print(json.dumps([folder.name, folder.is_absolute(), version, base_url, whole, present]), file=log)
"""


@pytest.fixture
def parts(tiny, trainer: TrainerConfig) -> Parts:
    return tiny.make_model(trainer), ChatTokenizer(byte_tokenizer()), trainer


def written(tmp_path: Path, text: str) -> ReloadConfig:
    hook = tmp_path / "hook.py"
    hook.write_text(re.sub(r"^ {4}", "", text, flags=re.MULTILINE))
    return ReloadConfig(folder=str(tmp_path / "weights"), path=str(hook), function="reload")


@pytest.mark.medium
def test_function_gets_complete_weights_and_old_versions_are_deleted(parts: Parts, tmp_path: Path):
    model, tokenizer, trainer = parts
    log = tmp_path / "log.jsonl"
    weights = WeightReloader(written(tmp_path, HOOK.format(log=str(log))), URL, tokenizer, trainer)
    double = jax.tree.map(lambda leaf: 2 * leaf, model)
    for version, one in ((0, model), (0, double), (1, model), (2, double)):
        weights(one, version)
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        ["version-0", True, 0, URL, True, ["version-0"]],
        ["version-0", True, 0, URL, True, ["version-0"]],
        ["version-1", True, 1, URL, True, ["version-0", "version-1"]],
        ["version-2", True, 2, URL, True, ["version-0", "version-1", "version-2"]],
    ]
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["version-1", "version-2"]
    for version, expected in ((1, model), (2, double)):
        loaded = load_hf_policy(str(tmp_path / "weights" / f"version-{version}"), tokenizer, trainer, model.config)
        for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.medium
def test_of_an_adapter_only_its_matrices_are_written(parts: Parts, tmp_path: Path):
    base, tokenizer, trainer = parts
    adapter = init_adapter(base, rank=2, scale=1.5, targets=["q_proj", "down_proj"], key=jax.random.PRNGKey(0))
    adapter = jax.tree.map(lambda leaf: leaf + 0.25, adapter)
    config = dataclasses.replace(written(tmp_path, HOOK.format(log="/dev/null")), adapter=True)
    WeightReloader(config, URL, tokenizer, trainer, base="models/start")(with_adapter(base, adapter), 3)
    folder = tmp_path / "weights" / "version-3"
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "models/start"
    assert not [*folder.glob("model*"), *folder.glob("config.json")]
    loaded = load_peft_adapter(str(folder), base, jax.tree.map(jnp.zeros_like, adapter), trainer)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(adapter), strict=True):
        np.testing.assert_array_equal(one, other)


def test_leftovers_are_replaced_and_other_folders_are_kept(parts: Parts, tmp_path: Path):
    model, tokenizer, trainer = parts
    folder = tmp_path / "weights"
    for name in ("version-3", ".version-3.partial", "version-7", "mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half").write_text("half")
    weights = WeightReloader(written(tmp_path, HOOK.format(log="/dev/null")), URL, tokenizer, trainer)
    for version in (3, 4, 5):
        weights(model, version)
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "version-4", "version-5", "version-7"]


def test_function_error_is_named_and_previous_weights_are_kept(parts: Parts, tmp_path: Path):
    model, tokenizer, trainer = parts
    config = written(
        tmp_path,
        """
    def reload(folder, version, base_url):
        if version == 2:
            raise ConnectionError("nobody there")
    """,
    )
    weights = WeightReloader(config, URL, tokenizer, trainer)
    for version in (0, 1):
        weights(model, version)
    with pytest.raises(UserFileError, match=r"sampler.reload: 'reload' of .*hook.py raised ConnectionError: nobody"):
        weights(model, 2)
    assert (tmp_path / "weights" / "version-1").is_dir()
    assert (tmp_path / "weights" / "version-0").is_dir()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def relaod(folder, version, base_url): pass", "does not define 'reload'; did you mean 'relaod'"),
        ("reload = 3", "'reload' of .* is int; it must be a function of folder, version and base_url"),
    ],
)
def test_missing_function_fails_before_weights_are_written(parts: Parts, tmp_path: Path, text: str, problem: str):
    _, tokenizer, trainer = parts
    config = written(tmp_path, text)
    with pytest.raises(UserFileError, match=problem):
        WeightReloader(config, URL, tokenizer, trainer)
    assert not (tmp_path / "weights").exists()
