# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Short runs for fault tests, compared with the same run without the fault."""

import itertools
import os
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TinyRun, make_run

Row = Mapping[str, Any]

GROUPS, SIZE = 4, 4
"""Groups per step, and rollouts per group."""

SHORT = {
    "num_steps": 2,
    "warm_start__max_steps": 0,
    "rollouts__prompts_per_step": GROUPS,
    "rollouts__group_size": SIZE,
    "sampling__max_new_tokens": 6,
    "evaluation": {"every": 0, "tasks": 1, "samples": 1, "greedy": False},
    "checkpoint__every": 0,
}
"""Two steps from random weights, with a minimal evaluation."""


class ShortRuns:
    """Trains runs of one kind, each in a separate folder."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self._changes = {**SHORT, **changes}
        self._numbers = itertools.count()

    def run(self, **changes: Any) -> TinyRun:
        """Train to the end."""
        folder = self.folder / f"run{next(self._numbers)}"
        folder.mkdir()
        run = make_run(folder, **{**self._changes, **changes})
        assert run.train() == 0
        return run


def written(path: Path, code: str) -> Path:
    path.write_text(textwrap.dedent(code))
    return path


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def recorded_sandboxes(patched: pytest.MonkeyPatch) -> list[Any]:
    """Record the sandboxes that runs create from now on, in order of creation."""
    from marin_rl.rewards.sandbox.config import SandboxConfig
    from marin_rl.rewards.sandbox.pool import Sandbox

    sandboxes: list[Any] = []

    def build(config: Any) -> Sandbox:
        sandboxes.append(Sandbox(config))
        return sandboxes[-1]

    patched.setattr(SandboxConfig, "build", build)
    return sandboxes


def rows_of(run: TinyRun, step: int) -> dict[str, Row]:
    """Read the stored rollouts of a step by id, sorted by id, and check that all groups are complete."""
    from marin_rl.runs.rollout_store import read_rollouts

    [table] = read_rollouts(run.path / "rollouts", [step], purposes=["training"])
    rows = {row["id"]: row for row in sorted(table.to_pylist(), key=lambda row: row["id"])}
    members = itertools.groupby(rows.values(), lambda row: row["group_id"])
    assert [len(list(group)) for _, group in members] == [SIZE] * GROUPS
    return rows


def groups_of(rows: Mapping[str, Row]) -> list[list[Row]]:
    """Split the rollouts of a step into groups."""
    return [list(group) for _, group in itertools.groupby(rows.values(), lambda row: row["group_id"])]


def sampled(row: Row) -> Any:
    """Sampled data of a rollout: observation, tokens, log-probs, stop reason and weight versions of each turn."""
    names = ("observation_tokens", "token_ids", "logprobs", "stop_reason", "first_version", "last_version")
    return [{name: turn[name] for name in names} for turn in row["turns"]]


def scored(row: Row) -> Any:
    """Status and rewards of a rollout, without its advantages."""
    return {name: row[name] for name in ("task_id", "status", "error", "reward", "rewards", "metrics", "evaluations")}


def advantages(row: Row) -> Any:
    return [turn["advantages"] for turn in row["turns"]]


def assert_nothing_else_is_lost(found: Mapping[str, Row], expected: Mapping[str, Row], hit: Collection[str]) -> None:
    """Check that rollouts not affected by a fault equal those of a step without the fault, bit for bit.

    Args:
        found: rollouts of the step with the fault.
        expected: rollouts of the step without the fault.
        hit: ids of the affected rollouts.
    """
    assert list(found) == list(expected)
    assert set(hit) < set(found)
    for id, row in found.items():
        if id not in hit:
            assert sampled(row) == sampled(expected[id]), id
            assert scored(row) == scored(expected[id]), id
    for before, after in zip(groups_of(expected), groups_of(found), strict=True):
        if not {row["id"] for row in after} & set(hit):
            assert [advantages(row) for row in after] == [advantages(row) for row in before]


def assert_trained(run: TinyRun, lost: Sequence[Mapping[str, float]]) -> None:
    """Check that the run finished and counted its failed rollouts.

    Args:
        run: finished run.
        lost: expected metrics of rollouts without a reward, for each step.
    """
    records = run.records()
    assert [record["step"] for record in records] == list(range(len(lost) + 1))
    for record, expected in zip(records[1:], lost, strict=True):
        counted = {name: value for name, value in record.items() if "/failed_" in name or name in COUNTS}
        assert counted == {**dict.fromkeys(COUNTS, 0.0), **expected}
        assert record["grad_norm"] > 0
    assert (run.path / "hf" / "model.safetensors").is_file()


COUNTS = ("rollouts/failed", "rollouts/timed_out", "filter/dropped_ungraded")
