# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.config.reference_config import (
    CheckpointReferenceConfig,
    InitialReferenceConfig,
    ReferencesByEnvironmentConfig,
    ServerReferenceConfig,
)
from marin_rl.learner.critic import assemble
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.learner.scoring import prompt_scorer
from marin_rl.learner.starting_weights import first_policy
from marin_rl.objectives import DistillationConfig, ExactKlConfig, TisConfig
from marin_rl.objectives.kl import NoKlConfig
from marin_rl.parts.rl import RunParts
from marin_rl.sessions.replay import FakeShape, make_groups
from marin_rl.training.batch_builder import BatchBuilder, StepToScore
from marin_rl.training.loop import TrainingRun
from marin_rl.training.references import References
from marin_rl.types import RolloutGroup
from marin_rl.utils.errors import UserError
from marin_rl.utils.timing import PhaseTimer
from tests.serving.serving_cases import TOKENIZER, serving, tiny_sampler
from tests.tiny_run import PROBLEMS, TINY, TinyRun, interrupted_after, outcome
from tests.training.reopened_run import config_of, reopen

GROUPS = make_groups(FakeShape((3, 5), (1, 6), 1), 2, 4, 264, 0)
ROLLOUTS = [rollout for group in GROUPS for rollout in group.rollouts]
BATCH = batch_rollouts(ROLLOUTS, max_length=12)
HALF = np.arange(0, len(ROLLOUTS), 2)


