# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import shutil
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray
from huggingface_hub import constants, hf_hub_download
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel
from safetensors import safe_open
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import hub

from marin_rl.batching.rl_example import RlExample
from marin_rl.learner.logprobs import policy_activations, token_logprobs
from marin_rl.learner.policy_model import (
    initialize_policy,
    load_hf_policy,
    read_hf_architecture,
    save_hf_policy,
)
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.models.conversion import check_same_function
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.models.hf_tensors import BASE_PREFIX, to_tensors
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenizerConfig, byte_tokenizer
from marin_rl.utils.hub import HubError
from marin_rl.utils.levanter_line import seq_len
from tests.models.hf_checkpoint import cases, fuse, record, write_checkpoint
from tests.models.hf_oracle.make_oracle import (
    CASES,
    GREEDY_TOKENS,
    LENGTH,
    PROMPT_LENGTHS,
    VOCAB,
    loss_weights,
    summarize_gradient,
    token_ids,
    weights,
)

pytestmark = pytest.mark.both_lines

ARCHITECTURES = (
    *("gemma", "gemma2", "gemma2_window", "gpt2", "llama_yarn", "mistral", "mistral_window", "mixtral", "olmo2"),
    *("olmo3", "olmo3_yarn", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe_dense", "qwen3_moe_window"),
)
"""Oracle cases: one per architecture, and those of attention windows shorter than the sequences."""


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def exports(tiny, trainer, chat, tmp_path_factory):
    """Return weights and exported folder of each architecture."""
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
def test_exported_folder_has_hugging_face_format(tiny, exports, name: str) -> None:
    _, folder = exports[name]
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == name
    assert config.vocab_size == tiny.VOCAB
    assert config.hidden_size == 16
    messages = [{"role": "user", "content": "2+3="}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = byte_tokenizer()
    for each in (tokenizer, expected):
        encoded = each.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert encoded["input_ids"] == [259, 50, 43, 51, 61, 257, 260]
    assert tokenizer.chat_template == expected.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (expected.eos_token_id, expected.pad_token_id)
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        assert "model.embed_tokens.weight" in tensors.keys()  # noqa: SIM118 (not a mapping)
        assert tensors.get_tensor("model.embed_tokens.weight").shape == (tiny.VOCAB, 16)


# Stop tokens.

EOS, END_OF_TURN, ONE_MORE = 262, 257, 263
CONTEXT, NEW_TOKENS = 64, 40


@pytest.fixture(scope="module")
def several_stops() -> ChatTokenizer:
    """A tokenizer with an end of turn other than eos, and one more stop token in the generation config."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|reserved_0|>"
    return ChatTokenizer(tokenizer, (ONE_MORE,))


@pytest.fixture(scope="module")
def speakers(tiny, trainer, several_stops, tmp_path_factory) -> dict[str, tuple[LmHeadModel, Path]]:
    """Return weights and exported folder of models with greedy generations that end with each of the stop tokens."""
    made = {}
    for name, config in {"llama": tiny.LLAMA, "qwen3": tiny.QWEN3}.items():
        model = tiny.make_model(trainer, dataclasses.replace(config, **seq_len(CONTEXT)), seed=7)
        loud = np.ones(tiny.VOCAB, np.float32)
        loud[list(several_stops.stop_token_ids)] = 2.0
        head = model.lm_head.weight
        model = eqx.tree_at(lambda m: m.lm_head.weight.array, model, head.array * loud[:, None])
        folder = tmp_path_factory.mktemp(name) / "hf"
        save_hf_policy(model, several_stops, folder, trainer)
        made[name] = model, folder
    return made


def prompts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, 256, length).tolist()) for length in range(1, 21)]


def greedy(model: LmHeadModel, stop_token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return greedy generations as in evaluation."""
    config = SamplingConfig(max_new_tokens=NEW_TOKENS, max_seqs=len(prompts()))
    sampler = GroupSampler(model, config=config, stop_token_ids=stop_token_ids, max_context=CONTEXT)
    generations = sampler.sample([SampleRequest(prompt, 0, NEW_TOKENS, 0.0) for prompt in prompts()])
    return [generation.token_ids for generation in generations]


@pytest.fixture(scope="module")
def spoken(speakers, several_stops) -> list[tuple[int, ...]]:
    model, _ = speakers["llama"]
    spoken = greedy(model, several_stops.stop_token_ids)
    assert {EOS, END_OF_TURN, ONE_MORE} <= {tokens[-1] for tokens in spoken}
    assert len({len(tokens) for tokens in spoken}) > 5
    return spoken


def test_the_export_lists_every_stop_token_and_an_import_keeps_them(speakers, several_stops) -> None:
    _, folder = speakers["llama"]
    assert several_stops.stop_token_ids == (EOS, END_OF_TURN, ONE_MORE)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [EOS, END_OF_TURN, ONE_MORE]
    assert (generation.pad_token_id, generation.bos_token_id) == (256, None)
    assert AutoConfig.from_pretrained(folder).eos_token_id == [EOS, END_OF_TURN, ONE_MORE]
    again = TokenizerConfig(path=str(folder)).build()
    assert (again.stop_token_ids, again.pad_token_id) == (several_stops.stop_token_ids, several_stops.pad_token_id)


def test_the_export_has_no_sampling_settings_and_no_short_limit(speakers) -> None:
    _, folder = speakers["llama"]
    settings = GenerationConfig().to_dict().keys() - {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
    assert settings & json.loads((folder / "config.json").read_text()).keys() == set()
    written = json.loads((folder / "generation_config.json").read_text())
    assert settings & written.keys() == {"max_length"}
    assert written["max_length"] == CONTEXT


def test_the_export_lists_stop_texts(tiny, chat, trainer, tmp_path) -> None:
    save_hf_policy(tiny.make_model(trainer), chat, tmp_path / "hf", trainer, ("</answer>", "\n\n"))
    assert GenerationConfig.from_pretrained(tmp_path / "hf").stop_strings == ["</answer>", "\n\n"]
    assert TokenizerConfig(path=str(tmp_path / "hf")).build().stop_token_ids == chat.stop_token_ids


@pytest.mark.parametrize(("policy", "dtype"), [("f32", "float32"), ("p=bf16,c=bf16", "bfloat16")])
def test_the_export_names_its_precision(tiny, chat, tmp_path, policy: str, dtype: str) -> None:
    trainer = tiny.make_trainer(policy=policy)
    save_hf_policy(tiny.make_model(trainer), chat, tmp_path / "hf", trainer)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype)
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="numpy") as tensors:
        assert tensors.get_slice("lm_head.weight").get_dtype() == {"float32": "F32", "bfloat16": "BF16"}[dtype]


@pytest.mark.medium
def test_the_exported_files_alone_give_the_same_greedy_generations(speakers, chat, trainer, spoken) -> None:
    """Compare with a loop over full forward passes that stops at the tokens in generation_config.json."""
    _, folder = speakers["llama"]
    model = load_hf_policy(str(folder), chat, trainer, None)
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]

    @hax.named_jit
    def forward(model: LmHeadModel, tokens: NamedArray) -> NamedArray:
        return model(tokens, attn_mask=AttentionMask.causal())

    tokens, lengths = np.zeros((len(prompts()), CONTEXT), np.int32), np.array([len(prompt) for prompt in prompts()])
    for row, prompt in zip(tokens, prompts(), strict=True):
        row[: len(prompt)] = prompt
    found: list[list[int]] = [[] for _ in prompts()]
    for _ in range(NEW_TOKENS):
        logits = np.asarray(forward(model, hax.named(tokens, ("batch", "position"))).array)
        for row, generation in enumerate(found):
            if not (generation and generation[-1] in stops):
                generation.append(int(logits[row, lengths[row] - 1].argmax()))
                tokens[row, lengths[row]] = generation[-1]
                lengths[row] += 1
    assert [tuple(generation) for generation in found] == spoken


