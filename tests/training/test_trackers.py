# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import NoopConfig, NoopTracker
from levanter.tracker.wandb import WandbConfig

from marin_rl.training.trackers import check_trackers, make_tracker
from marin_rl.utils.errors import UserError


def test_missing_package_names_the_extra_to_install(monkeypatch):
    def fail(config, run_id):
        raise ModuleNotFoundError("No module named 'absent'")

    monkeypatch.setattr(TensorboardConfig, "init", fail)
    with pytest.raises(
        ImportError, match=r"tracker 'tensorboard' needs .*'absent'.*pip install 'marin_rl\[tensorboard"
    ):
        make_tracker((TensorboardConfig(),), "a", {})


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
        with pytest.raises(
            UserError, match=rf"is '{extra}', but the package .* not installed; pip install 'marin_rl\["
        ):
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
