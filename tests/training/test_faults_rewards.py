# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward workers are killed while they score the first batch of a run."""

import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TinyRun
from tests.training.fault_cases import (
    ShortRuns,
    assert_nothing_else_is_lost,
    assert_trained,
    groups_of,
    is_alive,
    recorded_sandboxes,
    rows_of,
    written,
)

WORKERS = 5

FUNCTION = """
    import hashlib
    import os

    from marin_rl.rewards import reward_function


    @reward_function
    def patient(messages, ground_truth, task_id, gates, **kwargs):
        reply = messages[-1]["content"]
        gate = os.path.join(gates, hashlib.sha256(f"{task_id} {reply}".encode()).hexdigest())
        if os.path.exists(gate):
            # A pipe: blocks until the test opens its other end and kills this process.
            open(gate, "rb").read()
        return float(sum(reply.encode()) % 7)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ShortRuns:
    folder = tmp_path_factory.mktemp("rewards")
    gates = folder / "gates"
    gates.mkdir()
    file = written(folder / "patient.py", FUNCTION)
    function = {"type": "function", "path": str(file), "function": "patient", "options": {"gates": str(gates)}}
    return ShortRuns(
        folder,
        environment__grader={"type": "none"},
        environment__format=None,
        environment__reply_regex=None,
        environment__rewards=[function],
        filter={"type": "drop"},
        # Long enough that only the kill ends a blocked call.
        sandbox={"workers": WORKERS, "wall_seconds": 600, "require": "none"},
    )


@pytest.fixture(scope="module")
def undisturbed(runs: ShortRuns) -> TinyRun:
    run = runs.run()
    assert_trained(run, [{}, {}])
    return run


def gate_of(gates: Path, row: Any) -> Path:
    key = f"{row['task_id']} {row['turns'][-1]['messages'][-1]['content']}"
    return gates / hashlib.sha256(key.encode()).hexdigest()


@dataclasses.dataclass
class Killer:
    """Waits until a call blocks at every gate, and then kills all workers."""

    gates: Sequence[Path]
    sandboxes: Sequence[Any]
    killed: list[int] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)

    def __call__(self) -> None:
        for gate in self.gates:
            # Opening a pipe for writing blocks until its reader opens it. The reader then blocks until it is killed.
            self.held.append(os.open(gate, os.O_WRONLY))
            gate.unlink()
        self.killed += self.sandboxes[-1].worker_pids
        for pid in self.killed:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.medium
@pytest.mark.parametrize("bubblewrap", [True, False], ids=["the best isolation", "without bubblewrap"])
def test_killed_reward_workers_lose_only_their_own_calls(
    runs: ShortRuns, undisturbed: TinyRun, bubblewrap: bool, monkeypatch: pytest.MonkeyPatch
):
    expected = rows_of(undisturbed, 1)
    first, second, *_ = groups_of(expected)
    # All rollouts of one group, and one of another.
    hit = [*first, second[2]]
    gates = [gate_of(runs.folder / "gates", row) for row in hit]
    assert len({gate_of(gates[0].parent, row) for row in expected.values()}) == len(expected)
    for gate in gates:
        os.mkfifo(gate)
    if not bubblewrap:
        monkeypatch.setattr("marin_rl.rewards.sandbox.pool.shutil.which", lambda name: None)
    sandboxes = recorded_sandboxes(monkeypatch)
    killer = Killer(gates, sandboxes)
    killing = threading.Thread(target=killer, daemon=True)
    killing.start()
    run = runs.run()
    killing.join(600)
    assert not killing.is_alive()
    for descriptor in killer.held:
        os.close(descriptor)
    assert len(killer.killed) == WORKERS == len(hit)

    lost = {"rewards/patient/failed_worker": 5.0, "rollouts/failed": 5.0, "filter/dropped_ungraded": 1}
    assert_trained(run, [lost, {}])
    found, ids = rows_of(run, 1), {row["id"] for row in hit}
    assert {id for id, row in found.items() if row["status"] == "failed"} == ids
    for id in ids:
        assert found[id]["error"].startswith("reward 'patient': 'patient' of ")
        assert "failed: the worker died" in found[id]["error"]
        assert found[id]["not_trained"] == "failed"
        assert found[id]["turns"][0]["token_ids"] == expected[id]["turns"][0]["token_ids"]
        assert found[id]["turns"][0]["logprobs"] == expected[id]["turns"][0]["logprobs"]
    assert_nothing_else_is_lost(found, expected, ids)
    assert [row["not_trained"] for row in groups_of(found)[1]] == [None, None, "failed", None]
    # The replacement workers have also ended.
    assert sandboxes[-1].worker_pids == []
    assert not any(is_alive(pid) for pid in killer.killed)
    assert sandboxes[-1].failures == {"worker": 5}
