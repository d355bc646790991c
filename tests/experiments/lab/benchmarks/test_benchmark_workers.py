# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of rollout workers at a tiny size, and its figures of a run. No test depends on a duration."""

import json
import math
from pathlib import Path

import pytest

from experiments.lab.benchmarks import benchmark_workers
from marin_rl.runs.rollout_store import read_rollouts
from tests.tiny_run import TinyRun, copy_of


@pytest.mark.medium
def test_shares_and_rates_are_over_the_steps_that_count(finished_run: TinyRun, tmp_path: Path) -> None:
    run = copy_of(finished_run, tmp_path / "copy")
    records = run.records()
    for record in records[1:]:
        step = record["step"]
        record |= {"seconds/total": 100.0 if step <= 2 else 4.0, "seconds/wait": 1.0, "workers/busy_share": step / 10}
    (run.path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = benchmark_workers.measured(run.path, skip=2)
    assert found["steps"] == 4
    assert found["seconds_per_step"] == 4.0
    assert found["rollouts_per_second"] == benchmark_workers.GROUPS * benchmark_workers.MEMBERS / 4.0
    assert found["trainer_idle_share"] == 0.25
    assert found["worker_busy_share"] == pytest.approx(0.45)
    assert found["step_seconds"] == {"median": 3.0, "min": 3.0, "max": 3.0, "count": 4}
    groups = {
        row["group_id"]
        for table in read_rollouts(run.path / "rollouts", None, purposes=["training"])
        for row in table.to_pylist()
        if row["step"] > 2
    }
    assert found["group_seconds"]["count"] == len(groups) == 16
    assert math.isfinite(found["group_seconds_sigma"])
