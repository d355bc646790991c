# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import dataclasses
import errno
import io
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from levanter.tracker import Tracker, TrackerConfig
from levanter.tracker.tracker import NoopTracker
from transformers import AutoTokenizer

from marin_rl.environments.base import Step
from marin_rl.environments.single_turn import SingleTurnEpisode
from marin_rl.runs.metrics_file import append_record, read_records
from marin_rl.runs.rollout_store import RolloutStore
from marin_rl.runs.run_directory import RunDirectory
from marin_rl.training import session
from marin_rl.training.session import StepRecords, logged_errors, stop_on_signals
from marin_rl.training.trackers import make_tracker
from marin_rl.utils.errors import RunDirectoryError
from tests.free_port import free_port
from tests.tiny_run import TinyRun, contents, copy_of, interrupted_after, outcome


def test_plots_that_fail_do_not_cost_the_model(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> None:
        raise RunDirectoryError("no font")

    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", fail)
    run = new_run(num_steps=1, warm_start__max_steps=0, evaluation__tasks=0)
    assert run.train() == 1
    assert "no font" in capsys.readouterr().err
    assert (run.path / "hf" / "model.safetensors").is_file()


def test_finished_run_directory_is_complete(finished_run: TinyRun):
    directory = RunDirectory(finished_run.path)
    assert all(path.is_file() for path in (directory.config, directory.metrics, directory.log, directory.curves))
    assert directory.curves.read_bytes().startswith(b"\x89PNG")
    stored = sorted(path.name for path in directory.rollouts.iterdir())
    assert stored == [
        *(f"eval-{step:08d}.parquet" for step in (0, 3, 6)),
        *(f"step-{step:08d}.parquet" for step in range(1, 7)),
    ]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in directory.hf.iterdir()}
    assert finished_run.steps() == [0, 1, 2, 3, 4, 5, 6]
    assert "warm start 30: loss" in directory.log.read_text()


