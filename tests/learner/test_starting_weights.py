# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.layers.attention import AttentionBackend
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmHeadModel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from marin_rl.batching.rl_example import pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, make_batch
from marin_rl.config.input_files import digest_inputs
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.learner.critic import CriticConfig, with_critic
from marin_rl.learner.loss import first_log_ratios
from marin_rl.learner.policy_model import read_hf_architecture
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.starting_weights import check_weight_files, hf_folder
from marin_rl.learner.train_step import Learner
from marin_rl.models.hf_config import PolicyModelError
from marin_rl.models.hf_tensors import read_tensor_shapes
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.parts.rl import RunParts
from marin_rl.sessions.earlier_run import resolve_model
from marin_rl.tokenization.load import BYTES, TokenizerConfig, TokenizerLoadError, byte_tokenizer
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.hub import HubError
from marin_rl.utils.levanter_line import max_positions, seq_len
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import storage_path
from tests.models.hf_checkpoint import cases, record, write_checkpoint, write_config
from tests.tiny_run import TinyRun, copy_of
from tests.training.reopened_run import config_of


@pytest.mark.medium
def test_missing_model_section_is_read_from_weights(finished_run: TinyRun):
    config = config_of(finished_run)
    assert resolve_model(config) is config
    for source in (finished_run.path, finished_run.path / "hf"):
        left_out = dataclasses.replace(config, model=None, initialize_from=str(source))
        model = resolve_model(left_out).model
        assert model is not None
        assert (max_positions(model), model.Embed.size) == (16, 16)


def test_a_run_resumes_without_its_starting_weights(finished_run: TinyRun, tmp_path: Path):
    config = config_of(finished_run)
    left_out = dataclasses.replace(config, model=None, initialize_from=str(tmp_path / "deleted"))
    assert resolve_model(left_out).model == config.model
    with pytest.raises(HubError, match=r"initialize_from is '.*deleted', but there is no such folder"):
        resolve_model(dataclasses.replace(left_out, run_dir=str(tmp_path / "new run")))


def test_weights_on_the_hub_are_checked_without_the_run_directory(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: RemotePath, pattern: str) -> Iterator[RemotePath]:
        raise PermissionError(f"no credentials for {path}")

    monkeypatch.setattr(RemotePath, "glob", refuse)
    check_weight_files("Qwen/Qwen3-0.6B", "memory://bucket/run", None)
    with pytest.raises(PermissionError):
        check_weight_files(".", "memory://bucket/run", None)


def test_hf_folder(finished_run: TinyRun, tmp_path: Path):
    assert hf_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert hf_folder(str(finished_run.path)) == str(finished_run.path / "hf")
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"initialize_from: the run in .* has not finished"):
        hf_folder(str(tmp_path))


def test_model_section_must_match_weights(tmp_path: Path):
    checkpoint = write_config(tmp_path / "hf", record("llama")["config"])
    model = LlamaConfig(
        **seq_len(64),
        hidden_dim=32,
        intermediate_dim=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        layer_norm_epsilon=1e-6,
    )
    config = dataclasses.replace(
        long_run(64, model=model),
        initialize_from=checkpoint,
        run_dir=str(tmp_path / "run"),
        tokenizer=TokenizerConfig("bytes"),
    )
    with pytest.raises(PolicyModelError, match=r"leave model out .* model\): rope_theta: 500000.0, 10000"):
        resolve_model(config)
    rope = DefaultRotaryEmbeddingsConfig(theta=500000.0)
    same = dataclasses.replace(config, model=dataclasses.replace(model, rope=rope))
    assert resolve_model(same) == same
    # A run that was already started does not read them again.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert resolve_model(config) == config


@pytest.mark.medium
@pytest.mark.parametrize("case", cases(["gpt2", "mixtral", "qwen2_yarn", "qwen3_moe_dense"]))
def test_checkpoint_is_sampled_trained_and_exported(new_run: Callable[..., TinyRun], tmp_path: Path, case: str):
    checkpoint = write_checkpoint(tmp_path / "start", case)
    start = {"model": None, "initialize_from": checkpoint, "tokenizer": {"path": "bytes"}}
    # Of random tokens, about every second reply has a letter; a step of equal rewards would not update the weights.
    reward = {"regex": "(?s).*[a-zA-Z].*", "weight": 0.25}
    run = new_run(**start, num_steps=1, warm_start__max_steps=0, evaluation__every=0, environment__format=reward)
    assert run.train() == 0
    measured = [step for step in run.records() if "mismatch/logprob_difference_max" in step]
    assert measured
    assert measured[0]["mismatch/logprob_difference_max"] < 1e-5
    exported = str(run.path / "hf")
    assert read_hf_architecture(exported) == read_hf_architecture(checkpoint)
    before, after = read_tensor_shapes(checkpoint), read_tensor_shapes(exported)
    assert before == after
    assert (run.path / "hf" / "model.safetensors").read_bytes() != Path(checkpoint, "model.safetensors").read_bytes()


