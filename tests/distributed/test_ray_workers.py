# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Workers with a fake Ray; tests/faults/test_dead_workers.py tests them with a cluster."""

import contextlib
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from marin_rl.config.input_files import digest_inputs
from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.distributed import ray_workers
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.ray_cluster import NoClusterError, find_cluster
from marin_rl.distributed.ray_workers import join_cluster
from marin_rl.environments.dataset import JsonlConfig
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
    with ray_workers.ray_workers(config, {}, 10, "token"):
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
    with ray_workers.ray_workers(config, {}, 10, "token"):
        cluster.answers = [RayActorError()]
    assert "the coordinator could not be stopped" in caplog.text


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
        ray_workers.Worker(to_yaml(config), inputs, 10, "token", "worker-0", "coordinator").run()
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
    monkeypatch.setattr("marin_rl.distributed.worker.WorkerPolicy", no_policy)
    config = make_config(mode=Mode.ASYNC, run_dir=str(tmp_path), logging={"marin_rl.environments": "debug"})
    with pytest.raises(OSError, match="there is no bubblewrap"):
        ray_workers.Worker(to_yaml(config), {}, 10, "token", "worker-0", "coordinator").run()
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
        with pytest.raises(NoClusterError, match=f"no Ray cluster responds at ray_address '{address}' .*{reason}.*"):
            join_cluster(address)
    with pytest.raises(NoClusterError):
        find_cluster(free)
    with socket.create_server(("127.0.0.1", 0)) as server:
        find_cluster(f"127.0.0.1:{server.getsockname()[1]}")
