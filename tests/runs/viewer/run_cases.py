# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run directories for the tests of viewing, created without training."""

import json
from pathlib import Path

from marin_rl.types import RolloutGroup, RolloutStatus
from tests.rollouts.rollout_cases import group_of, rich_rollout, rich_signal, rollout_of, write


def empty_run(folder: Path) -> Path:
    """A run without records and rollouts."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    return folder


def small_run(folder: Path) -> Path:
    """Three steps, the last with a rollout of two turns, one that failed and one that was cut; an evaluation."""
    run = empty_run(folder)
    for step in (1, 2):
        write(run / "rollouts", step, [group_of(f"s{step}", 1.0, 0.0)])
    cut = rollout_of("g-2", reward=0.25, status=RolloutStatus.TRUNCATED)
    group = RolloutGroup("g", [rich_rollout(), rollout_of("g-1", reward=None), cut])
    write(run / "rollouts", 3, [group], {"g-0": rich_signal()})
    write(run / "rollouts", 3, [group_of("held", 1.0)], purpose="evaluation")
    records = [
        {
            "step": step,
            "train/rewards": 0.1 * step,
            "policy/entropy_avg": 1.0 - 0.1 * step,
            "seconds/sample": 0.5,
            "seconds/step": 0.25,
            "seconds/total": 0.75,
        }
        for step in range(4)
    ]
    for step in (0, 3):
        sampled = {"accuracy_sampled": 0.1 * step, "pass@1": 0.1 * step, "pass@4": 0.3 * step, "tasks": 8.0}
        measured = {"accuracy_greedy": 0.2 * step, **sampled}
        records[step] |= {f"eval/sums/{name}": value for name, value in measured.items()}
    write_records(run, records)
    return run


def write_records(run: Path, records: list[dict]) -> None:
    """Write the run's metrics.jsonl."""
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
