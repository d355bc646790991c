# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs that are made longer or otherwise changed when they resume, and runs that are complete."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from levanter.optim.config import AdamConfig

from marin_rl.learner.starting_weights import hf_folder
from marin_rl.runs.metrics_file import read_records
from marin_rl.runs.run_directory import RunDirectory, exported_step
from marin_rl.sessions.replay import ReplayError, replay_step
from tests.tiny_run import TinyRun, contents, copy_of, interrupted_after, outcome, without_timings
from tests.training.reopened_run import config_of

LONGER = ("--num_steps", "8", "--optimizer.lr_schedule", "linear")
"""Two more steps, with a learning rate that decays."""


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def state_of(folder: Path) -> dict[str, Any]:
    """Contents and times of all files and folders of a run."""
    times = {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    return {**contents(folder), **times}


def longer_run(finished_run: TinyRun, folder: Path) -> TinyRun:
    run = copy_of(finished_run, folder)
    assert run.train(*LONGER) == 0
    return run


@pytest.mark.medium
def test_a_finished_run_goes_on_with_the_schedule_of_the_new_length(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = longer_run(finished_run, tmp_path / "longer")
    schedule = AdamConfig(learning_rate=5e-3, lr_schedule="linear", warmup=0).lr_scheduler(8)
    records = run.records()
    assert [record["step"] for record in records] == list(range(9))
    rates = [record["lr"] for record in records[7:]]
    assert rates == [pytest.approx(float(np.asarray(schedule(count))), rel=1e-6) for count in (6, 7)]
    assert [without_timings(record) for record in records[:7]] == [
        without_timings(record) for record in finished_run.records()
    ]
    assert contents(run.checkpoint(6)) == contents(finished_run.checkpoint(6))
    # Evaluations follow the new length.
    assert [any(name.startswith("eval/") for name in record) for record in records[6:]] == [True, False, True]
    assert {name: value for name, value in records[7].items() if name.startswith("config/")} == {"config/num_steps": 8}
    assert not any(name.startswith("config/") for name in records[8])
    head = (run.path / "config.yaml").read_text().splitlines()[:3]
    assert head[:2] == [
        "# after step 6: num_steps 6 -> 8",
        '# after step 6: optimizer.lr_schedule "constant" -> "linear"',
    ]
    assert exported_step(RunDirectory(run.path)) == 8
    assert contents(run.path / "hf")["model.safetensors"] != contents(finished_run.path / "hf")["model.safetensors"]
    log = (run.path / "log.txt").read_text()
    for text in (capfd.readouterr().out, log):
        assert "changed from step 7 on: num_steps 6 -> 8" in text

    # A replay uses the config of its step.
    replayed = replay_step(RunDirectory(run.path), config_of(finished_run), 6)
    assert replayed.weight_difference == 0
    for step in (6, 7):
        shutil.rmtree(run.checkpoint(step))
    with pytest.raises(ReplayError, match=r"the config of the run was changed since(.|\n)*num_steps: 6 there, 8 now"):
        replay_step(RunDirectory(run.path), config_of(run), 8)


@pytest.mark.medium
@pytest.mark.parametrize("step", [6, 7])
def test_a_changed_run_that_is_killed_ends_as_an_uninterrupted_one(finished_run: TinyRun, tmp_path: Path, step: int):
    expected = longer_run(finished_run, tmp_path / "longer")
    killed = interrupted_after(expected, step, tmp_path / "killed")
    # The export of the former end is still there.
    shutil.copytree(finished_run.path / "hf", killed.path / "hf")
    if step == 7:
        with pytest.raises(ValueError, match=r"was made longer and has not finished: hf/ is of step 6, .* step 7"):
            hf_folder(str(killed.path))
    assert killed.train() == 1
    assert killed.train(*LONGER) == 0
    assert outcome(killed) == outcome(expected)
    assert (killed.path / "config.yaml").read_text().count("# after step") == 2


@pytest.mark.medium
def test_a_change_is_not_written_if_the_run_cannot_be_opened(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = copy_of(finished_run, tmp_path / "copy")
    before = (run.path / "config.yaml").read_bytes()
    (tmp_path / "copy" / "problems.jsonl").write_text("")

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no tasks")

    with monkeypatch.context() as patched:
        patched.setattr("marin_rl.training.open_run.require_same_tasks", fail)
        assert run.train(*LONGER) == 1
    assert (run.path / "config.yaml").read_bytes() == before


@pytest.mark.parametrize("more", [(), ("--num_steps", "6"), ("--checkpoint.every", "5"), ("--evaluation.every", "3")])
def test_a_finished_run_that_is_started_again_says_so_and_changes_nothing(
    finished_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    more: tuple[str, ...],
):
    def start(*_: object) -> None:
        raise AssertionError("devices were started")

    monkeypatch.setattr("marin_rl.parts.model.start_devices", start)
    run = copy_of(finished_run, tmp_path / "copy")
    for path in run.path.rglob("*"):
        os.utime(path, (1, 1))
    before = state_of(run.path)
    assert run.train(*more) == 0
    output = capfd.readouterr().out
    assert "is complete after step 6, and nothing is changed" in output
    assert "--num_steps N" in output
    assert "Held-out accuracy" in output
    assert f"python -m marin_rl.view {run.path}" in output
    assert "Time of this command" not in output
    assert state_of(run.path) == before


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        (("--optimizer.learning_rate", "1e-4"), ["optimizer.learning_rate"]),
        (("--optimizer.lr_schedule", "linear", "--accept_changes"), ["optimizer.lr_schedule"]),
        (("--evaluation.tasks", "8", "--export.dtype", "bfloat16"), ["evaluation.tasks"]),
        (("--optimizer.beta1", "0.5", "--num_steps", "6"), ["optimizer.beta1"]),
        (("--optimizer.weight_decay", "0.1", "--evaluation.samples", "3"), ["optimizer.weight_decay", "evaluation"]),
        (("--optimizer.learning_rate", "1e-4", "--dry_run"), ["optimizer.learning_rate"]),
        (("--seed", "4", "--optimizer.learning_rate", "1e-4"), ["seed", "optimizer.learning_rate"]),
    ],
)
def test_a_change_that_trains_no_step_is_refused_and_writes_nothing(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...], keys: list[str]
):
    run = copy_of(finished_run, tmp_path / "copy")
    before = state_of(run.path)
    assert run.train(*more) == 1
    error = capfd.readouterr().err
    assert all(key in error for key in keys)
    assert state_of(run.path) == before
    assert run.train() == 0
    assert state_of(run.path) == before


