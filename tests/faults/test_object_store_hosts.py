# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Two training processes without a common file system, with their run directory in an object store."""

import contextlib
import dataclasses
import itertools
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.soak import LiveRun
from tests.gcs_emulator import Gcs
from tests.tiny_run import TinyRun, make_run, outcome
from tests.training_hosts import hosts, started

pytestmark = pytest.mark.slow

ADDRESS, PREFIX = "gs://bucket/runs/shared", "runs/shared/"


def make(folder: Path, run_dir: str) -> TinyRun:
    folder.mkdir()
    inner = {"type": "jsonl", "name": "ones", "path": str(folder / "problems.jsonl"), "held_out": 0.3}
    return make_run(
        folder,
        run_dir=run_dir,
        environment={"type": "random_control", "environment": inner},
        mode="async",
        replay__max_staleness=0,
        num_steps=3,
        warm_start__max_steps=0,
        evaluation={"tasks": 0},
        checkpoint__every=1,
    )


def start(run: TinyRun, gcs: Gcs, folders: Sequence[Path]) -> list[LiveRun]:
    """Both processes, each in its own working directory."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
    environment = ["env", *(f"{name}={value}" for name, value in gcs.environment.items())]
    return [dataclasses.replace(host, prefix=[*host.prefix, *environment]) for host in hosts(run, 2, folders)]


def test_killed_run_of_two_processes_without_a_common_disk_equals_one_that_was_not_killed(
    gcs: Gcs, tmp_path: Path
) -> None:
    local = make(tmp_path / "local", str(tmp_path / "local" / "run"))
    folders = [tmp_path / "a", tmp_path / "b"]
    remote = make(tmp_path / "remote", ADDRESS)
    first = start(remote, gcs, folders)

    def kill() -> bool:
        for host in first:
            assert host.process is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.process.pid, signal.SIGKILL)
        return True

    # Both have written their arrays, but the checkpoint is not committed.
    gcs.watched.append((r"POST runs/shared/checkpoints/step-00000002/manifest\.json", kill))
    with started(first):
        assert [host.end() for host in first] == [-signal.SIGKILL] * 2
    writers = {name.rpartition("/")[2][17:31] for name in gcs.names(f"{PREFIX}checkpoints/step-00000002/state/")}
    assert writers == {"00000-of-00002", "00001-of-00002"}
    gcs.downloads.clear()

    again = start(remote, gcs, folders[::-1])
    with started(again):
        assert [host.end() for host in again] == [0, 0], "\n".join(host.said[-2000:] for host in again)
    assert "resuming after step 1, from gs://bucket/runs/shared/checkpoints/step-00000001" in again[0].said
    reads = {name: ranges for name, ranges in gcs.downloads.items() if "step-00000001" in name}
    assert {re.sub(r".*/", "", name)[17:31] for name in reads if "/state/" in name} == writers
    for name, ranges in reads.items():
        places = sorted(ranges)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places)), name

    whole = hosts(local, 2)
    with started(whole):
        assert [host.end() for host in whole] == [0, 0], "\n".join(host.said[-2000:] for host in whole)
    gcs.download(PREFIX, tmp_path / "copy")
    found, expected = outcome(TinyRun(tmp_path / "copy", remote.config)), outcome(local)
    for records in (found["records"], expected["records"]):
        for record in records:
            for name in [name for name in record if name.startswith("workers/")]:
                del record[name]
    for part in ("steps", "state", "records", "rollouts", "hf"):
        assert found[part] == expected[part], part
