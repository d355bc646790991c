# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import gzip
import importlib.util
import json
import logging
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import wandb
from levanter.tracker import Tracker, TrackerConfig
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import NoopConfig, NoopTracker
from levanter.tracker.wandb import WandbConfig

from marin_rl.runs.metrics_file import read_records
from marin_rl.sessions.step_records import StepRecords, check_trackers, make_tracker, open_profiler
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import RunDirectoryError, UserError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.timing import PhaseTimer
from tests.gcs_emulator import Gcs


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


def test_trackers_do_not_receive_a_record_that_was_not_written(tmp_path):
    path, tracker = tmp_path / "metrics.jsonl", ListTracker()
    records = StepRecords(path, tracker)
    path.symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match="disk is full"):
        records.record(1, {})
    assert tracker.calls == []


def test_trackers_are_checked_before_they_start(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for key in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=wandb.Settings()))
    check_trackers(())
    check_trackers((NoopConfig(), WandbConfig(mode="offline"), WandbConfig(mode="disabled")))
    with pytest.raises(UserError, match=r"trainer.tracker is 'wandb', but there is no login .* run `wandb login`"):
        check_trackers(WandbConfig())
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    check_trackers(WandbConfig())
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for config, extra in ((WandbConfig(), "wandb"), (TensorboardConfig(), "tensorboard")):
        with pytest.raises(UserError, match=rf"is '{extra}', but the package .* not installed; pip install -e '\.\["):
            check_trackers([config])


def test_tensorboard_hides_steps_that_are_repeated(monkeypatch):
    seen = []
    monkeypatch.setattr(TensorboardConfig, "init", lambda config, run_id: (seen.append(config), NoopTracker())[1])
    make_tracker(TensorboardConfig(), "a", {}, last_step=7)
    make_tracker(TensorboardConfig(), "a", {})
    make_tracker(TensorboardConfig(purge_step=3), "a", {}, last_step=7)
    assert [config.purge_step for config in seen] == [8, None, 3]


def history(file: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The history rows and the step metrics in a `.wandb` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, step_metrics = [], {}
    for data in leveldb_records(file.read_bytes()[7:], start=7):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("metric"):
            step_metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return rows, step_metrics


def leveldb_records(data: bytes, start: int) -> Iterator[bytes]:
    """Read records in LevelDB's log format: blocks of 32 KiB with pieces of checksum, length, type and content."""
    position, record = 0, b""
    while position < len(data):
        if (left := 2**15 - (start + position) % 2**15) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WandbConfig:
    pytest.importorskip("wandb")
    for name, value in {"DIR": tmp_path, "CACHE_DIR": tmp_path, "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    monkeypatch.setattr("levanter.tracker.wandb.generate_pip_freeze", lambda: "")
    return WandbConfig(project="test", mode="offline", save_code=False)


@pytest.mark.medium
@pytest.mark.parametrize("is_resumed_on_server", [True, False])
def test_wandb_receives_repeated_steps(offline: WandbConfig, tmp_path: Path, is_resumed_on_server: bool):
    import wandb

    tracker = make_tracker(offline, "a", {"seed": 3})
    for step in range(6):
        tracker.log({"train/rewards": step / 8, "eval/ones/accuracy": 0.5}, step=step)
    former = set[Path]()
    if not is_resumed_on_server:
        # A resumed run that is offline has another file, named by second and id, and begins at step 0.
        tracker.finish()
        former = set(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        tracker = make_tracker(offline, "b", {"seed": 3}, last_step=3)
    # Killed after step 5, and resumed from the checkpoint of step 3.
    for step in range(4, 8):
        tracker.log({"train/rewards": step / 4}, step=step)
    tracker.finish()
    # wandb's process writes the end of the file after `finish`; this waits for its end.
    wandb.teardown()
    (file,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - former
    rows, step_metrics = history(file)
    values = [(row["step"], row["train/rewards"]) for row in rows]
    repeated = [(step, step / 4) for step in range(4, 8)]
    assert values == ([*((step, step / 8) for step in range(6)), *repeated] if is_resumed_on_server else repeated)
    own_steps = [row["_step"] for row in rows]
    assert own_steps == (list(range(10)) if is_resumed_on_server else [4, 5, 6, 7])
    assert step_metrics["*"] == "step"


TRAINER = dataclasses.replace(TrainerConfig(), profiler=True, profiler_start_step=3, profiler_num_steps=2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of jax's profiler, which does nothing."""
    made: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *arguments, **options: made.append(name)

    monkeypatch.setattr(jax.profiler, "start_trace", record("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", record("stop"))
    return made


def run_steps(trainer: Any, folder: Path, calls: list[str], first: int, last: int, failing: int = 0) -> None:
    with open_profiler(trainer, folder) as before_step:
        for step in range(first, last + 1):
            before_step(step)
            if step == failing:
                raise OSError("no room")
            calls.append(str(step))


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 6, "1 2 start 3 4 stop 5 6"),
        (3, 4, "start 3 4 stop"),
        (1, 3, "1 2 start 3 stop"),
        (4, 6, "4 5 6"),
    ],
)
def test_chosen_steps_are_traced(tmp_path: Path, calls: list[str], first: int, last: int, expected: str) -> None:
    run_steps(TRAINER, tmp_path, calls, first, last)
    assert " ".join(calls) == expected


def test_error_of_a_traced_step_is_raised_and_ends_the_trace(tmp_path: Path, calls: list[str]) -> None:
    with pytest.raises(OSError, match="no room"):
        run_steps(TRAINER, tmp_path, calls, 1, 6, failing=3)
    assert " ".join(calls) == "1 2 start stop"


def test_trace_that_cannot_be_written_is_an_error(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    with pytest.raises(RunDirectoryError, match=r"cannot write .*profile': the disk is full"):
        run_steps(TRAINER, tmp_path / "profile", calls, 1, 6)


@pytest.mark.medium
def test_traces_are_written_to_the_disk_and_to_an_object_store(
    gcs: Gcs, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    caplog.set_level(logging.INFO, "marin_rl")
    square = jax.jit(lambda x: x @ x)
    for folder in (tmp_path / "local", RemotePath("gs://bucket/run/profile")):
        with open_profiler(TRAINER, folder) as before_step:
            before_step(3)
            with PhaseTimer().phase("reference"):
                square(jax.numpy.ones((8, 8))).block_until_ready()
        assert f"the trace is in {folder}" in caplog.text
    names = [path.name for path in (tmp_path / "local").rglob("*") if path.is_file()]
    events = json.loads(gzip.decompress(next((tmp_path / "local").rglob("perfetto_trace.json.gz")).read_bytes()))
    assert "reference" in {event.get("name") for event in events["traceEvents"]}
    assert any(name.endswith(".xplane.pb") for name in names)
    assert sorted(Path(name).name for name in gcs.names("run/profile/")) == sorted(names)
    assert not list((tmp_path / "temporary").iterdir())
