# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
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

from marin_rl.batching.rl_example import pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, make_batch
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig, TrainerConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.learner.critic import CriticConfig, with_critic
from marin_rl.learner.loss import first_log_ratios
from marin_rl.learner.policy_model import read_hf_architecture
from marin_rl.learner.scoring import Scorer
from marin_rl.learner.train_step import Learner
from marin_rl.models.hf_config import PolicyModelError
from marin_rl.models.hf_tensors import read_tensor_shapes
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.run_parts import RunParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.training.starting_weights import (
    check_weight_files,
    first_policy,
    hf_folder,
    resolve_model,
)
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.hub import HubError
from marin_rl.utils.levanter_line import max_positions, seq_len
from marin_rl.utils.remote_path import RemotePath
from tests.models.hf_checkpoint import record, write_checkpoint, write_config
from tests.tiny_run import TinyRun
from tests.training.reopened_run import config_of


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


def test_hf_checkpoint_with_config_yaml_is_not_a_run(tmp_path: Path) -> None:
    folder = write_config(tmp_path, record("llama")["config"])
    (tmp_path / "config.yaml").write_text("optimizer: adamw\n")
    assert hf_folder(folder) == folder


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
@pytest.mark.parametrize("case", ["gpt2", pytest.param("mixtral", marks=pytest.mark.slow), "qwen2_yarn"])
# Levanter's mixture of experts calls a function that haliax has renamed.
@pytest.mark.filterwarnings("ignore:`_get_mesh` is deprecated:DeprecationWarning")
def test_checkpoint_is_sampled_trained_and_exported(new_run: Callable[..., TinyRun], tmp_path: Path, case: str):
    checkpoint = write_checkpoint(tmp_path / "start", case)
    start = {"model": None, "initialize_from": checkpoint, "tokenizer": {"path": "bytes"}}
    run = new_run(**start, num_steps=1, warm_start__max_steps=0, evaluation__every=0)
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
    _, measured = learner.step(state, batch.microbatches)
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


def test_long_rows_score_like_short_rows(plain_scores):
    for found, expected in zip(score(long_run(1100)), plain_scores, strict=True):
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.medium
def test_all_policies_of_a_run_use_same_attention_blocks(finished_run: TinyRun):
    """Covers random weights, weights of a folder, and weights of a checkpoint (as in evaluation and reference)."""
    config = config_of(finished_run)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attn_backend=None, **seq_len(2048)),
        rollouts=dataclasses.replace(config.rollouts, max_length=1100),
    )
    trainer = start_devices(config.trainer, rows_per_device=1)
    parts = RunParts(config, trainer)
    tokenizer = parts.tokenizer
    checkpoint = Checkpoints(finished_run.checkpoints, config.checkpoint).newest_good()
    assert checkpoint is not None
    policies = [
        first_policy(None, parts.model, tokenizer, trainer, config.seed),
        first_policy(str(finished_run.path), parts.model, tokenizer, trainer, config.seed),
        parts.saved_spec(checkpoint).restore_policy(checkpoint),
    ]
    assert [policy.config.flash_attention_block_size for policy in policies] == [640] * 3
