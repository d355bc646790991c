# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from huggingface_hub import hf_hub_download
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import hub

from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.learner.policy_model import (
    initialize_policy,
    load_hf_policy,
    model_shape,
    read_hf_architecture,
    save_hf_policy,
)
from marin_rl.models.hf_config import PolicyModelError
from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer
from tests.models.hf_checkpoint import record, write_checkpoint
from tests.models.hf_oracle.make_oracle import CASES, VOCAB, token_ids


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def exports(tiny, trainer, chat, tmp_path_factory):
    """Weights and folder of each architecture, exported."""
    made = {}
    for name, config in {"llama": tiny.LLAMA, "qwen3": tiny.QWEN3}.items():
        model = tiny.make_model(trainer, config, seed=7)
        folder = tmp_path_factory.mktemp(name) / "hf"
        save_hf_policy(model, chat, folder, trainer)
        made[name] = model, folder
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_export_and_import_is_exact(tiny, trainer, chat, exports, name: str) -> None:
    model, folder = exports[name]
    loaded = load_hf_policy(str(folder), chat, trainer, None)
    tiny.assert_same_bits(loaded, model)
    assert type(loaded) is type(model)
    assert loaded.Vocab == model.Vocab


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_exported_folder_is_hugging_faces(tiny, exports, name: str) -> None:
    _, folder = exports[name]
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == name
    assert config.vocab_size == tiny.VOCAB
    assert config.hidden_size == 16
    messages = [{"role": "user", "content": "2+3="}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = byte_tokenizer()
    for each in (tokenizer, expected):
        assert each.apply_chat_template(messages, add_generation_prompt=True) == [259, 50, 43, 51, 61, 257, 260]
    assert tokenizer.chat_template == expected.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (expected.eos_token_id, expected.pad_token_id)
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        assert "model.embed_tokens.weight" in tensors.keys()  # noqa: SIM118 (not a mapping)
        assert tensors.get_tensor("model.embed_tokens.weight").shape == (tiny.VOCAB, 16)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_architecture_is_read_back(exports, name: str) -> None:
    model, folder = exports[name]
    config = read_hf_architecture(str(folder))
    for field in ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads"):
        assert getattr(config, field) == getattr(model.config, field)


def test_settings_of_the_run_override_those_of_the_checkpoint(tiny, trainer, chat, exports) -> None:
    model, folder = exports["llama"]
    loaded = load_hf_policy(str(folder), chat, trainer, dataclasses.replace(tiny.LLAMA, gradient_checkpointing=True))
    assert loaded.config.gradient_checkpointing
    tiny.assert_same_bits(loaded, model)


def test_weights_are_loaded_in_the_precision_of_parameters(tiny, chat, exports) -> None:
    trainer = tiny.make_trainer(policy="p=bf16,c=bf16")
    _, folder = exports["llama"]
    loaded = load_hf_policy(str(folder), chat, trainer, None)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}


def test_a_folder_named_relative_to_here_is_not_looked_up_on_the_hub(tiny, trainer, chat, exports, monkeypatch) -> None:
    model, folder = exports["llama"]
    monkeypatch.chdir(folder.parent)
    asked = []

    def download(repo_id: str, *arguments, **options) -> str:
        asked.append(repo_id)
        return hf_hub_download(repo_id, *arguments, **options)

    # What levanter asks while loading goes through this name.
    monkeypatch.setattr(hub, "hf_hub_download", download)
    tiny.assert_same_bits(load_hf_policy("hf", chat, trainer, None), model)
    # Where it is asked for files that may be there, the name is none that a hub could know.
    assert asked
    assert all(Path(repo_id).is_absolute() for repo_id in asked)


def test_a_tokenizer_that_knows_more_tokens_than_the_model_is_refused(trainer, exports) -> None:
    _, folder = exports["llama"]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|one_more|>"])
    with pytest.raises(
        PolicyModelError, match=r"has 265 tokens, but the model in .* has a vocabulary of 264"
    ) as caught:
        load_hf_policy(str(folder), ChatTokenizer(tokenizer), trainer, None)
    assert f"tokenizer.path: {folder}" in str(caught.value)


def test_a_model_with_a_larger_vocabulary_keeps_it(tiny, trainer, chat, tmp_path) -> None:
    shape = model_shape(tiny.LLAMA, Axis("vocab", 272), trainer)
    model = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shape)
    save_hf_policy(model, chat, tmp_path / "hf", trainer)
    loaded = load_hf_policy(str(tmp_path / "hf"), chat, trainer, None)
    tiny.assert_same_bits(loaded, model)


@pytest.mark.parametrize("missing", ["/nowhere/at/all", "nowhere", "no-one/nothing", "../nowhere/at/all"])
def test_a_missing_checkpoint_is_named(trainer, chat, missing: str) -> None:
    with pytest.raises(PolicyModelError, match=f"no model in Hugging Face format at '{missing}'"):
        load_hf_policy(missing, chat, trainer, None)
    with pytest.raises(PolicyModelError, match=f"no model in Hugging Face format at '{missing}'"):
        read_hf_architecture(missing)


