# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Replays of steps; those of other objectives are in `test_resume_objectives`, of async runs in `test_async`."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_rl.learner.critic import CriticConfig
from marin_rl.objectives.gae import GaeConfig
from marin_rl.objectives.kl import LossKlConfig, RewardKlConfig
from marin_rl.objectives.policy_loss import PpoClipLossConfig
from marin_rl.runs.lock import lock
from marin_rl.runs.rollout_store import as_parquet, read_file
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.sessions.replay import FakeShape, ReplayError, make_groups, parse_shape, replay_step, train_on_fake
from marin_rl.utils.errors import USER_ERRORS
from tests.tiny_run import TinyRun, contents, copy_of, without_timings
from tests.training.reopened_run import config_of


def test_replayed_step_equals_the_run(finished_run: TinyRun):
    before = contents(finished_run.path)
    replayed = replay_step(RunDirectory(finished_run.path), config_of(finished_run), 4)
    assert (replayed.start, replayed.weight_difference) == (3, 0.0)
    found = without_timings(replayed.metrics)
    assert found == without_timings(replayed.recorded)
    assert {"loss/policy_avg", "grad_norm", "lr", "advantage/std", "objective/rlhf_reward"} <= set(found)
    assert set(replayed.metrics) - set(found) == {
        "tokens/trained_per_second",
        *(f"seconds/{phase}" for phase in ("batch", "reference", "step", "total")),
    }
    assert contents(finished_run.path) == before


@pytest.mark.medium
def test_steps_since_the_checkpoint_are_repeated(finished_run: TinyRun, tmp_path: Path):
    run = copy_of(finished_run, tmp_path)
    for step in (3, 4):
        shutil.rmtree(run.checkpoint(step))
    config = config_of(run)
    replayed = replay_step(RunDirectory(run.path), config, 5)
    assert (replayed.start, replayed.weight_difference) == (2, 0.0)
    assert without_timings(replayed.metrics) == without_timings(replayed.recorded)
    # The last step is also repeated if neither its record nor its checkpoint exists.
    shutil.rmtree(run.checkpoint(6))
    (run.path / "metrics.jsonl").unlink()
    replayed = replay_step(RunDirectory(run.path), config, 6)
    assert (replayed.start, replayed.recorded, replayed.weight_difference) == (5, {}, None)


