# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Short runs that are compared with the same run after something broke in its first step."""

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
"""Groups of a step, and rollouts of a group."""

SHORT = {
    "num_steps": 2,
    "warm_start__max_steps": 0,
    "rollouts__prompts_per_step": GROUPS,
    "rollouts__group_size": SIZE,
    "sampling__max_new_tokens": 6,
    "evaluation": {"every": 0, "tasks": 1, "samples": 1, "greedy": False},
    "checkpoint__every": 0,
}
"""Two steps from random weights, with next to no evaluation."""


class ShortRuns:
    """Makes runs of one kind, each in a folder of its own."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = folder
        self._changes = {**SHORT, **changes}
        self._numbers = itertools.count()

    def run(self, **changes: Any) -> TinyRun:
        """Train to the end."""
        folder = self.folder / f"run{next(self._numbers)}"
        folder.mkdir()
        made = make_run(folder, **{**self._changes, **changes})
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("marin_rl.runtime.curves.plot_curves", lambda metrics, curves: None)
            assert made.train() == 0
        return made


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
    """The sandboxes that runs make from now on, in their order."""
    from marin_rl.rewards.sandbox.pool import Sandbox

    made: list[Any] = []

    def make(config: Any) -> Sandbox:
        made.append(Sandbox(config))
        return made[-1]

    patched.setattr("marin_rl.runtime.rollout_runner.Sandbox", make)
    return made


def rows_of(run: TinyRun, step: int) -> dict[str, Row]:
    """The stored rollouts of a step, by id, in the order of ids; their groups are whole."""
    from marin_rl.rollouts.store import read_rollouts

    [table] = read_rollouts(run.path / "rollouts", [step], purposes=["training"])
    rows = {row["id"]: row for row in sorted(table.to_pylist(), key=lambda row: row["id"])}
    members = itertools.groupby(rows.values(), lambda row: row["group_id"])
    assert [len(list(group)) for _, group in members] == [SIZE] * GROUPS
    return rows


def groups_of(rows: Mapping[str, Row]) -> list[list[Row]]:
    """A step's rollouts by group."""
    return [list(group) for _, group in itertools.groupby(rows.values(), lambda row: row["group_id"])]


def sampled(row: Row) -> Any:
    """Everything about a rollout that was sampled: each turn's tokens and log-probs, what came before, and by whom."""
    names = ("observation_tokens", "token_ids", "logprobs", "stop_reason", "first_version", "last_version")
    return [{name: turn[name] for name in names} for turn in row["turns"]]


def judged(row: Row) -> Any:
    """What came of a rollout before it was compared with others."""
    return {name: row[name] for name in ("task_id", "status", "error", "reward", "rewards", "metrics", "evaluations")}


def advantages(row: Row) -> Any:
    return [turn["advantages"] for turn in row["turns"]]


def assert_nothing_else_is_lost(found: Mapping[str, Row], expected: Mapping[str, Row], hit: Collection[str]) -> None:
    """Of a step that was disturbed, what had nothing to do with that is as in a step that was not, bit for bit.

    Args:
        found: the step's rollouts.
        expected: those of the step that was not disturbed.
        hit: ids of the rollouts that were.
    """
    assert list(found) == list(expected)
    assert set(hit) < set(found)
    for id, row in found.items():
        if id not in hit:
            assert sampled(row) == sampled(expected[id]), id
            assert judged(row) == judged(expected[id]), id
    for before, after in zip(groups_of(expected), groups_of(found), strict=True):
        if not {row["id"] for row in after} & set(hit):
            assert [advantages(row) for row in after] == [advantages(row) for row in before]


def assert_trained(run: TinyRun, lost: Sequence[Mapping[str, float]]) -> None:
    """The run went to its end, and counted what it lost.

    Args:
        run: that was trained.
        lost: for each step, the metrics that count rollouts without a reward, and their values.
    """
    records = run.records()
    assert [record["step"] for record in records] == list(range(len(lost) + 1))
    for record, expected in zip(records[1:], lost, strict=True):
        counted = {name: value for name, value in record.items() if "/failed_" in name or name in COUNTS}
        assert counted == {**dict.fromkeys(COUNTS, 0.0), **expected}
        assert record["grad_norm"] > 0
    assert (run.path / "hf" / "model.safetensors").is_file()


COUNTS = ("rollouts/failed", "rollouts/timed_out", "filter/dropped_ungraded")