def test_exported_tokenizer_encodes_same_prompts(finished_run: TinyRun):
    tokenizer = AutoTokenizer.from_pretrained(str(finished_run.path / "hf"))
    messages = [{"role": "user", "content": "2x3"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids == [259, *b"2x3", 257, 260]


def test_closing_table_without_metric_records(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", lambda metrics, curves: None)
    again = copy_of(finished_run, tmp_path / "copy")
    (again.path / "metrics.jsonl").unlink()
    assert again.train("--accept_changes") == 0
    assert "Held-out accuracy" in capfd.readouterr().out


def test_only_settings_without_effect_on_results_may_change_on_resume(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", lambda metrics, curves: None)
    again = copy_of(finished_run, tmp_path / "copy")
    harmless = {
        "checkpoint.every": "5",
        "evaluation.every": "2",
        "rollout_store.max_mb": "500",
        "ray_address": "auto",
        "workers.num_workers": "3",
        "workers.heartbeat_timeout": "5",
        "weights.port": "1234",
        "weights.retry.give_up_seconds": "9",
    }
    assert again.train(*[part for key, value in harmless.items() for part in (f"--{key}", value)]) == 0
    files = contents(again.path)
    assert again.train("--seed", "4", "--optimizer.learning_rate", "1", "--workers.refresh", "in_flight") == 1
    error = capfd.readouterr().err
    assert f"run directory {str(again.path)!r} belongs to a run with another config:" in error
    assert "seed: 3 there, 4 now" in error
    # This one is named, so it could change.
    assert "optimizer.learning_rate" not in error
    assert 'workers.refresh: "between_groups" there, "in_flight" now' in error
    assert "choose another run_dir" in error
    files.pop(".lock")
    assert {name: data for name, data in contents(again.path).items() if name != ".lock"} == files


def test_missing_ray_cluster_is_reported_before_run_starts(
    new_run: Callable[..., TinyRun], capfd: pytest.CaptureFixture[str]
):
    run = new_run(mode="async", ray_address=f"127.0.0.1:{free_port()}")
    assert run.train() == 1
    assert "error: no Ray cluster responds at ray_address '127.0.0.1:" in capfd.readouterr().err
    assert not run.path.exists()


def test_first_interrupt_requests_stop_and_second_exits():
    messages: list[str] = []
    former = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def twice() -> None:
        with stop_on_signals(messages.append) as stop:
            assert not stop.is_set()
            signal.raise_signal(signal.SIGINT)
            assert stop.is_set()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert len(messages) == 1
    assert messages[0].startswith("SIGINT: stopping and saving; ")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == former


class Interrupted(io.RawIOBase):
    """A stream with a first write that SIGTERM interrupts, as a write to a full pipe may be."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.written:
            signal.raise_signal(signal.SIGTERM)
        self.written += bytes(data)
        return len(data)


def test_sigterm_during_console_write_requests_stop():
    raw = Interrupted()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")

    def report(message: str) -> None:
        print(message, file=stream, flush=True)

    with stop_on_signals(report) as stop:
        report("step 1/10")
        assert stop.is_set()
    first, second = raw.written.decode().splitlines()
    assert first == "step 1/10"
    assert second.startswith("SIGTERM: stopping and saving; ")


def test_sigterm_requests_stop_and_handlers_are_restored():
    messages: list[str] = []
    former = signal.getsignal(signal.SIGTERM)
    with stop_on_signals(messages.append) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
    assert messages[0].startswith("SIGTERM: stopping and saving; ")
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.medium
def test_sigterm_during_blocked_step_saves_last_finished_step(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", lambda metrics, curves: None)
    run = interrupted_after(finished_run, 3, tmp_path / "copy")
    step, graded = SingleTurnEpisode.step, 0

    async def held(self: SingleTurnEpisode, reply: str) -> Step:
        """Score the 16 rollouts of step 4 and some of step 5, and block on all others."""
        nonlocal graded
        graded += 1
        if graded <= 20:
            return await step(self, reply)
        if graded == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(SingleTurnEpisode, "step", held)
        assert run.train("--checkpoint.every", "0") == 0
    assert "stopped after step 4 of 6; everything is saved" in capfd.readouterr().out
    assert run.steps() == [0, 1, 2, 3, 4]
    assert [record["step"] for record in run.records()] == [0, 1, 2, 3, 4]
    assert run.train() == 0
    assert outcome(run) == outcome(finished_run)


@pytest.mark.medium
@pytest.mark.parametrize("step", [3, 6])
def test_sigterm_during_evaluation_saves_step_and_resume_repeats_evaluation(
    finished_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    step: int,
):
    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", lambda metrics, curves: None)
    run = interrupted_after(finished_run, step - 1, tmp_path / "copy")
    score, graded = SingleTurnEpisode.step, 0

    async def held(self: SingleTurnEpisode, reply: str) -> Step:
        """Score the 16 rollouts of the step and some of its evaluation, and block on all others."""
        nonlocal graded
        graded += 1
        if graded <= 20:
            return await score(self, reply)
        if graded == 21:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError

    with monkeypatch.context() as patched:
        patched.setattr(SingleTurnEpisode, "step", held)
        assert run.train() == 0
    output = capfd.readouterr().out
    assert f"stopped after step {step} of 6; everything is saved" in output
    assert "Held-out accuracy" not in output
    assert run.steps() == list(range(step + 1))
    assert [record["step"] for record in run.records()] == list(range(step))
    assert not (run.path / "hf").exists()
    assert run.train() == 0
    assert outcome(run) == outcome(finished_run)


def test_error_that_ends_run_is_logged(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        with logged_errors():
            raise KeyboardInterrupt

    with caplog.at_level(logging.ERROR), pytest.raises(KeyboardInterrupt):
        fail()
    assert "the run ended with an error" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("slow", ["environments.dataset.DatasetConfig.build", "training.open_run.first_policy"])
def test_sigterm_interrupts_the_preparation_of_a_run(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], slow: str
):
    def prepare(*arguments: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError

    monkeypatch.setattr(f"marin_rl.{slow}", prepare)
    former = signal.getsignal(signal.SIGTERM)
    run = new_run()
    assert run.train() == 130
    assert "interrupted; run the same command again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is former
    assert run.steps() == []


@pytest.mark.medium
def test_sigterm_during_a_warm_start_ends_the_run_without_a_checkpoint(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def terminated(*arguments: object) -> float:
        signal.raise_signal(signal.SIGTERM)
        return 0.0

    monkeypatch.setattr("marin_rl.training.warm_start._accuracy", terminated)
    run = new_run(warm_start__max_steps=1000, warm_start__check_every=1, evaluation={"tasks": 0})
    assert run.train() == 0
    assert "stopped before the first step, of which nothing is saved" in capfd.readouterr().out
    assert not run.checkpoints.exists() or run.steps() == []


def test_failed_export_keeps_previous_export(
    finished_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("marin_rl.runs.curves.plot_curves", lambda metrics, curves: None)
    again = copy_of(finished_run, tmp_path / "copy")
    # An export of an unknown step is repeated.
    (again.path / "hf" / "training_step.json").unlink()
    before = contents(again.path / "hf")

    def fail(weights: object, tokenizer: object, folder: Path, stop: object) -> None:
        folder.mkdir()
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr("marin_rl.training.export.save_hf_folder", fail)
        assert again.train() == 1
    assert f"error: cannot write '{again.path / 'hf'}': the disk is full; free some space" in capfd.readouterr().err
    assert contents(again.path / "hf") == before
    assert again.train() == 0
    assert contents(again.path / "hf") == contents(finished_run.path / "hf")
    assert not (again.path / ".hf.partial").exists()


@pytest.mark.parametrize("damage", ["missing", "header"])
def test_weight_files_are_checked_before_devices_start(
    finished_run: TinyRun,
    new_run: Callable[..., TinyRun],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    damage: str,
):
    def start(*arguments: object) -> None:
        raise AssertionError("devices were started")

    weights = tmp_path / "weights"
    shutil.copytree(finished_run.path / "hf", weights)
    if damage == "missing":
        (weights / "model.safetensors").unlink()
    else:
        (weights / "model.safetensors").write_bytes(b"\xff" * 100)
    passed_on: list[str] = []

    @contextlib.contextmanager
    def exit_on_error() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            passed_on.append(str(error))
            raise

    monkeypatch.setattr("marin_rl.run_parts.start_devices", start)
    monkeypatch.setattr(session, "exit_on_error", exit_on_error)
    run = new_run(model=None, initialize_from=str(weights))
    assert run.train() == 1
    error = capfd.readouterr().err
    # The other processes end, too.
    assert len(passed_on) == 1
    assert passed_on[0] in error
    assert f"error: the weights in '{weights}' are missing or damaged: model.safetensors: " in error
    assert not run.path.exists()


def test_second_process_is_rejected(
    finished_run: TinyRun, new_run: Callable[..., TinyRun], capfd: pytest.CaptureFixture[str]
):
    from marin_rl.runs.lock import lock

    run = new_run()
    with lock(RunDirectory(run.path)):
        assert run.train() == 1
    assert "is in use by process" in capfd.readouterr().err
    assert not (run.path / "config.yaml").exists()


def test_full_disk_at_first_evaluation_is_reported(
    new_run: Callable[..., TinyRun], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RolloutStore, "write", full)
    run = new_run(warm_start__max_steps=0, num_steps=1)
    assert run.train() == 1
    output = capfd.readouterr().err
    assert f"error: cannot write '{run.path / 'rollouts'}': the disk is full; free some space" in output
    assert "Traceback" not in output


# Records of steps.


class ListTracker(Tracker):
    name = "list"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def log_hyperparameters(self, hparams):
        self.calls.append(("hyperparameters", hparams))

    def log(self, metrics, *, step, commit=None):
        self.calls.append((f"step {step}", dict(metrics)))

    def log_summary(self, metrics):
        self.calls.append(("summary", metrics))

    def log_artifact(self, artifact_path, *, name=None, type=None):
        raise AssertionError("not used")

    def finish(self):
        self.calls.append(("finish", None))


@dataclasses.dataclass(frozen=True)
class ListTrackerConfig(TrackerConfig):
    tracker: ListTracker

    def init(self, run_id):
        self.tracker.calls.append(("init", run_id))
        return self.tracker


def test_file_and_trackers_receive_every_record_once(tmp_path):
    path, first, second = tmp_path / "metrics.jsonl", ListTracker(), ListTracker()
    tracker = make_tracker((ListTrackerConfig(first), ListTrackerConfig(second)), "a", {"x": {"y": 1, "z": None}})
    records = StepRecords(path, tracker)
    records.record(1, {"train/rewards": 0.5})
    records.record(2, {"train/rewards": 0.75})
    records.finish({"accuracy": 0.7})
    assert first.calls == second.calls
    assert first.calls == [
        ("init", "a"),
        ("hyperparameters", {"x.y": 1, "x.z": "None"}),
        ("step 1", {"train/rewards": 0.5}),
        ("step 2", {"train/rewards": 0.75}),
        ("summary", {"accuracy": 0.7}),
        ("finish", None),
    ]
    assert read_records(path) == [{"step": 1, "train/rewards": 0.5}, {"step": 2, "train/rewards": 0.75}]


@pytest.mark.parametrize("step", [2, 1])
def test_step_cannot_be_recorded_twice(tmp_path, step):
    records = StepRecords(tmp_path / "metrics.jsonl", NoopTracker())
    records.record(2, {})
    with pytest.raises(ValueError, match=f"step {step} cannot be recorded: steps must increase, and step 2"):
        records.record(step, {})
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [2]


def test_resumed_run_continues_after_its_last_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_record(path, 4, {})
    records = StepRecords(path, NoopTracker())
    with pytest.raises(ValueError, match="step 4 is recorded already"):
        records.record(4, {})
    records.record(5, {})


def test_trackers_do_not_receive_a_record_that_was_not_written(tmp_path):
    path, tracker = tmp_path / "metrics.jsonl", ListTracker()
    records = StepRecords(path, tracker)
    path.symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match="disk is full"):
        records.record(1, {})
    assert tracker.calls == []


def test_zero_or_one_tracker(tmp_path):
    StepRecords(tmp_path / "metrics.jsonl", make_tracker((), "a", {})).record(1, {"a": 1.0})
    single = ListTracker()
    make_tracker(ListTrackerConfig(single), "a", {}).log({"a": 1}, step=1)
    assert single.calls[-1] == ("step 1", {"a": 1})
