# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Workers with a fake Ray; tests/faults/test_dead_workers.py tests them with a cluster."""

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from marin_rl.config.input_files import Inputs, digest_inputs
from marin_rl.config.ray_cluster import NoClusterError, find_cluster
from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import WeightTransferConfig, WorkersConfig
from marin_rl.distributed import ray_workers
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.worker_program import WorkerProgram, open_only_reserved
from marin_rl.environments.dataset import JsonlConfig
from marin_rl.training.worker import run_worker
from marin_rl.utils.multihost import ProcessesDifferError
from marin_rl.utils.settings.yaml_text import to_yaml
from tests.distributed.fake_ray import Actor, Cluster
from tests.free_port import free_port
from tests.training.bare_run import make_config


@pytest.fixture
def actors(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[type, dict[str, Any]]:
    """Options of each actor class; no actor is started."""
    options_by_class: dict[type, dict[str, Any]] = {}

    def actor(kind: type, **options: Any) -> Any:
        options_by_class[kind] = options
        return SimpleNamespace(remote=lambda *arguments: Actor())

    monkeypatch.setattr(ray_workers, "_actor", actor)
    monkeypatch.setattr(ray_workers, "connected_to_local_node", contextlib.nullcontext)
    for name, answer in (("init", None), ("shutdown", None), ("kill", None), ("wait", ([], []))):
        monkeypatch.setattr(ray, name, lambda *arguments, answer=answer, **named: answer)
    return options_by_class


@pytest.mark.medium
def test_coordinator_concurrency_exceeds_number_of_workers(actors: dict[type, dict[str, Any]]) -> None:
    config = make_config(mode=Mode.ASYNC, workers=WorkersConfig(num_workers=500))
    with ray_workers.ray_workers(run_worker, config, {}, 10, "", "token"):
        # Each worker may have a waiting call and still send heartbeats and groups.
        assert actors[Coordinator]["max_concurrency"] > 500


def test_shutdown_does_not_wait_for_a_dead_coordinator(
    cluster: Cluster,
    actors: dict[type, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ray_workers, "SHUTDOWN_TIMEOUT", 0.01)
    config = make_config(mode=Mode.ASYNC, workers=WorkersConfig(no_progress_timeout=1e9))
    with ray_workers.ray_workers(run_worker, config, {}, 10, "", "token"):
        cluster.answers = [RayActorError()]
    assert "the coordinator could not be stopped" in caplog.text


def run_ray_worker(config: TrainConfig, inputs: Inputs) -> None:
    program = WorkerProgram(run_worker, to_yaml(config), inputs, 10, "", "worker-0")
    ray_workers.RayWorker(program, "token", "coordinator").run()


def test_a_worker_with_other_input_files_ends_the_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray, "get_actor", lambda name: Actor())
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text("of the trainer")
    config = make_config(mode=Mode.ASYNC, run_dir=str(tmp_path), environment=JsonlConfig("data.jsonl"))
    inputs = digest_inputs(config)
    data.write_text("of the worker")
    with pytest.raises(ProcessesDifferError):
        run_ray_worker(config, inputs)
    [(kind, name, message)] = cluster.questions
    assert (kind, name) == ("fail", "worker-0")
    assert "environment: data.jsonl was changed" in message


def test_worker_start_error_is_logged_and_reported(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_policy(*arguments: Any) -> None:
        logging.getLogger("marin_rl.environments.tool_use").debug("a tool call")
        logging.getLogger("marin_rl.rollouts.rollout_builder").debug("a step")
        raise OSError("there is no bubblewrap")

    monkeypatch.setattr(ray, "get_actor", lambda name: Actor())
    monkeypatch.setattr("marin_rl.training.worker.WorkerPolicy", no_policy)
    config = make_config(mode=Mode.ASYNC, run_dir=str(tmp_path), logging={"marin_rl.environments": "debug"})
    with pytest.raises(OSError, match="there is no bubblewrap"):
        run_ray_worker(config, {})
    assert cluster.questions == [("fail", "worker-0", "OSError: there is no bubblewrap")]
    log = (tmp_path / "workers" / "worker-0.txt").read_text()
    assert "there is no bubblewrap" in log
    # Workers use the log levels of the config.
    assert "DEBUG marin_rl.environments.tool_use: a tool call" in log
    assert "a step" not in log


def test_unreachable_cluster_is_named_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        raise ConnectionError("there is none")

    monkeypatch.setattr(ray, "init", init)
    free = f"127.0.0.1:{free_port()}"
    for address, reason in ((free, "Connection refused"), ("auto", "there is none")):
        config = make_config(mode=Mode.ASYNC, ray_address=address, weights=WeightTransferConfig(host="0.0.0.0"))
        message = f"no Ray cluster responds at ray_address '{address}' .*{reason}.*"
        with (
            pytest.raises(NoClusterError, match=message),
            ray_workers.ray_workers(run_worker, config, {}, 10, "", "token"),
        ):
            pass
    with pytest.raises(NoClusterError):
        find_cluster(free)
    with socket.create_server(("127.0.0.1", 0)) as server:
        find_cluster(f"127.0.0.1:{server.getsockname()[1]}")


# Devices of workers.


def test_a_worker_on_one_host_of_a_slice_does_not_wait_for_the_others() -> None:
    environ = {"TPU_PROCESS_BOUNDS": "2,2,1"}
    open_only_reserved({"CPU": 1.0, "TPU": 4.0}, environ)
    assert environ["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"


OPENED = """
import os, jax
from marin_rl.distributed.worker_program import open_only_reserved
open_only_reserved({RESERVED}, os.environ)
print(jax.config.jax_platforms)
"""


@pytest.mark.medium
@pytest.mark.parametrize(("reserved", "platforms"), [({"CPU": 1.0}, "cpu"), ({"GPU": 1.0}, "cuda,cpu")])
def test_a_worker_without_accelerators_runs_on_the_cpu(
    reserved: dict[str, float], platforms: str, tmp_path: Path
) -> None:
    """Run in a separate process, whose platforms this one must not change."""
    program = OPENED.replace("{RESERVED}", repr(reserved))
    environment = {**os.environ, "JAX_PLATFORMS": "cuda,cpu"}
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert said.stdout.strip() == platforms


# TPU slices, in a local cluster whose node has the resources and labels of a slice, but no TPU.

PROGRAM = """
import json, os, threading
# Ray asks the node for the name of its slice.
os.environ |= {"TPU_NAME": "slice-a"}
import ray
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed import ray_workers

LABELS = {"ray.io/tpu-pod-type": "v6e-16", "ray.io/tpu-worker-id": "0", "ray.io/tpu-slice-name": "slice-a"}
ray_workers.POLL_SECONDS = 0.1
resources = {"TPU": 16, "TPU-v6e-16-head": 1, "spot": 4}
ray.init(address="local", num_cpus=8, resources=resources, labels=LABELS, include_dashboard=False, log_to_driver=False)
before = ray.available_resources()["TPU"]

@ray.remote
class Worker:
    def reserved(self):
        return ray.get_runtime_context().get_assigned_resources()

config = WorkersConfig(num_workers=8, tpu_slice="v6e:4x4", resources={"spot": 1.0})
started, four = {}, threading.Event()

def start(index, place):
    started[index] = Worker.options(scheduling_strategy=place, **ray_workers.ray_options(config.reserved)).remote()
    if len(started) == 4:
        four.set()

slices = ray_workers.SliceReservations(config, start, print)
assert four.wait(600)
amounts = [ray.get(started[index].reserved.remote()) for index in sorted(started)]
# The second slice has not joined.
slices.stop()
during = ray.available_resources().get("TPU", 0)
slices.release()
print(json.dumps([len(started), amounts, before, during]))
"""


def test_error_that_ends_the_thread_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise ValueError("no such topology")

    monkeypatch.setattr(ray_workers, "SlicePlacementGroup", refuse)
    reported: queue.Queue[str] = queue.Queue()
    config = WorkersConfig(num_workers=4, tpu_slice="v6e:4x4")
    slices = ray_workers.SliceReservations(config, lambda index, place: None, reported.put)
    assert reported.get(timeout=600) == "ValueError: no such topology"
    slices.stop()


@pytest.mark.slow
def test_every_host_of_a_reserved_slice_gets_a_worker() -> None:
    """Run in a separate process, because Ray forks."""
    said = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=900)
    assert said.returncode == 0, said.stderr
    started, amounts, before, during = json.loads(said.stdout.splitlines()[-1])
    assert (started, before, during) == (4, 16, 0)
    assert all((amount["CPU"], amount["TPU"], amount["spot"]) == (1, 4, 1) for amount in amounts)
