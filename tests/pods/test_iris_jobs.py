# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Jobs of a real cluster of Iris: gangs, mistakes, kills, preemption, rollout workers, and what is left at the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_run import TinyRun, make_run, outcome
from tests.training_hosts import hosts, started

if sys.version_info < (3, 12):
    pytest.skip("Iris needs Python 3.12", allow_module_level=True)

from tests.pods.iris_cluster import TestCluster, at_step, end_process, meanwhile, processes, steps_recorded, until

# Iris leaves pipes to processes that have ended to garbage collection.
pytestmark = [pytest.mark.both_lines, pytest.mark.medium, pytest.mark.filterwarnings("ignore::ResourceWarning")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        # Iris stores credentials there.
        patch.setenv("HOME", str(folder))
        patch.chdir(ROOT)
        cluster = TestCluster(folder)
        yield cluster
        cluster.close()


def make(folder: Path, **changes: object) -> TinyRun:
    """A run of four steps from random weights with random rewards, because an untrained policy is never correct."""
    folder.mkdir()
    problems = {"type": "jsonl", "name": "ones", "path": str(folder / "problems.jsonl"), "held_out": 0.3}
    settings = {
        "environment": {"type": "random_control", "environment": problems},
        "num_steps": 4,
        "warm_start__max_steps": 0,
        "checkpoint__every": 1,
        "evaluation__tasks": 0,
    }
    return make_run(folder, **settings | changes)


def with_processes(run: TinyRun, count: int, devices: int) -> TinyRun:
    """Train in several local processes that know one another's addresses."""
    training = hosts(run, count, (), devices)
    with started(training):
        assert [host.end() for host in training] == [0] * count
    assert all(record["grad_norm"] > 0 for record in run.records()[1:])
    return run


def test_a_laptop_runs_a_job(tmp_path: Path) -> None:
    """The command as a user types it, with a cluster of its own."""
    run = make(tmp_path / "run", num_steps=1)
    command = [sys.executable, "-m", "marin_rl.launch", "--local", "--", "train", *run.argv]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in run.records()] == [0, 1]
    lines = done.stdout.splitlines()
    assert any(line.startswith("[0] ") and str(run.path) in line for line in lines)
    assert lines[-1].endswith("succeeded")


def test_a_mistake_ends_the_job_at_once_and_names_paths_and_values_reach_no_shell(
    cluster: TestCluster, tmp_path: Path
) -> None:
    hostile = "a b'\";$(touch x)\n`touch x`|&<>*"
    command = ["evaluate", "--run", str(tmp_path / hostile)]
    status, lines = cluster.launch(command, env={"HOSTILE": hostile})
    assert status == 1
    assert " failed: " in lines[-1]
    assert "is not a run directory" in lines[-1]
    assert cluster.job(command).status().failure_count == 1
    assert not list(tmp_path.rglob("x"))
    assert not Path("x").exists()


def test_a_stopped_or_killed_process_is_started_again_and_resumes(cluster: TestCluster, tmp_path: Path) -> None:
    alone, ended = with_processes(make(tmp_path / "alone"), 1, devices=1), make(tmp_path / "ended")
    command = ["train", *ended.argv]

    def end(number: signal.Signals) -> Callable[[], None]:
        return lambda: end_process(cluster.job(command).job_id.name, number)

    with (
        at_step(ended, 2, end(signal.SIGTERM)),
        at_step(ended, 4, end(signal.SIGKILL)),
    ):
        status, lines = cluster.launch(command)
    assert status == 0, lines
    assert any("everything is saved" in line for line in lines)
    assert cluster.job(command).status().failure_count == 2
    assert outcome(ended) == outcome(alone)


def test_a_gang_of_four_on_a_preempted_slice_trains_like_local_processes(cluster: TestCluster, tmp_path: Path) -> None:
    expected = with_processes(make(tmp_path / "local"), 4, devices=1)
    gang = make(tmp_path / "gang")
    command = ["train", *gang.argv]
    with at_step(gang, 3, lambda: cluster.preempt_slice_of(cluster.job(command))):
        status, lines = cluster.launch(command, slice="v5p-32")
    assert status == 0, lines
    assert cluster.job(command).status().preemption_count > 0
    assert outcome(gang) == outcome(expected)
    assert {line.split()[0] for line in lines if line.startswith("[")} >= {"[0]"}


def make_async(folder: Path, steps: int, workers: int) -> TinyRun:
    settings = {"engine": "iris", "num_workers": workers, "heartbeat_timeout": 10.0}
    return make(folder, mode="async", workers=settings, num_steps=steps, replay__max_staleness=1)


def nothing_is_left(cluster: TestCluster, name: str) -> bool:
    return not processes(name) and not cluster.client.list_endpoints(f"/{os.environ.get('USER', 'root')}/{name}")


def test_rollout_workers_end_with_the_run(cluster: TestCluster, tmp_path: Path) -> None:
    run, shared = make_async(tmp_path / "async", 3, 1), set(os.listdir("/dev/shm"))
    command = ["train", *run.argv]
    status, lines = cluster.launch(command)
    assert status == 0, lines
    assert [record["step"] for record in run.records()] == [0, 1, 2, 3]
    until(lambda: nothing_is_left(cluster, cluster.job(command).job_id.name))
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("iris-secrets")} <= shared


def test_the_same_command_follows_a_job_whose_killed_worker_is_replaced_and_a_cancel_leaves_nothing(
    cluster: TestCluster, tmp_path: Path
) -> None:
    run = make_async(tmp_path / "async", 100_000, 2)
    command = ["train", *run.argv]
    cluster.submit(command)
    until(lambda: steps_recorded(run, 1))
    with (
        meanwhile(lambda: steps_recorded(run, 1), lambda: end_process("/worker-1/", signal.SIGKILL)),
        meanwhile(lambda: is_replaced(run), lambda: cluster.job(command).cancel()),
    ):
        status, lines = cluster.launch(command)
    assert status == 1
    assert "runs already" in lines[0]
    assert "killed" in lines[-1]
    assert max(record.get("staleness/max", 0) for record in run.records()) == 1
    until(lambda: nothing_is_left(cluster, cluster.job(command).job_id.name))


def is_replaced(run: TinyRun) -> bool:
    """Whether two workers run again, of which one has joined later."""
    if not steps_recorded(run, 1):
        return False
    newest = run.records()[-1]
    return newest["workers/joined"] >= 3 and newest["workers/alive"] == 2