@pytest.mark.medium
@pytest.mark.torch
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_transformers_makes_the_same_greedy_generations(name: str, speakers, several_stops) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra test-torch")
    transformers = pytest.importorskip("transformers")
    model, folder = speakers[name]
    expected = greedy(model, several_stops.stop_token_ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype is torch.float32
    found = [
        tuple(theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)[0, len(prompt) :].tolist())
        for prompt in prompts()
    ]
    assert found == expected
    # Without an explicit limit a generation ends at a stop token or with the context, not after 20 tokens.
    unlimited = theirs.generate(torch.tensor([prompts()[0]]))[0, 1:].tolist()
    assert unlimited[-1] in several_stops.stop_token_ids or len(unlimited) == CONTEXT - 1
    assert max(map(len, found)) > 20


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_exported_architecture_is_read_back(exports, name: str) -> None:
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


def test_relative_folder_is_not_looked_up_on_the_hub(tiny, trainer, chat, exports, monkeypatch) -> None:
    model, folder = exports["llama"]
    monkeypatch.chdir(folder.parent)
    asked = []

    def download(repo_id: str, *arguments, **options) -> str:
        asked.append(repo_id)
        return hf_hub_download(repo_id, *arguments, **options)

    # Levanter's requests during loading go through this name.
    monkeypatch.setattr(hub, "hf_hub_download", download)
    tiny.assert_same_bits(load_hf_policy("hf", chat, trainer, None), model)
    # Requests for optional files must not use a name that is valid on the hub.
    assert asked
    assert all(Path(repo_id).is_absolute() for repo_id in asked)


