# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import gzip
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from marin_rl.config.train_config import TrainerConfig
from marin_rl.training.profiler import open_profiler
from marin_rl.utils.errors import RunDirectoryError
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.timing import PhaseTimer
from tests.gcs_emulator import Gcs

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


def test_nothing_is_traced_by_default(tmp_path: Path, calls: list[str]) -> None:
    run_steps(dataclasses.replace(TRAINER, profiler=False), tmp_path, calls, 1, 6)
    assert " ".join(calls) == "1 2 3 4 5 6"


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
