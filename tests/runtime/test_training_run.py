# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
from pathlib import Path

import jax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest

from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives.advantages import GaeConfig
from marin_rl.objectives.kl import LossKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.rollouts.orders import OrderNumber
from marin_rl.rollouts.replay_buffer import ReplayBuffer
from marin_rl.rollouts.store import RolloutStore, RolloutStoreConfig
from marin_rl.runtime import training_run
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.config_parsing import from_yaml
from marin_rl.runtime.run_directory import RunDirectoryError
from marin_rl.runtime.training_run import (
    Progress,
    TrainingRun,
    describe_accuracy,
    forget_older,
    hf_folder,
    make_loss,
    open_run,
    resolve_model,
    restore_policy,
)
from marin_rl.sampling.config import SamplingConfig
from marin_rl.types import RolloutGroup
from tests.rollouts.rollout_cases import group_of, piece
from tests.runtime.bare_run import bare_run, make_config
from tests.tiny_run import TinyRun, contents, copy_of


def config_of(run: TinyRun) -> TrainConfig:
    path = run.path / "config.yaml"
    return from_yaml(TrainConfig, path.read_text(), str(path))


def reopen(run: TinyRun, said: list[str], **changes) -> TrainingRun:
    return open_run(dataclasses.replace(config_of(run), **changes), run.path, said.append)


def test_a_run_is_taken_up_where_it_stopped(finished_run: TinyRun):
    said: list[str] = []
    files = contents(finished_run.path)
    opened = reopen(finished_run, said)
    assert said == [f"resuming after step 6, from {finished_run.checkpoint(6)}"]
    saved = json.loads((finished_run.checkpoint(6) / "manifest.json").read_text())["progress"]
    assert dataclasses.asdict(opened.progress) == saved
    assert list(opened.progress.evaluations) == ["before warm start", "before RL", "after RL"]
    assert int(opened.state.step) == 6
    assert opened.reference is None
    assert contents(finished_run.path) == files


def test_what_was_sampled_with_weights_that_are_gone_is_sampled_anew_where_they_are_needed():
    run = bare_run(make_config(), progress=Progress(step=3))
    run.replay = ReplayBuffer(max_staleness=2)
    for index, version in enumerate((3, 2, 1)):
        group = group_of(f"train-4-{index}", 1.0, 0.0)
        rollouts = []
        for rollout in group.rollouts:
            sampled = dataclasses.replace(rollout.turns[0].generation, first_version=version, last_version=version)
            task = dataclasses.replace(rollout.task, id=f"task-{index}")
            rollouts.append(
                dataclasses.replace(
                    rollout, task=task, turns=(dataclasses.replace(rollout.turns[0], generation=sampled),)
                )
            )
        run.replay.add(OrderNumber(4, index), RolloutGroup(group.id, rollouts))
    said: list[str] = []
    forget_older(run, said.append)
    assert said == ["2 waiting groups were sampled with older weights than those kept; they are sampled anew"]
    assert run.replay.ages(3) == [0]
    assert [task["id"] for task in run.orders.state["again"]] == ["task-1", "task-2"]


def test_rollouts_that_cannot_be_written_stop_the_run_before_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    # Of the run there is the store alone: a save that went further would fail otherwise.
    run = object.__new__(TrainingRun)
    run.store = RolloutStore(tmp_path, RolloutStoreConfig(), piece)
    monkeypatch.setattr("os.fsync", full)
    run.store_rollouts(1, [group_of("g", 1.0)], {})
    with pytest.raises(RunDirectoryError, match=r"the disk is full; free some space and rerun the same command"):
        run.save()
    run.store.close()