def in_environment(name: str, groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Groups whose even rollouts are of another environment."""
    tasks = {index: dataclasses.replace(ROLLOUTS[index].task, environment=name) for index in HALF.tolist()}
    rollouts = [dataclasses.replace(one, task=tasks.get(index, one.task)) for index, one in enumerate(ROLLOUTS)]
    return [RolloutGroup(group.id, [r for r in rollouts if r.group_id == group.id]) for group in groups]


def scores(run: TrainingRun, groups: list[RolloutGroup] = GROUPS) -> np.ndarray:
    score = run.batch_builder.score_reference
    assert score is not None
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return score(StepToScore(BATCH, rollouts, run.trainer_state.model))


def distilled(run: TinyRun, reference: Any, **changes: Any) -> TrainingRun:
    """Reopen a run with a teacher."""
    settings = {"distillation": DistillationConfig(), **changes}
    return reopen(run, accept_changes=True, reference=reference, **settings)


def all_logprobs(model: LmHeadModel) -> np.ndarray:
    """Log-probs of all ids at each token, given the tokens before it, by levanter's own forward pass."""
    found = np.zeros((BATCH.input_ids.size, 264))
    for start, end in zip(BATCH.sequence_offsets, BATCH.sequence_offsets[1:], strict=False):
        ids = np.zeros(12, np.int32)
        ids[: end - start] = BATCH.input_ids[start:end]
        logits = model(hax.named(ids, "position"), attn_mask=AttentionMask.causal()).array
        found[start + 1 : end] = jax.nn.log_softmax(logits)[: end - start - 1]
    return found


def logprobs(model: LmHeadModel) -> np.ndarray:
    """Log-probs of the action tokens."""
    of_tokens = np.take_along_axis(all_logprobs(model), BATCH.input_ids[:, None], axis=1)[:, 0]
    return np.where(BATCH.loss_mask, of_tokens, 0)


@pytest.fixture(scope="module")
def teacher(finished_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LmHeadModel]:
    """A folder with a teacher of two layers and twice the width, and its weights."""
    config, folder = config_of(finished_run), tmp_path_factory.mktemp("teacher") / "hf"
    model = dataclasses.replace(config.model, num_layers=2, hidden_dim=32)
    parts = RunParts.start(dataclasses.replace(config, model=model))
    weights = first_policy(None, parts.model, parts.tokenizer, parts.trainer, seed=7)
    save_hf_policy(weights, parts.tokenizer, folder, parts.trainer)
    return folder, weights


@pytest.mark.medium
def test_a_teacher_equal_to_the_policy_gives_exactly_zero(finished_run: TinyRun):
    run = distilled(
        finished_run,
        CheckpointReferenceConfig(str(finished_run.path)),
        distillation=DistillationConfig(alone=True),
        off_policy_correction=TisConfig(),
    )
    batch = run.batch_builder.build(GROUPS, run.trainer_state.model, 7, PhaseTimer())
    assert batch.rollouts.importance_weights.any()
    assert not batch.rollouts.advantages.any()
    assert batch.metrics["distillation/teacher_kl"] == 0.0
    assert batch.metrics["advantage/zero_share"] == 1.0


@pytest.mark.medium
def test_a_teacher_of_another_size_scores_and_teaches_every_token(finished_run: TinyRun, teacher: Any):
    folder, weights = teacher
    added = distilled(finished_run, CheckpointReferenceConfig(str(folder)), distillation=DistillationConfig(0.5))
    expected = logprobs(weights)
    np.testing.assert_allclose(scores(added), expected, atol=1e-5)

    def with_config(**changes: Any) -> BatchBuilder:
        parts = added.batch_builder.parts
        changed = dataclasses.replace(parts, config=dataclasses.replace(parts.config, **changes))
        return dataclasses.replace(added.batch_builder, parts=changed)

    alone = with_config(distillation=DistillationConfig(0.5, alone=True))
    task = with_config(distillation=None, kl=NoKlConfig(watch=True))
    built = [
        builder.build(GROUPS, added.trainer_state.model, 7, PhaseTimer())
        for builder in (added.batch_builder, alone, task)
    ]
    advantages = [batch.rollouts.advantages for batch in built]
    own = -0.5 * (BATCH.policy_logprobs.astype(np.float64) - expected)
    np.testing.assert_allclose(advantages[1], own, atol=1e-5)
    np.testing.assert_allclose(advantages[0], advantages[2] + own, atol=1e-5)
    assert np.abs(advantages[2]).max() > 0.1
    # The wrong direction, and a version that is shifted by one token.
    assert np.abs(advantages[1] + own).max() > 0.1
    assert np.abs(advantages[1] - np.where(BATCH.loss_mask, np.roll(own, 1), 0)).max() > 0.1
    mean = -own[BATCH.loss_mask].mean() / 0.5
    assert built[0].metrics["distillation/teacher_kl"] == pytest.approx(mean, abs=1e-5)
    assert "distillation/teacher_kl" not in built[2].metrics
    # Stored rollouts have the advantages that are trained on.
    stored = [built[0].stored[id].advantages for id in BATCH.ids]
    np.testing.assert_array_equal(np.concatenate(stored), advantages[0][BATCH.loss_mask])


@pytest.mark.medium
def test_a_teacher_of_another_size_is_run_in_the_updates(finished_run: TinyRun, teacher: Any):
    folder, weights = teacher
    run = reopen(
        finished_run, accept_changes=True, reference=CheckpointReferenceConfig(str(folder)), kl=ExactKlConfig(0.5)
    )
    assert run.batch_builder.score_reference is None
    own, others = all_logprobs(run.trainer_state.model), all_logprobs(weights)
    expected = (np.exp(own) * (own - others)).sum(axis=-1)[BATCH.loss_mask].mean()
    [packed] = run.batch_builder.minibatches(BATCH, 7)
    _, metrics = run.learner.update(run.trainer_state, packed.microbatches)
    assert float(metrics["loss/ref_kl_avg"]) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.1
    # The policy could sample a token that the teacher cannot read.
    size = weights.vocab_size
    with pytest.raises(UserError, match=rf"vocabulary of {size + 1} tokens.*one of {size}; use one with"):
        References(RunParts(run.config, run.learner.trainer), lambda: run.trainer_state.model).open_learner(size + 1)


def two_environments(folder: Path) -> dict[str, Any]:
    """A mixture of the environments `ones` and `fake`."""
    parts = []
    for name, sign in (("ones", "x"), ("fake", "y")):
        problems = [problem | {"prompt": problem["prompt"].replace("x", sign)} for problem in PROBLEMS]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))
        own = TINY["environment"] | {"name": name, "path": str(folder / f"{name}.jsonl")}
        parts.append({"environment": own})
    return {"type": "mixture", "parts": parts}


@pytest.mark.medium
def test_each_environment_has_its_teacher(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], teacher: Any, tmp_path: Path
):
    references = {"ones": InitialReferenceConfig(), "fake": CheckpointReferenceConfig(str(teacher[0]))}
    mixture = config_of_file(new_run(environment=two_environments(tmp_path))).environment
    run = distilled(finished_run, ReferencesByEnvironmentConfig(references), environment=mixture)
    assert run.checkpoints.keep_first
    checkpoint = run.checkpoints.open(0)
    first = RunParts(run.config, run.learner.trainer).policy_spec(checkpoint.vocab_size).restore_policy(checkpoint)
    found = scores(run, in_environment("ones", GROUPS))
    of_initial = np.isin(np.arange(BATCH.input_ids.size), BATCH.tokens_of(HALF))
    np.testing.assert_allclose(found, np.where(of_initial, logprobs(first), logprobs(teacher[1])), atol=1e-5)
    missing = ReferencesByEnvironmentConfig({"fake": references["fake"]})
    with pytest.raises(UserError, match="no entry for the environment 'ones', only for 'fake'; add it"):
        distilled(finished_run, missing, environment=mixture)
    with pytest.raises(UserError, match=r"an entry for 'fake', but the training tasks are those of .* 'ones'; correct"):
        distilled(finished_run, ReferencesByEnvironmentConfig(references))