def test_a_model_in_the_cache_of_the_hub_is_loaded_from_it(tiny, trainer, chat, exports, tmp_path, monkeypatch) -> None:
    model, folder = exports["llama"]
    cached = tmp_path / "models--org--cached"
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # A copy of the setting, which only transformers 4 has.
    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    assert constants.HF_HUB_OFFLINE
    tiny.assert_same_bits(load_hf_policy("org/cached", chat, trainer, None), model)


def test_tokenizer_with_more_tokens_than_the_model_is_rejected(trainer, exports) -> None:
    _, folder = exports["llama"]
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|one_more|>"])
    with pytest.raises(
        PolicyModelError, match=r"has 265 tokens, but the model in .* has a vocabulary of 264"
    ) as caught:
        load_hf_policy(str(folder), ChatTokenizer(tokenizer), trainer, None)
    assert f"tokenizer.path: {folder}" in str(caught.value)


def test_a_model_with_a_larger_vocabulary_keeps_it(tiny, trainer, chat, tmp_path) -> None:
    shape = PolicySpec(tiny.LLAMA, 272, trainer).policy
    model = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shape)
    save_hf_policy(model, chat, tmp_path / "hf", trainer)
    loaded = load_hf_policy(str(tmp_path / "hf"), chat, trainer, None)
    tiny.assert_same_bits(loaded, model)


@pytest.mark.parametrize("missing", ["/nowhere/at/all", "nowhere", "no-one/nothing", "../nowhere/at/all"])
def test_error_names_a_missing_checkpoint(trainer, chat, missing: str) -> None:
    with pytest.raises(HubError, match=f"initialize_from is '{missing}'.* there is no such folder"):
        load_hf_policy(missing, chat, trainer, None)
    with pytest.raises(HubError, match=f"initialize_from is '{missing}'.* there is no such folder"):
        read_hf_architecture(missing)


def test_error_names_a_folder_without_a_model(tmp_path) -> None:
    with pytest.raises(PolicyModelError, match=r"at '.*': it has no config\.json; name a folder"):
        read_hf_architecture(str(tmp_path))


