# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run in several training processes on this machine, compared with one process.

First in `mode: async`, with Ray and a rollout worker, then in `mode: sync`, with a warm start and evaluations.
"""

import dataclasses
import functools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.lab.soak import LiveRun
from marin_rl.runs.lock import lock
from marin_rl.runs.run_directory import RunDirectory
from tests.cpu_host import cpu_host
from tests.distributed.thread_workers import thread_workers
from tests.fork_server import popen
from tests.gcs_emulator import Gcs
from tests.tiny_run import (
    TinyRun,
    make_run,
    outcome,
    set_num_steps,
    stored,
    without_losses,
    without_timings,
)
from tests.training_hosts import TIMEOUT, distributed_flags, hosts, started

pytestmark = pytest.mark.slow


def make(folder: Path, **changes: Any) -> TinyRun:
    """A run from random weights with random rewards, because an untrained policy is never correct."""
    folder.mkdir()
    inner = {"type": "jsonl", "name": "ones", "path": str(folder / "problems.jsonl"), "held_out": 0.3}
    return make_run(
        folder,
        **{
            "environment": {"type": "random_control", "environment": inner},
            "mode": "async",
            "replay__max_staleness": 0,
            "num_steps": 3,
            "warm_start__max_steps": 0,
            "evaluation": {"tasks": 0},
            "checkpoint__every": 1,
            "checkpoint__keep_every": 1,
            "kl": {"type": "in_reward", "beta": 0.05},
            # Some gradients are rounding errors of sums that cancel out; without this, Adam makes large steps of them.
            "optimizer__epsilon": 1e-5,
            **changes,
        },
    )


def train(run: TinyRun, count: int, *, code: int = 0, folders: Sequence[Path] = (), devices: int = 2) -> list[str]:
    """Run the command in `count` processes, and return their outputs."""
    training = hosts(run, count, folders, devices)
    with started(training):
        return outputs_at_end(training, code)


def outputs_at_end(training: Sequence[LiveRun], code: int = 0) -> list[str]:
    codes = [host.end() for host in training]
    outputs = [host.output.read_text() for host in training]
    assert codes == [code] * len(training), "\n".join(text[-3000:] for text in outputs)
    assert not any("os.fork() was called" in text for text in outputs)
    return outputs


@pytest.fixture(scope="module")
def async_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TinyRun]:
    """Runs by their number of processes: this one with a worker in a thread, and two with Ray."""
    folder = tmp_path_factory.mktemp("async")
    runs = {count: make(folder / str(count)) for count in (1, 2)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("marin_rl.distributed.ray_workers.ray_workers", thread_workers)
        assert runs[1].train() == 0
    train(runs[2], 2)
    return runs


@pytest.fixture
def shared(async_runs: dict[int, TinyRun]) -> TinyRun:
    return async_runs[2]


def comparable(run: TinyRun) -> list[dict[str, object]]:
    records = [without_timings(record) for record in run.records()]
    return [{name: value for name, value in record.items() if "workers/" not in name} for record in records]


@pytest.mark.medium
def test_two_processes_train_like_one(async_runs: dict[int, TinyRun]) -> None:
    alone, shared = async_runs[1], async_runs[2]
    assert [record["step"] for record in shared.records()] == [0, 1, 2, 3]
    for found, expected in zip(comparable(shared), comparable(alone), strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # The rollouts are equal, but sums over four devices in two processes differ from sums over one device.
            if not name.startswith("batch/"):
                assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert all(record["grad_norm"] > 0 for record in shared.records()[1:])
    weights = load_file(shared.path / "hf" / "model.safetensors")
    for name, array in load_file(alone.path / "hf" / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], array, atol=1e-4, err_msg=name)


def test_only_main_process_prints_and_writes(shared: TinyRun) -> None:
    first, second = ((shared.path.parent / f"output-2-{index}.txt").read_text() for index in range(2))
    assert "Evaluate it again" in first
    assert "step 1/3" in first
    assert "Evaluate it again" not in second
    assert "step 1/3" not in second
    assert shared.steps() == [0, 1, 2, 3]
    assert not list(shared.checkpoints.glob(".*"))
    assert [file.name for file in (shared.path / "processes").iterdir()] == ["1.txt"]


PREFIX = "runs/shared/"


def start_in_bucket(run: TinyRun, gcs: Gcs, folders: Sequence[Path]) -> list[LiveRun]:
    """Both processes of a run in the object store, each in its own working directory."""
    for folder in folders:
        folder.mkdir(exist_ok=True)
    training = hosts(run, 2, folders)
    return [dataclasses.replace(host, environment={**host.environment, **gcs.environment}) for host in training]


def state_files(gcs: Gcs, step: int) -> dict[str, str]:
    """Return the names of the files of arrays in the bucket, by their names in the checkpoint."""
    folder = f"{PREFIX}checkpoints/step-{step:08d}/"
    names = {name.partition("/")[2]: folder + name for name in gcs.names(folder)}
    return {name: stored for name, stored in names.items() if name.startswith("state/")}


def test_killed_run_without_a_common_disk_resumes_bit_for_bit(shared: TinyRun, gcs: Gcs, tmp_path: Path) -> None:
    """Two processes with their run directory in an object store equal two on a disk that were not killed."""
    folders = [tmp_path / "a", tmp_path / "b"]
    remote = make(tmp_path / "remote", run_dir=f"gs://bucket/{PREFIX.rstrip('/')}")
    first = start_in_bucket(remote, gcs, folders)

    def kill() -> bool:
        # The main process last: the other one would end by itself without it.
        for host in reversed(first):
            host.process.kill()
        return True

    # Both have written their arrays, but the checkpoint is not committed.
    gcs.watched.append((rf"POST {PREFIX}checkpoints/step-00000002/manifest\.json", kill))
    with started(first):
        codes = [host.end() for host in first]
    assert codes == [-signal.SIGKILL] * 2, "\n".join(host.said[-3000:] for host in first)
    first_saved, interrupted = (state_files(gcs, step) for step in (1, 2))
    assert interrupted.keys() == first_saved.keys()
    gcs.downloads.clear()

    again = start_in_bucket(remote, gcs, folders[::-1])
    with started(again):
        codes = [host.end() for host in again]
    assert codes == [0, 0], "\n".join(host.said[-3000:] for host in again)
    assert f"resuming after step 1, from gs://bucket/{PREFIX}checkpoints/step-00000001" in again[0].said
    # A process reads whole files, each once; both need the arrays that are not sharded, such as the norms' weights.
    reads = {name: ranges for name, ranges in gcs.downloads.items() if "step-00000001" in name}
    for name in first_saved.values():
        assert set(reads[name]) == {(0, len(gcs.read(name)))}, name
        assert len(reads[name]) <= 2, name
    assert sum(len(reads[name]) == 1 for name in first_saved.values()) > len(first_saved) / 2

    gcs.download(PREFIX, tmp_path / "copy")
    killed = TinyRun(tmp_path / "copy", remote.config)
    assert comparable(killed) == comparable(shared)
    found, expected = outcome(killed), outcome(shared)
    # Worker counters accumulate over restarts, and each start has its own worker.
    joined = [result["progress"].pop("worker_counts")["joined"] for result in (found, expected)]
    assert joined == [2, 1]
    for part in ("steps", "progress", "state", "rollouts", "hf"):
        assert found[part] == expected[part], part


@pytest.mark.medium
def test_error_in_main_process_ends_all_processes(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    with lock(RunDirectory(run.path)):
        first, second = train(run, 2, code=1)
    error = f"run directory '{run.path}' is in use by process {os.getpid()}"
    assert f"error: {error}" in first
    assert f"error: the main training process ended with an error: RunInUseError: {error}" in second


DEVICES = 4
"""Devices of all processes of a run in `mode: sync` together."""


def make_sync(folder: Path, **changes: Any) -> TinyRun:
    """A run whose groups are not a multiple of the processes: 7 per step, 4 in checks and 16 in evaluations."""
    folder.mkdir()
    settings = {"rollouts__prompts_per_step": 7, "checkpoint__every": 1, "checkpoint__keep_every": 1}
    return make_run(folder, **{**settings, **changes})


def train_sync(run: TinyRun, count: int, **how: Any) -> list[str]:
    return train(run, count, devices=DEVICES // count, **how)


@pytest.fixture(scope="module")
def sync_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TinyRun]:
    """Runs on the same devices, by their number of processes; that of two is killed inside its fourth checkpoint."""
    folder = tmp_path_factory.mktemp("sync")
    runs = {count: make_sync(folder / str(count)) for count in (1, 2)}
    training = hosts(runs[2], 2, devices=DEVICES // 2)
    # The main process; the other one ends by itself without it.
    training[0].popen = functools.partial(popen, kill_at=(r"os\.mkdir .*\.step-00000003\.[^/]*partial$", 3))
    with started(training):
        codes = [host.end() for host in training]
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    assert training[0].saved_steps == 2
    for count, run in runs.items():
        train_sync(run, count)
    return runs


def assert_equal_to_rounding(found: TinyRun, expected: TinyRun) -> None:
    """Compare two runs on the same number of devices, which differ in the order of sums over devices."""
    assert found.steps() == expected.steps()
    for metrics, others in zip(comparable(found), comparable(expected), strict=True):
        assert metrics.keys() == others.keys()
        for name, value in others.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    rollouts, other_rollouts = stored(found.path / "rollouts"), stored(expected.path / "rollouts")
    assert rollouts.keys() == other_rollouts.keys()
    for name, rows in other_rollouts.items():
        # The same tokens, because each request has its own random numbers.
        assert [row["id"] for row in rollouts[name]] == [row["id"] for row in rows]
        assert [row["turns"][0]["token_ids"] for row in rollouts[name]] == [
            row["turns"][0]["token_ids"] for row in rows
        ]
    weights = load_file(found.path / "hf" / "model.safetensors")
    for name, array in load_file(expected.path / "hf" / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], array, atol=1e-4, err_msg=name)


def test_killed_processes_sample_and_train_like_one(sync_runs: dict[int, TinyRun]) -> None:
    """tests/pods/test_iris_jobs.py kills the other process."""
    run = sync_runs[2]
    assert "resuming after step 2, from " in (run.path / "log.txt").read_text()
    assert_equal_to_rounding(run, sync_runs[1])
    assert all(record["grad_norm"] > 0 for record in run.records()[1:])
    accuracies = [record["eval/ones/accuracy_sampled"] for record in run.records() if "eval/ones/tasks" in record]
    assert accuracies[-1] > accuracies[0] + 0.3


def test_processes_evaluate_like_one(sync_runs: dict[int, TinyRun], tmp_path: Path) -> None:
    run = sync_runs[2]
    evaluations = [
        LiveRun(
            ["--run", str(run.path), "--json", *flags],
            run.path,
            tmp_path / f"output-{index}.txt",
            TIMEOUT,
            environment=cpu_host(2),
            program="marin_rl.evaluate",
            popen=popen,
        )
        for index, flags in enumerate(distributed_flags(2, "distributed"))
    ]
    with started(evaluations):
        assert [process.end() for process in evaluations] == [0, 0]
    first, second = (process.said for process in evaluations)
    # Gloo writes to the same stream.
    [line] = [line for line in first.splitlines() if line.startswith("{")]
    assert not any(line.startswith("{") for line in second.splitlines())
    last = {name: value for name, value in run.records()[-1].items() if name.startswith("eval/")}
    found = without_losses({name: value for name, value in json.loads(line).items() if name.startswith("eval/")})
    assert found == last


def test_an_error_in_one_process_ends_the_other_with_its_message(tmp_path: Path) -> None:
    run = make_sync(tmp_path / "run", warm_start__max_steps=0, evaluation__tasks=0, num_steps=20)
    long = {"prompt": 20 * "x", "answer": "1", "worked_answer": "1"}
    with (tmp_path / "run" / "problems.jsonl").open("a") as file:
        file.write(json.dumps(long))
    outputs = train_sync(run, 2, code=1)
    errors = [next(line for line in output.splitlines() if line.startswith("error: ")) for output in outputs]
    # One process samples the group of this task.
    [failed] = [index for index, error in enumerate(errors) if "training process" not in error]
    cause = errors[failed].removeprefix("error: ")
    assert "prompt" in cause
    assert errors[1 - failed] == f"error: training process {failed} ended with an error: PromptTooLongError: {cause}"


def test_a_stopped_run_resumes_in_one_process(tmp_path: Path) -> None:
    run = make_sync(tmp_path / "run", num_steps=100_000, warm_start__max_steps=0, evaluation__tasks=0)
    training = hosts(run, 2, devices=2)
    with started(training):
        training[0].wait_until(lambda: training[0].saved_steps >= 2, "the checkpoint of step 2")
        training[1].process.terminate()
        assert [host.end() for host in training] == [0, 0], [host.output.read_text() for host in training]
        assert "stopped after step" in training[0].output.read_text()
    saved = training[0].saved_steps
    set_num_steps(run, saved + 2)
    assert run.train() == 0
    assert f"resuming after step {saved}, from " in (run.path / "log.txt").read_text()
    assert [record["step"] for record in run.records()] == list(range(saved + 3))