@pytest.mark.medium
def test_our_server_gives_the_log_probs_of_a_local_teacher(finished_run: TinyRun, teacher: Any):
    trainer = RunParts.start(config_of(finished_run)).trainer
    score = prompt_scorer(teacher[1], trainer, 12, TOKENIZER.pad_token_id)
    # A context of 12 tokens is enough for rollouts of at most 12 tokens.
    with serving(tiny_sampler(), score=score, context=12) as server:
        run = distilled(finished_run, ServerReferenceConfig(f"{server.url}/v1", "policy"))
        np.testing.assert_allclose(scores(run), logprobs(teacher[1]), atol=1e-5)


def other_vocabulary(folder: Path) -> None:
    """Exchange two tokens of the teacher's tokenizer."""
    path = folder / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocab = saved["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(saved))


def other_added_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|end|>", "<|ende|>"))


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def few_positions(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8}))


def damaged(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_vocabulary, r"differs from the policy's in 2 tokens: the first is id 97, 'a' of the policy and 'b' of"),
        (other_added_token, r"differs from the policy's in 1 tokens: .* '<\|end\|>' of the policy and '<\|ende\|>' of"),
        (no_tokenizer, r"^reference.path is .*, which has no tokenizer"),
        (few_positions, r"a model of 8 positions, but rollouts have up to rollouts.max_length = 12 tokens"),
        (damaged, r"model.safetensors"),
        (shutil.rmtree, r"reference.path is '.*', but there is no such folder"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    finished_run: TinyRun, teacher: Any, tmp_path: Path, change: Callable[[Path], None], message: str
):
    folder = tmp_path / "hf"
    shutil.copytree(teacher[0], folder)
    change(folder)
    with pytest.raises((UserError, ValueError), match=message):
        distilled(finished_run, CheckpointReferenceConfig(str(folder)))


@pytest.mark.parametrize(
    ("reference", "described"),
    [
        (lambda folder: {"type": "initial"}, "the policy at the start of RL, a second copy"),
        (lambda folder: {"type": "checkpoint", "path": str(folder)}, r"hf, 31,392 parameters in float32"),
        (lambda folder: {"type": "policy", "weights": "average"}, "an average of the weights, a second copy"),
        (
            lambda folder: {"type": "server", "base_url": "http://localhost:9", "model": "big"},
            "big on the server http://localhost:9",
        ),
    ],
)
def test_a_dry_run_describes_the_reference(
    new_run: Callable[..., TinyRun], teacher: Any, reference: Any, described: str, capsys: pytest.CaptureFixture[str]
):
    run = new_run(reference=reference(teacher[0]), distillation={})
    assert run.train("--dry_run") == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reference model")]
    assert line.endswith(described)