@pytest.mark.medium
def test_steps_without_groups_need_no_file(finished_run: TinyRun, tmp_path: Path):
    run = copy_of(finished_run, tmp_path)
    # A step whose groups an earlier step has dropped.
    (run.path / "rollouts" / "step-00000004.parquet").unlink()
    shutil.rmtree(run.checkpoint(4))
    lines = [
        json.dumps({**record, "filter/kept_groups": 0} if record["step"] == 4 else record) for record in run.records()
    ]
    (run.path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = config_of(run)
    skipped = replay_step(RunDirectory(run.path), config, 4)
    assert (skipped.start, skipped.metrics["batch/microbatches"], skipped.weight_difference) == (3, 0.0, None)
    following = replay_step(RunDirectory(run.path), config, 5)
    assert following.start == 3
    # The first of the two updates is missing.
    assert following.weight_difference is not None
    assert following.weight_difference > 0


@pytest.mark.medium
def test_another_objective_can_be_tried(finished_run: TinyRun, tmp_path: Path):
    run = copy_of(finished_run, tmp_path)
    config = dataclasses.replace(config_of(run), policy_loss=PpoClipLossConfig(), kl=RewardKlConfig(beta=0.5))
    replayed = replay_step(RunDirectory(run.path), config, 2)
    assert replayed.start == 1
    assert replayed.weight_difference is not None
    assert replayed.weight_difference > 0
    # The reference is the checkpoint of step 0.
    assert replayed.metrics["objective/kl"] != 0
    shutil.rmtree(run.checkpoint(0))
    with pytest.raises(ReplayError, match="stored no reference_logprobs and kept no checkpoint of step 0"):
        replay_step(RunDirectory(run.path), config, 2)
    shutil.rmtree(run.checkpoint(3))
    with pytest.raises(ReplayError, match=r"only from the checkpoint of step 3(?s:.*)\[1, 2, 4, 5, 6\](?s:.*)kl.type"):
        replay_step(RunDirectory(run.path), config, 4)


def remove(*names: str) -> Callable[[TinyRun], None]:
    def change(run: TinyRun) -> None:
        for name in names:
            path = run.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def store_less(run: TinyRun) -> None:
    """Replace the rollouts of step 4 by some of them."""
    path = run.path / "rollouts" / "step-00000004.parquet"
    table = read_file(path)
    assert table is not None
    path.write_bytes(as_parquet(table.slice(0, 12)))


CHECKPOINTS = [f"checkpoints/step-{step:08d}" for step in range(7)]


@pytest.mark.parametrize(
    ("step", "change", "problem"),
    [
        (0, remove(), "has no step 0; its steps are 1 to 6"),
        (7, remove(), "has no step 7; its steps are 1 to 6"),
        (1, remove("rollouts", "metrics.jsonl", *CHECKPOINTS[1:]), "has no step 1; it has done none"),
        (2, remove(*CHECKPOINTS[:2]), r"needs a checkpoint of an earlier step, but .* only those of \[2, 3, 4, 5, 6\]"),
        (3, remove(*CHECKPOINTS), r"needs a checkpoint of an earlier step, but .* only those of \[\]"),
        (1, remove(*(f"rollouts/step-0000000{step}.parquet" for step in (1, 2))), "only those of steps 3 to 6"),
        (3, remove("rollouts"), "step 3 is replayed from .* step 2, which needs .* step 3, .* only those of no step"),
        (4, store_less, r"has only a part of the rollouts of step 4, but"),
        (4, lambda run: (run.checkpoint(3) / "manifest.json").unlink(), "step-00000003 .* no readable manifest"),
        (4, lambda run: (run.path / "rollouts/step-00000004.parquet").write_bytes(b"x"), "not a readable rollout file"),
    ],
)
def test_what_is_missing_is_named(
    finished_run: TinyRun, tmp_path: Path, step: int, change: Callable[[TinyRun], None], problem: str
):
    run = copy_of(finished_run, tmp_path)
    change(run)
    with pytest.raises(USER_ERRORS, match=problem):
        replay_step(RunDirectory(run.path), config_of(run), step)


def test_a_run_that_is_still_going_is_refused(finished_run: TinyRun, tmp_path: Path):
    directory, config = RunDirectory(copy_of(finished_run, tmp_path).path), config_of(finished_run)
    with lock(directory), pytest.raises(ReplayError, match=r"is still going \(process \d+ on .*\), .* replay a copy"):
        replay_step(directory, config, 4)


# Synthetic rollouts.


def test_shapes_are_parsed():
    assert parse_shape("prompt=8,completion=2-16", 64) == FakeShape((8, 8), (2, 16), 4)
    assert parse_shape("steps=6,prompt=1-3,completion=5", 8) == FakeShape((1, 3), (5, 5), 6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "must have the form prompt=32") for text in ("", "prompt=8", "prompt=8,completion=8,length=3")),
        *((text, "must have the form") for text in ("prompt=8,prompt=9,completion=8", "prompt=8,completion=-8")),
        *((f"prompt={text},completion=8", "at least 1, ranges in order") for text in ("0", "9-8")),
        ("prompt=8,completion=8,steps=2-3", "steps one number"),
        ("prompt=33,completion=8-32", "rollouts of 65 tokens exceed rollouts.max_length, 64; add --rollouts.max_len"),
    ],
)
def test_invalid_shapes_are_named(text: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        parse_shape(text, 64)


def test_groups_have_the_given_sizes():
    groups = make_groups(FakeShape((4, 6), (1, 9), 1), 3, 2, 50, 0)
    assert [len(group.rollouts) for group in groups] == [2, 2, 2]
    for group in groups:
        [prompt] = {rollout.turns[0].observation_tokens for rollout in group.rollouts}
        assert 4 <= len(prompt) <= 6
        for rollout in group.rollouts:
            [turn] = rollout.turns
            assert 1 <= len(turn.generation.token_ids) <= 9
            assert all(0 <= token < 50 for token in (*prompt, *turn.generation.token_ids))


@pytest.mark.medium
def test_training_on_synthetic_rollouts(finished_run: TinyRun):
    before, config = contents(finished_run.path), config_of(finished_run)
    changes = {"advantage": GaeConfig(), "critic": CriticConfig(), "kl": LossKlConfig(beta=0.1)}
    fake = train_on_fake(dataclasses.replace(config, **changes), FakeShape((3, 3), (2, 6), 3))
    assert fake.rollouts == 16
    assert 16 * 5 <= fake.tokens <= 16 * 9
    assert all(map(math.isfinite, fake.median.values()))
    assert {"loss/value_avg", "loss/kl_avg", "critic/value_mean"} <= set(fake.median)
    # The weights change, the reference does not.
    assert fake.median["loss/kl_avg"] > 0
    assert fake.first_step_seconds > fake.median["seconds/total"] >= fake.median["seconds/step"] > 0
    assert fake.tokens_per_second == fake.tokens / fake.median["seconds/total"]
    assert fake.device_peak_bytes is None
    assert contents(finished_run.path) == before
