# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A whole run in two training processes on this machine, with Ray and a rollout worker, beside the same run in one."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import marin_rl
from tests.tiny_run import TinyRun, make_run, without_timings

pytestmark = pytest.mark.slow

SECONDS = 500.0
"""After which a process is ended that has not come to its end."""


def make(folder: Path, **changes: object) -> TinyRun:
    """A run from scratch; an untrained policy is never right, so that a coin gives it something to learn."""
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
            "kl": {"type": "in_reward", "beta": 0.05},
            **changes,
        },
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def train(run: TinyRun, count: int) -> list[str]:
    """Run the command in so many processes of two devices each; what each printed, errors last."""
    place = ["--trainer.distributed.coordinator_address", f"127.0.0.1:{free_port()}"]
    place += ["--trainer.distributed.num_processes", str(count)]
    place += ["--trainer.distributed.initialize_jax_distributed", "true"]
    environment = {
        **os.environ,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(Path(marin_rl.__file__).parents[1]),
    }
    files = [run.path.parent / f"said-{count}-{index}.txt" for index in range(count)]
    running = []
    for index, file in enumerate(files):
        more = [*place, "--trainer.distributed.process_id", str(index)] if count > 1 else []
        command = [sys.executable, "-m", "marin_rl.train", *run.argv, *more]
        with file.open("w") as said:
            running.append(subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT))
    timers = [threading.Timer(SECONDS, process.kill) for process in running]
    try:
        for timer in timers:
            timer.start()
        codes = [process.wait() for process in running]
    finally:
        for timer in timers:
            timer.cancel()
        for process in running:
            process.kill()
            process.wait()
    said = [file.read_text() for file in files]
    assert codes == [0] * count, "\n".join(text[-3000:] for text in said)
    return said


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    alone, shared = make(tmp_path / "alone"), make(tmp_path / "shared")
    train(alone, 1)
    said = train(shared, 2)
    assert "Evaluate it again" in said[0]
    assert "Evaluate it again" not in said[1]
    assert [record["step"] for record in shared.records()] == [0, 1, 2, 3]
    for found, expected in zip(shared.records()[1:], alone.records()[1:], strict=True):
        found, expected = without_timings(found), without_timings(expected)
        assert found.keys() == expected.keys()
        for name in ("episode", "loss/total", "grad_norm", "policy/entropy_avg", "objective/kl"):
            # The same rollouts; sums over four devices in two processes are not those over two.
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert found["grad_norm"] > 0
    weights = load_file(shared.path / "hf" / "model.safetensors")
    for name, array in load_file(alone.path / "hf" / "model.safetensors").items():
        np.testing.assert_allclose(weights[name], array, atol=1e-4, err_msg=name)
    assert shared.steps() == [0, 2, 3]
    assert not list(shared.checkpoints.glob(".*"))
    assert (shared.path / "processes" / "1.txt").is_file()