@pytest.fixture
def copied(exports, tmp_path: Path) -> Path:
    _, source = exports["llama"]
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_error_names_a_folder_without_weights(trainer, chat, copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(PolicyModelError, match=r"the weights in .*hf' are missing or damaged: model.safetensors: "):
        load_hf_policy(str(copied), chat, trainer, None)


def test_error_names_a_broken_weights_file(trainer, chat, copied: Path) -> None:
    data = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(PolicyModelError, match=r"the weights in .*hf' are missing or damaged: model.safetensors: "):
        load_hf_policy(str(copied), chat, trainer, None)


@pytest.mark.parametrize("change", [{"hidden_dim": 32}, {"num_layers": 2}, {"num_kv_heads": 2}])
def test_weights_of_another_architecture_are_rejected(
    tiny, trainer, chat, copied: Path, change: dict[str, int]
) -> None:
    (name,) = change
    hf_name = {"hidden_dim": "hidden_size", "num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}
    with pytest.raises(PolicyModelError, match=rf"describes another model than .*leave model out.* {hf_name[name]}: "):
        load_hf_policy(str(copied), chat, trainer, dataclasses.replace(tiny.LLAMA, **change))


def test_error_names_an_unknown_architecture(trainer, chat, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(PolicyModelError, match=r"holds a 'bert' model, which is not supported; supported are gemma"):
        load_hf_policy(str(copied), chat, trainer, None)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path, monkeypatch) -> None:
    proof = tmp_path / "it ran"
    (tmp_path / "hostile.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    declared = {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Hostile"}}
    (tmp_path / "config.json").write_text(json.dumps(declared))

    asked: list[object] = []

    def agree(prompt: object = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    with pytest.raises(PolicyModelError, match="a 'hostile' model, which is not supported"):
        read_hf_architecture(str(tmp_path))
    assert not asked
    assert not proof.exists()


@pytest.mark.medium
def test_initialized_policy_matches_its_spec(tiny, chat) -> None:
    trainer = tiny.make_trainer(policy="p=bf16,c=bf16")
    model = initialize_policy(tiny.LLAMA, chat, trainer, key=jax.random.PRNGKey(0))
    spec = PolicySpec(tiny.LLAMA, chat.vocab_size, trainer)
    shape = spec.place(spec.policy)
    assert jax.tree.structure(shape) == jax.tree.structure(model)
    for found, leaf in zip(jax.tree.leaves(shape), jax.tree.leaves(model), strict=True):
        assert (found.shape, found.dtype, found.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    tiny.assert_same_bits(initialize_policy(tiny.LLAMA, chat, trainer, key=jax.random.PRNGKey(0)), model)
    other = initialize_policy(tiny.LLAMA, chat, trainer, key=jax.random.PRNGKey(1))
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(model), strict=True))


def oracle_batch(tiny):
    """Return the tokens of the oracle; all but the first of a row have loss."""
    ids = token_ids()
    rows, positions = ids.shape
    at = np.broadcast_to(np.arange(positions, dtype=np.int32), ids.shape)
    return tiny.replace_arrays(
        tiny.make_example(rows, positions),
        input_ids=ids,
        loss_mask=at > 0,
        segment_ids=np.ones_like(ids),
        position_ids=at.copy(),
    )


def score(model: LmHeadModel, batch: RlExample) -> NamedArray:
    activations = policy_activations(model, batch)
    positions = batch.input_ids.axis_size("position")
    return token_logprobs(activations, model.get_lm_head(), batch, temperature=1.0, block_size=positions)[0]


@pytest.fixture(scope="module")
def loaded_logprobs(tiny, trainer, chat):
    """Load a checkpoint like a run, and compute the log-probability of every token of the oracle but the first."""

    def compute(checkpoint: str) -> np.ndarray:
        assert chat.vocab_size == VOCAB
        model = load_hf_policy(checkpoint, chat, trainer, None)
        with trainer.use_device_mesh():
            scored = hax.named_jit(score, axis_resources=trainer.compute_axis_mapping)(model, oracle_batch(tiny))
        return np.asarray(scored.array)[:, 1:]

    return compute


@pytest.mark.medium
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("case", cases(sorted(CASES.keys() - set(ARCHITECTURES))))
def test_log_probabilities_equal_those_of_transformers(tmp_path, loaded_logprobs, case: str) -> None:
    found = loaded_logprobs(write_checkpoint(tmp_path, case))
    np.testing.assert_allclose(found, record(case)["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.medium
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("case", cases(ARCHITECTURES))
def test_log_probabilities_and_gradients_equal_those_of_transformers(tmp_path, tiny, trainer, chat, case: str) -> None:
    """Compare the gradient of a weighted sum of log-probabilities: norm and directional derivative per tensor."""
    factors = np.pad(loss_weights(), ((0, 0), (1, 0)))

    def loss(model: LmHeadModel, batch: RlExample) -> tuple[jax.Array, NamedArray]:
        scored = score(model, batch)
        return jnp.sum(scored.array * factors), scored

    model = load_hf_policy(write_checkpoint(tmp_path, case), chat, trainer, None)
    with trainer.use_device_mesh():
        differentiate = hax.named_jit(eqx.filter_grad(loss, has_aux=True), axis_resources=trainer.compute_axis_mapping)
        gradient, scored = differentiate(model, oracle_batch(tiny))
        by_name = to_tensors(gradient)
    np.testing.assert_allclose(scored.array[:, 1:], record(case)["logprobs"], rtol=0, atol=1e-5)
    expected = {name.removeprefix(f"{BASE_PREFIX}."): value for name, value in record(case)["gradients"].items()}
    assert by_name.keys() == expected.keys()
    recorded_names = {name.removeprefix(f"{BASE_PREFIX}."): name for name in record(case)["gradients"]}
    for name, (norm, slope) in expected.items():
        found_norm, found_slope = summarize_gradient(recorded_names[name], np.asarray(by_name[name]))
        assert found_norm == pytest.approx(norm, rel=1e-5), name
        assert abs(found_slope - slope) <= 1e-5 * norm, name


@pytest.mark.medium
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("case", ["llama_llama3", "qwen3"])
def test_log_probabilities_do_not_depend_on_the_version_that_wrote_the_config(
    tmp_path, loaded_logprobs, case: str
) -> None:
    folder = write_checkpoint(tmp_path, case)
    (tmp_path / "config.json").write_text(json.dumps(record(case)["config_version5"]))
    np.testing.assert_allclose(loaded_logprobs(folder), record(case)["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.medium
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("case", cases(ARCHITECTURES))
def test_greedy_generations_equal_those_of_transformers(tmp_path, trainer, chat, case: str) -> None:
    model = load_hf_policy(write_checkpoint(tmp_path, case), chat, trainer, None)
    config = SamplingConfig(max_new_tokens=GREEDY_TOKENS, max_seqs=len(PROMPT_LENGTHS))
    sampler = GroupSampler(model, config=config, stop_token_ids=[], max_context=LENGTH, trainer=trainer)
    prompts = [tuple(row[:length].tolist()) for row, length in zip(token_ids(), PROMPT_LENGTHS, strict=True)]
    generations = sampler.sample([SampleRequest(prompt, 0, GREEDY_TOKENS, 0.0) for prompt in prompts])
    for generation, expected in zip(generations, record(case)["greedy"], strict=True):
        assert list(generation.token_ids) == expected["tokens"]
        np.testing.assert_allclose(generation.logprobs, expected["logprobs"], rtol=0, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("case", cases(["mixtral", "qwen3_moe_dense"]))
def test_fused_experts_are_loaded(tiny, trainer, chat, tmp_path, case: str) -> None:
    expected = load_hf_policy(write_checkpoint(tmp_path / "split", case), chat, trainer, None)
    fused = weights(record(case)["tensors"])
    fuse(fused)
    tiny.assert_same_bits(
        load_hf_policy(write_checkpoint(tmp_path / "fused", case, fused), chat, trainer, None), expected
    )


def test_unused_tensors_are_rejected_at_loading(trainer, chat, tmp_path) -> None:
    folder = write_checkpoint(tmp_path, "qwen2")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(PolicyModelError, match=r"the model does not use .*q_proj.bias"):
        load_hf_policy(folder, chat, trainer, None)


@pytest.mark.medium
@pytest.mark.parametrize("case", cases(ARCHITECTURES))
def test_export_has_the_tensors_of_the_checkpoint(trainer, chat, tmp_path, case: str) -> None:
    source = write_checkpoint(tmp_path, case)
    save_hf_policy(load_hf_policy(source, chat, trainer, None), chat, tmp_path / "hf", trainer)
    expected = load_file(tmp_path / "model.safetensors")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    # GPT-2 checkpoints may have the prefix or not.
    expected = {name.removeprefix(f"{BASE_PREFIX}."): array for name, array in expected.items()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    check_same_function(read_hf_config(source), read_hf_architecture(str(tmp_path / "hf")), "the export differs")
    check_types(tmp_path / "hf")


def check_types(export: Path) -> None:
    """Load a config as transformers does, and compare the types of its numbers with those of the class's defaults."""
    found, written = AutoConfig.from_pretrained(export), json.loads((export / "config.json").read_text())
    for name, default in type(found)().to_dict().items():
        if type(default) in (int, float) and type(written.get(name)) in (int, float):
            assert type(written[name]) is type(default), name
            assert getattr(found, name) == written[name]


@pytest.mark.parametrize("scalar", [8.0, 8])
def test_an_integral_setting_is_exported_as_an_integer(trainer, chat, tmp_path, scalar: float) -> None:
    # An earlier version wrote the number with a decimal point.
    source = write_checkpoint(tmp_path, "gemma2", query_pre_attn_scalar=scalar)
    model = load_hf_policy(source, chat, trainer, None)
    save_hf_policy(model, chat, tmp_path / "hf", trainer)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (written["query_pre_attn_scalar"], type(written["query_pre_attn_scalar"])) == (8, int)
    assert (written["attn_logit_softcapping"], type(written["attn_logit_softcapping"])) == (2.0, float)
    check_types(tmp_path / "hf")


@pytest.mark.parametrize("case", ["qwen2_yarn", "gpt2"])
def test_loaded_model_round_trips_through_export(tiny, trainer, chat, tmp_path, case: str) -> None:
    model = load_hf_policy(write_checkpoint(tmp_path, case), chat, trainer, None)
    save_hf_policy(model, chat, tmp_path / "hf", trainer)
    loaded = load_hf_policy(str(tmp_path / "hf"), chat, trainer, None)
    assert loaded.config == model.config
    tiny.assert_same_bits(loaded, model)
