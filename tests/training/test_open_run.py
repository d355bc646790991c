# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import types
from pathlib import Path

import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest

from marin_rl.config.sections import EvaluationConfig, Mode, WarmStartConfig
from marin_rl.objectives.kl import LossKlConfig, RewardKlConfig
from marin_rl.parts.rl import RunParts
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.runs import saved_checkpoint
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.training import open_run
from tests.tiny_run import TinyRun, contents, copy_of
from tests.training.bare_run import local_rollouts
from tests.training.reopened_run import reopen


def test_run_resumes_from_newest_checkpoint(finished_run: TinyRun):
    messages: list[str] = []
    files = contents(finished_run.path)
    opened = reopen(finished_run, messages.append)
    assert messages == [f"resuming after step 6, from {finished_run.checkpoint(6)}"]
    saved = json.loads((finished_run.checkpoint(6) / "manifest.json").read_text())["progress"]
    assert dataclasses.asdict(opened.state.progress) == saved
    assert list(opened.state.progress.evaluations) == ["before warm start", "before RL", "after RL"]
    assert int(opened.trainer_state.step) == 6
    assert opened.batch_builder.score_reference is None
    assert contents(finished_run.path) == files


def test_progress_of_another_version_is_rejected(finished_run: TinyRun, tmp_path: Path):
    run = copy_of(finished_run, tmp_path / "copy")
    path = run.checkpoint(6) / "manifest.json"
    manifest = saved_checkpoint.load_manifest(path.read_text())
    manifest["progress"]["lessons"] = 3
    path.write_text(saved_checkpoint.dump_manifest(manifest))
    with pytest.raises(CheckpointError, match=r"progress in checkpoint .*step-00000006 .*'lessons'; resume with the"):
        reopen(run, lambda message: None)


@pytest.mark.parametrize("kl", [LossKlConfig(beta=0.0), RewardKlConfig(beta=0.0)])
def test_reference_is_not_loaded_without_penalty(
    finished_run: TinyRun, kl: LossKlConfig | RewardKlConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("marin_rl.learner.policy_spec.PolicySpec.restore_policy", None)  # calling it would raise
    opened = reopen(finished_run, kl=kl)
    assert opened.batch_builder.score_reference is None
    assert not opened.checkpoints.keep_first


def test_reference_is_policy_before_rl(finished_run: TinyRun):
    opened = reopen(finished_run, kl=LossKlConfig(beta=0.1))
    assert opened.checkpoints.keep_first
    checkpoint = opened.checkpoints.open(0)
    first = (
        RunParts(opened.config, opened.learner.trainer).policy_spec(checkpoint.vocab_size).restore_policy(checkpoint)
    )
    score_reference = opened.batch_builder.score_reference
    assert isinstance(score_reference, types.MethodType)
    teacher = score_reference.__self__.model
    reference, before, now = map(jax.tree.leaves, (teacher, first, opened.trainer_state.model))
    assert all(np.array_equal(a, b) for a, b in zip(reference, before, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(reference, now, strict=True))


@pytest.mark.parametrize(("tasks", "opened"), [(0, 0), (2, 1)])
def test_trainer_opens_reward_functions_only_if_it_runs_episodes(
    finished_run: TinyRun, monkeypatch: pytest.MonkeyPatch, tasks: int, opened: int
) -> None:
    calls: list[object] = []

    def build(config: SandboxConfig) -> Sandbox:
        calls.append(config)
        return Sandbox(config)

    monkeypatch.setattr(SandboxConfig, "build", build)
    monkeypatch.setattr(
        open_run, "_open_rollout_source", lambda parts, inputs, runner, *_: local_rollouts(parts.config, runner)
    )
    run = reopen(
        finished_run,
        mode=Mode.ASYNC,
        evaluation=EvaluationConfig(tasks=tasks),
        warm_start=WarmStartConfig(max_steps=0),
        sandbox=SandboxConfig(workers=3),
    )
    run.close()
    assert calls.count(SandboxConfig(workers=3)) == opened
