# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The tokenizer of `initialize_from`, and its vocabulary."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from levanter.models.llama import LlamaConfig
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from marin_rl.config.input_files import digest_inputs
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.models.hf_config import PolicyModelError
from marin_rl.tokenization.load import BYTES, TokenizerConfig, TokenizerLoadError, byte_tokenizer
from marin_rl.training.starting_weights import check_weight_files, resolve_model
from marin_rl.utils.storage import storage_path
from tests.models.hf_checkpoint import record, write_config
from tests.tiny_run import TinyRun, copy_of
from tests.training.reopened_run import config_of


def with_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """A folder of weights with a tokenizer."""
    tokenizer.save_pretrained(folder)
    return write_config(folder, record("llama")["config"] | {"vocab_size": 300})


def changed_tokenizer(change: Callable[[dict], object], folder: Path) -> str:
    """A folder with the built-in tokenizer after a change of its tokenizer.json."""
    byte_tokenizer().save_pretrained(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    change(saved)
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return str(folder)


def swap(saved: dict) -> None:
    vocab = saved["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def rename_reserved(saved: dict) -> None:
    saved["added_tokens"][6]["content"] = "<|im_start|>"


def starting_from(source: str, folder: Path, path: str | None = None) -> TrainConfig:
    """A config that has not started."""
    return TrainConfig(
        ArithmeticConfig(),
        str(folder / "run"),
        initialize_from=source,
        tokenizer=TokenizerConfig(path),
        rollouts=RolloutConfig(max_length=16),
    )


def test_the_tokenizer_is_that_of_the_weights(tmp_path: Path, finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch):
    own = byte_tokenizer()
    own.add_tokens(["<|im_start|>"])
    source = with_tokenizer(own, tmp_path / "own")
    assert resolve_model(starting_from(source, tmp_path)).tokenizer.path == source
    # A folder, whose path starts at the working directory, and `~`.
    monkeypatch.chdir(tmp_path)
    assert resolve_model(starting_from("./own", tmp_path)).tokenizer.path == "./own"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(starting_from("~/own", tmp_path)).tokenizer.path == "~/own"
    # Runs with the built-in tokenizer; the new run does not need its files.
    for path in (finished_run.path, finished_run.path / "hf"):
        assert resolve_model(starting_from(str(path), tmp_path)).tokenizer.path == BYTES
    # A run with another.
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "config.yaml").touch()
    shutil.copytree(source, tmp_path / "earlier" / "hf")
    assert resolve_model(starting_from("earlier", tmp_path)).tokenizer.path == "earlier/hf"
    assert resolve_model(starting_from(source, tmp_path, "other")).tokenizer.path == "other"


def test_the_tokenizer_of_an_address_is_copied_without_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = byte_tokenizer()
    own.add_tokens(["<|im_start|>"])
    folder = Path(with_tokenizer(own, tmp_path / "own"))
    (folder / "model.safetensors").touch()
    address = "memory://bucket/own"
    for file in folder.iterdir():
        (storage_path(address) / file.name).write_bytes(file.read_bytes())
    path = resolve_model(starting_from(address, tmp_path)).tokenizer.path
    assert path == address
    assert TokenizerConfig(path).build().vocab_size == 265
    assert not list((tmp_path / "cache" / "marin_rl" / "tokenizers").rglob("*.safetensors"))
    assert digest_inputs(starting_from(address, tmp_path, path), ("tokenizer",)) == {"tokenizer": {}}
    with pytest.raises(TokenizerLoadError, match=r"tokenizer.path is 'memory://bucket/no', which cannot be copied"):
        TokenizerConfig("memory://bucket/no").build()


def test_a_hub_name_names_the_tokenizer_too_without_the_run_directory(monkeypatch: pytest.MonkeyPatch):
    config = TrainConfig(ArithmeticConfig(), "memory://bucket/run", LlamaConfig(), initialize_from="org/name")
    monkeypatch.setattr("marin_rl.training.starting_weights.read_hf_architecture", lambda name, model: model)
    assert resolve_model(config).tokenizer.path == "org/name"


def test_weights_without_a_tokenizer_need_one_by_name(tmp_path: Path):
    source = write_config(tmp_path / "weights", record("llama")["config"])
    with pytest.raises(
        TokenizerLoadError, match=r"initialize_from is .* has no tokenizer .* or to bytes for the built"
    ):
        resolve_model(starting_from(source, tmp_path))
    assert resolve_model(starting_from(source, tmp_path, BYTES)).tokenizer.build().vocab_size == 264


def test_a_resumed_run_keeps_its_tokenizer(finished_run: TinyRun, tmp_path: Path):
    left_out = dataclasses.replace(config_of(finished_run), initialize_from=str(tmp_path / "deleted"))
    assert left_out.tokenizer.path is None
    copied = copy_of(finished_run, tmp_path / "copy")
    text = (copied.path / "config.yaml").read_text()
    (copied.path / "config.yaml").write_text(
        text.replace("  path: null\n  chat_template", "  path: org/name\n  chat_template")
    )
    assert resolve_model(dataclasses.replace(left_out, run_dir=str(copied.path))).tokenizer.path == "org/name"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap, r"2 tokens differ, the first is id 97, 'b' instead of 'a'; leave out tokenizer.path"),
        (lambda saved: saved["model"]["vocab"].update(new=400), None),
        (rename_reserved, None),
        (lambda saved: saved["added_tokens"].append({**saved["added_tokens"][1], "id": 264, "content": "<|x|>"}), None),
        (lambda saved: None, None),
    ],
)
def test_another_vocabulary_than_that_of_the_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], object], message: str | None
):
    monkeypatch.setattr("marin_rl.training.starting_weights.read_tensor_shapes", lambda folder: {})
    source = with_tokenizer(byte_tokenizer(), tmp_path / "weights")
    config = resolve_model(starting_from(source, tmp_path, changed_tokenizer(change, tmp_path / "other")))
    if message is None:
        check_weight_files(config.initialize_from, config.run_dir, config.tokenizer.path)
        return
    with pytest.raises(PolicyModelError, match=message):
        check_weight_files(config.initialize_from, config.run_dir, config.tokenizer.path)
    # Also if the weights are those of another tokenizer than the built-in one.
    source = with_tokenizer(AutoTokenizer.from_pretrained(tmp_path / "other"), tmp_path / "swapped")
    with pytest.raises(PolicyModelError, match="2 tokens differ, the first is id 97, 'a' instead of 'b'"):
        check_weight_files(source, str(tmp_path / "run"), BYTES)
