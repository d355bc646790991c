# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts of an asynchronous run are killed while it trains: it goes on, and leaves nothing behind."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from marin_rl.rollouts.store import read_rollouts
from tests.tiny_run import TinyRun

SILENCE = 3.0
"""Seconds that a worker may be silent."""
PATIENCE = 240.0
"""Seconds that anything may take on a busy machine."""


@dataclasses.dataclass
class Process:
    """A training run in a process of its own, with all that it started."""

    run: TinyRun
    process: "subprocess.Popen[bytes]"
    output: Path

    def children(self) -> dict[int, str]:
        """Everything below it, by process id, with its command line."""
        parents, names = {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    names[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid: names.get(pid, "") for pid in found - {self.process.pid}}

    def named(self, start: str) -> list[int]:
        return [pid for pid, name in self.children().items() if name.startswith(start)]

    def steps(self) -> int:
        return len(self.run.records()) - 1 if (self.run.path / "metrics.jsonl").exists() else -1

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def end(self) -> int:
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def started(run: TinyRun) -> Iterator[Process]:
    output = run.path.parent / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "marin_rl.train", *run.argv],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Process(run, process, output)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def async_run(finished_run: TinyRun, new_run: Callable[..., TinyRun], steps: int) -> TinyRun:
    return new_run(
        mode="async",
        num_steps=steps,
        replay__max_staleness=1,
        workers={"num_workers": 2, "silence": SILENCE, "patience": PATIENCE},
        initialize_from=str(finished_run.path),
        warm_start__max_steps=0,
        checkpoint__every=5,
        evaluation={"tasks": 2, "greedy": False, "every": 0},
    )


def whole_and_once(run: TinyRun, steps: int) -> None:
    """Every step trained on its number of groups, each whole, and no group twice."""
    groups: dict[str, set[int]] = {}
    members: dict[str, int] = {}
    for table in read_rollouts(run.path / "rollouts", None, purposes=["training"]):
        for row in table.select(["step", "group_id"]).to_pylist():
            groups.setdefault(row["group_id"], set()).add(row["step"])
            members[row["group_id"]] = members.get(row["group_id"], 0) + 1
    assert len(groups) == 4 * steps
    assert {len(of_group) for of_group in groups.values()} == {1}
    assert set(members.values()) == {4}
    records = run.records()
    assert [record["step"] for record in records] == list(range(steps + 1))
    assert max(record["staleness/max"] for record in records[1:]) <= 1


@pytest.mark.slow
def test_workers_and_coordinator_are_killed_and_paused_and_the_run_goes_on(
    finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    run = async_run(finished_run, new_run, steps=30)
    with started(run) as training:
        training.wait_until(lambda: training.steps() >= 3)
        (first, *_) = training.named("ray::Worker")
        os.kill(first, signal.SIGKILL)
        after = training.steps()
        training.wait_until(lambda: training.steps() >= after + 3)
        for worker in training.named("ray::Worker"):
            os.kill(worker, signal.SIGKILL)
        after = training.steps()
        training.wait_until(lambda: training.steps() >= after + 3)
        # Workers that stand still for longer than they may be silent are given up; when they move again they join anew.
        given_up, after = run.records()[-1]["workers/lost"], training.steps()
        paused = training.named("ray::Worker")
        for worker in paused:
            os.kill(worker, signal.SIGSTOP)
        time.sleep(2 * SILENCE)
        for worker in paused:
            os.kill(worker, signal.SIGCONT)
        training.wait_until(lambda: training.steps() >= after + 3)
        assert run.records()[-1]["workers/lost"] > given_up
        (coordinator,) = training.named("ray::Office")
        os.kill(coordinator, signal.SIGKILL)
        after = training.steps()
        training.wait_until(lambda: training.steps() >= after + 3)
        children = training.children()
        assert training.end() == 0, training.output.read_text()
        assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
    whole_and_once(run, 30)
    log = (run.path / "log.txt").read_text()
    assert "the coordinator was started anew; it is told of" in log


@pytest.mark.slow
def test_a_killed_trainer_takes_its_workers_along_and_goes_on_from_its_checkpoint(
    finished_run: TinyRun, new_run: Callable[..., TinyRun]
) -> None:
    run = async_run(finished_run, new_run, steps=12)
    with started(run) as training:
        training.wait_until(lambda: bool(run.steps()) and run.steps()[-1] >= 5)
        children = training.children()
        training.process.kill()
        training.end()
        deadline = time.monotonic() + PATIENCE
        while left := [name for pid, name in children.items() if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    with started(run) as training:
        assert training.end() == 0, training.output.read_text()
    whole_and_once(run, 12)