def test_what_is_saved_is_what_is_read_again(finished_run: TinyRun, tmp_path: Path):
    copied = copy_of(finished_run, tmp_path / "copy")
    first = reopen(copied, [])
    first.progress.step = 7
    first.save()
    second = reopen(copied, [])
    assert second.progress == first.progress
    one, other = jax.tree.leaves(first.state), jax.tree.leaves(second.state)
    assert len(one) == len(other)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_damaged_checkpoints_are_told_of(finished_run: TinyRun, tmp_path: Path):
    copied = copy_of(finished_run, tmp_path / "copy")
    (copied.checkpoint(6) / "manifest.json").write_text("{")
    said: list[str] = []
    assert reopen(copied, said).progress.step == 5
    assert said[0] == "the checkpoint of step 6 is damaged and passed over; log.txt says what is wrong with it"
    assert said[1].startswith("resuming after step 5")


@pytest.mark.parametrize("kl", [LossKlConfig(beta=0.0), RewardKlConfig(beta=0.0)])
def test_without_a_penalty_there_is_no_reference(
    finished_run: TinyRun, kl: LossKlConfig | RewardKlConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training_run, "restore_policy", None)  # calling it would raise
    opened = reopen(finished_run, [], kl=kl)
    assert opened.reference is None
    assert not opened.checkpoints.keep_first


def test_with_a_penalty_the_reference_is_the_policy_before_rl(finished_run: TinyRun):
    opened = reopen(finished_run, [], kl=LossKlConfig(beta=0.1))
    assert opened.checkpoints.keep_first
    first = restore_policy(opened.checkpoints.open(0), opened.config, opened.trainer)
    assert opened.reference is not None
    reference, before, now = map(jax.tree.leaves, (opened.reference, first, opened.state.model))
    assert all(np.array_equal(a, b) for a, b in zip(reference, before, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(reference, now, strict=True))


def test_another_architecture_does_not_fit_the_checkpoint(finished_run: TinyRun):
    from marin_rl.learner.checkpoint import CheckpointError

    model = config_of(finished_run).model
    assert model is not None
    with pytest.raises(CheckpointError, match="does not fit the configured model and optimizer"):
        reopen(finished_run, [], model=dataclasses.replace(model, intermediate_dim=48))


def test_the_loss_is_the_configured_one(finished_run: TinyRun):
    config = dataclasses.replace(
        config_of(finished_run),
        policy_loss=PpoClipLossConfig(clip_high=0.28),
        kl=LossKlConfig(beta=0.5),
        advantage=GaeConfig(),
        critic=CriticConfig(coefficient=0.25),
        sampling=SamplingConfig(temperature=0.7),
        logprob_block_size=5,
    )
    loss = make_loss(config)
    assert (loss.policy_loss, loss.kl, loss.critic) == (config.policy_loss, config.kl, config.critic)
    assert (loss.temperature, loss.block_size) == (0.7, 5)


def test_the_architecture_is_read_where_it_is_left_out(finished_run: TinyRun):
    config = config_of(finished_run)
    assert resolve_model(config) is config
    for source in (finished_run.path, finished_run.path / "hf"):
        left_out = dataclasses.replace(config, model=None, initialize_from=str(source))
        model = resolve_model(left_out).model
        assert model is not None
        assert (model.Pos.size, model.Embed.size) == (16, 16)


def test_where_weights_lie(finished_run: TinyRun, tmp_path: Path):
    assert hf_folder("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert hf_folder(str(finished_run.path)) == str(finished_run.path / "hf")
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match=r"initialize_from: the run in .* has not finished"):
        hf_folder(str(tmp_path))


def test_progress_is_json(finished_run: TinyRun):
    progress = Progress(
        step=3,
        updates=6,
        tasks_drawn=12,
        task_stream={"drawn": 12, "parts": {"ones": {"drawn": 12}}},
        episodes=48,
        sampled_tokens=100,
        trained_tokens=90,
        vocab_size=264,
        evaluations={"before RL": {"eval/ones/accuracy_sampled": 0.5}},
    )
    assert Progress(**json.loads(json.dumps(dataclasses.asdict(progress)))) == progress


def test_accuracy_in_words():
    evaluation = {"eval/a/accuracy_sampled": 0.25, "eval/a/pass@1": 0.25, "eval/a/accuracy_greedy": 0.5}
    assert describe_accuracy(evaluation) == "held-out a/accuracy_sampled 0.250, a/accuracy_greedy 0.500"