def test_a_dry_run_finds_a_wrong_reference(
    new_run: Callable[..., TinyRun], teacher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "hf"
    shutil.copytree(teacher[0], folder)
    other_vocabulary(folder)
    parts = {"twos": {"type": "initial"}}
    for reference, message in (
        ({"type": "checkpoint", "path": str(folder)}, "differs from the policy's in 2 tokens"),
        ({"type": "by_environment", "references": parts}, "no entry for the environment 'ones'"),
        ({"type": "policy", "context": {"demonstrations": 99, "max_tokens": 4}}, "a task needs those of others"),
        ({"type": "policy", "context": {"answer": True, "max_tokens": 4}}, "max_tokens allows 4; raise it"),
        ({"type": "policy", "context": {"answer": True, "max_tokens": 5}}, "model's context has 16 tokens"),
    ):
        run = new_run(reference=reference, distillation={})
        assert run.train("--dry_run") == 1
        assert message in capsys.readouterr().err


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["checkpoint", "initial"])
def test_a_reference_that_scores_and_teaches_is_loaded_once(
    finished_run: TinyRun, teacher: Any, kind: str, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[str] = []

    def count(target: str, name: str) -> None:
        load = getattr(importlib.import_module(target), name)
        monkeypatch.setattr(f"{target}.{name}", lambda *arguments: (loaded.append(name), load(*arguments))[1])

    count("marin_rl.training.references", "load_hf_policy")
    count("marin_rl.training.open_run", "_initial_policy")
    one = CheckpointReferenceConfig(str(teacher[0])) if kind == "checkpoint" else InitialReferenceConfig()
    run = distilled(finished_run, one, kl=ExactKlConfig(0.5))
    assert loaded == ["load_hf_policy" if kind == "checkpoint" else "_initial_policy"]
    assert run.batch_builder.score_reference is not None
    [packed] = run.batch_builder.minibatches(BATCH, 7)
    assert packed.microbatches[0].ref_kl_weights is not None


def test_an_unfinished_run_is_no_teacher(finished_run: TinyRun, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run.path, folder, ignore=lambda *_: ["hf"])
    with pytest.raises(ValueError, match=r"^reference.path: the run in .* has not finished"):
        distilled(finished_run, CheckpointReferenceConfig(str(folder)))


def test_a_changed_teacher_is_noticed_on_resume(new_run: Callable[..., TinyRun], teacher: Any, tmp_path: Path):
    """Also if only its weights differ."""
    from marin_rl.config.input_files import digest_inputs

    folder = tmp_path / "hf"
    shutil.copytree(teacher[0], folder)
    run = new_run()
    config = dataclasses.replace(
        config_of_file(run), reference=CheckpointReferenceConfig(str(folder)), distillation=DistillationConfig()
    )
    before = digest_inputs(config)["reference"]
    assert f"{folder}/model.safetensors" in before
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    after = digest_inputs(config)["reference"]
    assert {name for name in before if before[name] != after[name]} == {f"{folder}/model.safetensors"}


def config_of_file(run: TinyRun) -> Any:
    from marin_rl.config.command_line import parse_config
    from marin_rl.config.train_config import TrainConfig

    return parse_config(TrainConfig, run.argv).config


@pytest.mark.medium
def test_the_average_of_the_weights_teaches_and_resumes_bit_for_bit(new_run: Callable[..., TinyRun], tmp_path: Path):
    run = new_run(
        reference={"type": "policy", "weights": "average", "decay": 0.75},
        distillation={"coefficient": 0.5},
        num_steps=4,
        warm_start__max_steps=0,
        evaluation__tasks=0,
        checkpoint={"every": 1, "keep_every": 1},
    )
    assert run.train() == 0
    opened = reopen(run)
    parts = RunParts(opened.config, opened.learner.trainer)
    states = [
        parts.policy_spec(saved.vocab_size).restore_state(saved, opened.learner)
        for saved in map(opened.checkpoints.open, range(5))
    ]
    weights = [[np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(state.model)] for state in states]
    average = weights[0]
    for state, newest in zip(states[1:], weights[1:], strict=True):
        average = [0.75 * former + 0.25 * new for former, new in zip(average, newest, strict=True)]
        for found, expected in zip(jax.tree.leaves(state.model_averaging.model_params), average, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(average, weights[-1], strict=True)) > 1e-4
    # At the first step both are equal; log-probs of sampler and learner differ by rounding.
    kl = [record["distillation/teacher_kl"] for record in run.records()[1:]]
    assert abs(kl[0]) < 1e-5 < abs(kl[3])
    expected, resumed = outcome(run), interrupted_after(run, 2, tmp_path / "resumed")
    assert resumed.train() == 0
    found = outcome(resumed)
    assert found["state"] == expected["state"]
    assert found["records"] == expected["records"]


@pytest.mark.medium
def test_an_adapter_learns_from_its_average_and_from_a_whole_teacher(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], teacher: Any, tmp_path: Path
):
    parts = {"ones": {"type": "policy", "weights": "average"}, "fake": {"type": "checkpoint", "path": str(teacher[0])}}
    run = new_run(
        environment=two_environments(tmp_path),
        initialize_from=str(finished_run.path),
        lora={"rank": 2},
        reference={"type": "by_environment", "references": parts},
        distillation={},
        optimizer__learning_rate=0.1,
        num_steps=2,
        warm_start__max_steps=0,
        evaluation__tasks=0,
    )
    assert run.train() == 0
    opened = reopen(run)
    state, groups = opened.trainer_state, in_environment("ones", GROUPS)
    assert state.model_averaging is not None
    average = eqx.combine(state.model_averaging.model_params, state.model)
    score, rollouts = opened.batch_builder.score_reference, [one for group in groups for one in group.rollouts]
    assert score is not None
    of_average = np.isin(np.arange(BATCH.input_ids.size), BATCH.tokens_of(HALF))
    expected = np.where(of_average, logprobs(assemble(average, opened.base)), logprobs(teacher[1]))
    np.testing.assert_allclose(score(StepToScore(BATCH, rollouts, state.model, average)), expected, atol=1e-5)
    live = logprobs(assemble(state.model, opened.base))
    assert np.abs(live - expected)[of_average].max() > 1e-3
