# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from typing import Any

import pytest
from levanter.tracker import Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import NoopTracker

from marin_rl.errors import RunDirectoryError
from marin_rl.training.metrics_file import append_record, read_records
from marin_rl.training.tracking import StepRecords, make_tracker


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


def test_missing_package_names_the_extra_to_install(monkeypatch):
    def fail(config, run_id):
        raise ModuleNotFoundError("No module named 'absent'")

    monkeypatch.setattr(TensorboardConfig, "init", fail)
    with pytest.raises(
        ImportError, match=r"tracker 'tensorboard' needs .*'absent'.*pip install 'marin_rl\[tensorboard"
    ):
        make_tracker((TensorboardConfig(),), "a", {})


def test_tensorboard_hides_steps_that_are_repeated(monkeypatch):
    seen = []
    monkeypatch.setattr(TensorboardConfig, "init", lambda config, run_id: (seen.append(config), NoopTracker())[1])
    make_tracker(TensorboardConfig(), "a", {}, last_step=7)
    make_tracker(TensorboardConfig(), "a", {})
    make_tracker(TensorboardConfig(purge_step=3), "a", {}, last_step=7)
    assert [config.purge_step for config in seen] == [8, None, 3]