@pytest.mark.medium
def test_a_changed_file_of_a_complete_run_is_refused_until_the_key_is_given_or_the_run_is_longer(
    finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    run = copy_of(finished_run, tmp_path / "copy")
    shutil.rmtree(run.path / "hf")
    run.config.write_text(run.config.read_text().replace("learning_rate: 0.005", "learning_rate: 0.001"))
    before = state_of(run.path)
    for more in ((), ("--optimizer.learning_rate", "0.001")):
        assert run.train(*more) == 1
        assert "give --optimizer.learning_rate 0.005, as in the run" in capfd.readouterr().err
    assert state_of(run.path) == before
    # Without its export the run is not finished, and is opened.
    assert run.train("--optimizer.learning_rate", "0.005") == 0
    assert contents(run.path / "hf").keys() == contents(finished_run.path / "hf").keys()
    assert (run.path / "config.yaml").read_bytes() == before["config.yaml"]
    assert run.train("--optimizer.learning_rate", "0.001", "--num_steps", "7") == 0
    assert run.records()[-1]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize(
    "place", ["training.open_run.require_same_tasks", "sessions.session.open_records", "sessions.session.open_profiler"]
)
def test_a_start_that_fails_leaves_the_config(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    run = interrupted_after(finished_run, 4, tmp_path / "copy")
    before = (run.path / "config.yaml").read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no tracker")

    monkeypatch.setattr(f"marin_rl.{place}", fail)
    # With a recorded change, and with one that is not.
    for more in (LONGER, ("--log_level", "debug", "--checkpoint.every", "1")):
        assert run.train(*more) == 1
        assert (run.path / "config.yaml").read_bytes() == before


@pytest.mark.medium
@pytest.mark.parametrize("missing", ["hf", "hf/config.json", "hf/training_step.json", "hf/model.safetensors"])
def test_a_finished_run_without_its_export_is_exported(finished_run: TinyRun, tmp_path: Path, missing: str):
    run = copy_of(finished_run, tmp_path / "copy")
    path = run.path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run.train() == 0
    assert outcome(run) == outcome(finished_run)


@pytest.mark.medium
@pytest.mark.parametrize(
    "place", ["marin_rl.training.open_run.require_same_tasks", "marin_rl.sessions.session._export"]
)
def test_a_new_type_of_the_export_is_exported_after_a_kill(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    run = copy_of(finished_run, tmp_path / "copy")
    with monkeypatch.context() as patched:
        patched.setattr(place, killed)
        assert run.train("--export.dtype", "bfloat16") == 130
    assert run.train("--export.dtype", "bfloat16") == 0
    size = (run.path / "hf" / "model.safetensors").stat().st_size
    assert size < 0.75 * (finished_run.path / "hf" / "model.safetensors").stat().st_size


@pytest.mark.medium
@pytest.mark.parametrize("place", ["marin_rl.runs.curves.plot_curves", "marin_rl.sessions.session._export"])
def test_a_run_that_is_killed_at_its_end_is_plotted_and_exported(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    run = interrupted_after(finished_run, 6, tmp_path / "killed")
    (run.path / "curves.png").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(place, killed)
        assert run.train(curves=True) == 130
    assert run.train(curves=True) == 0
    assert (run.path / "curves.png").exists()
    assert exported_step(RunDirectory(run.path)) == 6


def test_a_moved_run_resumes(finished_run: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = interrupted_after(finished_run, 5, tmp_path / "first")
    moved = TinyRun(run.path.rename(tmp_path / "moved"), run.config)
    config = str(moved.path / "config.yaml")
    assert TinyRun(moved.path, Path(config)).train() == 1
    assert f"--run_dir {moved.path}" in capfd.readouterr().err
    assert not run.path.exists()
    assert moved.train("--run_dir", str(moved.path)) == 0
    assert outcome(moved) == outcome(finished_run)
    assert f"run_dir: {moved.path}\n" in Path(config).read_text()


def test_every_step_and_the_summary_are_in_the_log(finished_run: TinyRun):
    log = (finished_run.path / "log.txt").read_text()
    for step in range(1, 7):
        (line,) = [line for line in log.splitlines() if f": step {step}/6: " in line]
        assert "reward 0." in line
        assert ("held-out" in line) == (step in (3, 6))
    assert "Time of this command" in log
    assert "of which compilation" in log
    records = read_records(finished_run.path / "metrics.jsonl")
    assert all(0 <= record["seconds/compile"] <= record["seconds/total"] for record in records[1:])
    assert json.dumps(records[0]).count("seconds/") == 0