# Rows longer than an attention kernel's block.

LONG = LlamaConfig(
    **seq_len(4096),
    hidden_dim=16,
    intermediate_dim=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    initializer_range=0.5,
    gradient_checkpointing=False,
)


def long_run(max_length: int, *, packing: bool = True, model: LlamaConfig = LONG) -> TrainConfig:
    return TrainConfig(
        environment=ArithmeticConfig(),
        run_dir="runs/test",
        model=model,
        rollouts=RolloutConfig(prompts_per_step=1, group_size=2, max_length=max_length, packing=packing),
        policy_loss=PpoClipLossConfig(),
        trainer=dataclasses.replace(TrainerConfig(), id="test", per_device_parallelism=2),
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly() -> Iterator[None]:
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def long_rollouts() -> RolloutBatch:
    """Rollouts of 1,100, 900 and 200 tokens; the last 16 of each are sampled."""
    lengths = (1100, 900, 200)
    tokens = [np.random.default_rng(length).integers(0, 256, length) for length in lengths]
    return make_batch(
        [str(length) for length in lengths],
        [[length] for length in lengths],
        input_ids=np.concatenate(tokens).astype(np.int32),
        turn_ids=np.concatenate([np.repeat([-1, 0], [length - 16, 16]) for length in lengths]).astype(np.int32),
    )


def long_model(config: TrainConfig, trainer: TrainerConfig) -> LmHeadModel:
    """The model of a run of this config, filled by numpy to avoid compiling its initializers."""
    rng = np.random.default_rng(0)
    shape = RunParts(config, trainer).policy_spec(264).policy
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.5, size=leaf.shape), leaf.dtype), shape)


def score(config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the sampled tokens, and values of a critic with a separate trunk."""
    trainer = start_devices(config.trainer, rows_per_device=1)
    model = with_critic(CriticConfig(shared_trunk=False), long_model(config, trainer))
    model = dataclasses.replace(model, value_weight=model.value_weight + 1)
    scorer = Scorer(trainer, RunParts(config, trainer).layout, pad_token_id=0, temperature=1.0, block_size=16)
    scores = scorer.score(model, batch := long_rollouts())
    return np.stack(batch.actions(scores.logprobs)), np.stack(batch.actions(scores.values))


def train_one_step(config: TrainConfig, policy_logprobs: np.ndarray) -> dict[str, float]:
    """Run a training step on the rollouts, and return the largest log-prob difference and the gradient norm."""
    trainer = start_devices(config.trainer, rows_per_device=1)
    rollouts = long_rollouts()
    rollouts = dataclasses.replace(
        rollouts,
        policy_logprobs=rollouts.from_actions("policy_logprobs", list(policy_logprobs)).astype(np.float32),
        advantages=rollouts.from_actions("advantages", [np.linspace(-1, 1, 16)] * 3),
    )
    batch = pack_batch(rollouts, config.aggregation, RunParts(config, trainer).layout, pad_token_id=0)
    learner = Learner(trainer, config.optimizer, RunParts(config, trainer).loss, num_updates=1)
    state = learner.initial_state(long_model(config, trainer), jax.random.PRNGKey(0))
    _, measured = learner.update(state, batch.microbatches)
    ratios = first_log_ratios([measured])
    return {"logprob_difference_max": float(ratios.maximum), "grad_norm": float(measured["grad_norm"])}


@pytest.fixture(scope="module")
def plain() -> TrainConfig:
    """One rollout per row, with plain attention."""
    return long_run(1100, packing=False, model=dataclasses.replace(LONG, attn_backend=AttentionBackend.VANILLA))


@pytest.fixture(scope="module")
def plain_scores(plain: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    return score(plain)


@pytest.fixture(scope="module")
def plain_step(plain: TrainConfig, plain_scores) -> dict[str, float]:
    return train_one_step(plain, plain_scores[0])


@pytest.mark.medium
@pytest.mark.parametrize("max_length", [1100, 1536, 2560])
def test_long_rows_train_like_short_rows(max_length: int, plain_scores, plain_step):
    found = train_one_step(long_run(max_length), plain_scores[0])
    assert found["logprob_difference_max"] < 2e-5
    np.testing.assert_allclose(found["grad_norm"], plain_step["grad_norm"], rtol=1e-5)


@pytest.mark.medium
def test_long_rows_score_like_short_rows(plain_scores):
    for found, expected in zip(score(long_run(1100)), plain_scores, strict=True):
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(found, expected, atol=2e-5)


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
        environment=ArithmeticConfig(),
        run_dir=str(folder / "run"),
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
    config = TrainConfig(
        environment=ArithmeticConfig(),
        run_dir="memory://bucket/run",
        model=LlamaConfig(),
        initialize_from="org/name",
    )
    monkeypatch.setattr("marin_rl.sessions.earlier_run.read_hf_architecture", lambda name, model: model)
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
    monkeypatch.setattr("marin_rl.learner.starting_weights.read_tensor_shapes", lambda folder: {})
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