@pytest.fixture
def copied(exports, tmp_path: Path) -> Path:
    _, source = exports["llama"]
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_folder_without_weights_is_named(trainer, chat, copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(PolicyModelError, match=r"the weights in .*hf' are missing or damaged: model.safetensors: "):
        load_hf_policy(str(copied), chat, trainer, None)


def test_a_broken_weights_file_is_named(trainer, chat, copied: Path) -> None:
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(PolicyModelError, match=r"the weights in .*hf' are missing or damaged: model.safetensors: "):
        load_hf_policy(str(copied), chat, trainer, None)


@pytest.mark.parametrize("change", [{"hidden_dim": 32}, {"num_layers": 2}, {"num_kv_heads": 2}])
def test_weights_of_another_architecture_are_refused(tiny, trainer, chat, copied: Path, change: dict[str, int]) -> None:
    (name,) = change
    hf_name = {"hidden_dim": "hidden_size", "num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}
    with pytest.raises(PolicyModelError, match=rf"describes another model than .*leave model out.* {hf_name[name]}: "):
        load_hf_policy(str(copied), chat, trainer, dataclasses.replace(tiny.LLAMA, **change))


def test_an_unknown_architecture_is_named(trainer, chat, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(PolicyModelError, match=r"holds a 'bert' model, which is not supported; supported are gemma"):
        load_hf_policy(str(copied), chat, trainer, None)


def test_a_policy_from_scratch_has_the_shapes_that_were_foretold(tiny, chat) -> None:
    trainer = tiny.make_trainer(policy="p=bf16,c=bf16")
    model = initialize_policy(tiny.LLAMA, chat, trainer, key=jax.random.PRNGKey(0))
    shape = model_shape(tiny.LLAMA, Axis("vocab", chat.vocab_size), trainer)
    assert jax.tree.structure(shape) == jax.tree.structure(model)
    for found, leaf in zip(jax.tree.leaves(shape), jax.tree.leaves(model), strict=True):
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    tiny.assert_same_bits(initialize_policy(tiny.LLAMA, chat, trainer, key=jax.random.PRNGKey(0)), model)
    other = initialize_policy(tiny.LLAMA, chat, trainer, key=jax.random.PRNGKey(1))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(model), strict=True))


@pytest.fixture(scope="module")
def loaded_logprobs(tiny, trainer, chat):
    """Loads a checkpoint as a run does, and computes the log-probability of every token of the oracle but the first."""

    def compute(checkpoint: str) -> np.ndarray:
        assert chat.vocab_size == VOCAB
        ids = token_ids()
        rows, positions = ids.shape
        at = np.broadcast_to(np.arange(positions, dtype=np.int32), ids.shape)
        example = tiny.replace_arrays(
            tiny.make_example(rows, positions),
            input_ids=ids,
            loss_mask=at > 0,
            segment_ids=np.ones_like(ids),
            position_ids=at.copy(),
        )

        def score(model, batch):
            activations = policy_activations(model, batch)
            return token_logprobs(activations, model.get_lm_head(), batch, temperature=1.0, block_size=positions)[0]

        model = load_hf_policy(checkpoint, chat, trainer, None)
        with trainer.use_device_mesh():
            scored = hax.named_jit(score, axis_resources=trainer.compute_axis_mapping)(model, example)
        return np.asarray(scored.array)[:, 1:]

    return compute


@pytest.mark.usefixtures("compiled_quickly")
# Levanter's mixture of experts calls a function that haliax has renamed, and logs to levanter's own tracker.
@pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:No global tracker set")
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_those_of_transformers(tmp_path, loaded_logprobs, case: str) -> None:
    found = loaded_logprobs(write_checkpoint(tmp_path, case))
    np.testing.assert_allclose(found, record(case)["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("case", ["llama_llama3", "qwen3"])
def test_log_probabilities_do_not_depend_on_the_version_that_wrote_the_config(
    tmp_path, loaded_logprobs, case: str
) -> None:
    folder = write_checkpoint(tmp_path, case)
    (tmp_path / "config.json").write_text(json.dumps(record(case)["config_version5"]))
    np.testing.assert_allclose(loaded_logprobs(folder), record(case)["logprobs"], rtol=0, atol=1e-5)


def test_tensors_that_the_model_does_not_take_are_refused_at_loading(trainer, chat, tmp_path) -> None:
    folder = write_checkpoint(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(PolicyModelError, match=r"the model does not use .*q_proj.bias"):
        load_hf_policy(folder, chat, trainer, None)


@pytest.mark.parametrize("case", ["qwen2_yarn", "gpt2"])
def test_a_loaded_model_comes_back_from_its_export(tiny, trainer, chat, tmp_path, case: str) -> None:
    model = load_hf_policy(write_checkpoint(tmp_path, case), chat, trainer, None)
    save_hf_policy(model, chat, tmp_path / "hf", trainer)
    loaded = load_hf_policy(str(tmp_path / "hf"), chat, trainer, None)
    assert loaded.config == model.config
    tiny.assert_same_bits(loaded, model)
