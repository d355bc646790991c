# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator client with a fake Ray; tests/faults/test_dead_workers.py tests it with a cluster."""

import contextlib
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from marin_rl.config.sections import Mode
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.config.yaml_text import to_yaml
from marin_rl.distributed import coordinator_client, ray_workers
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient, RayLostError, check_node
from marin_rl.distributed.ray_workers import NoClusterError, find_cluster, join_cluster
from tests.free_port import free_port
from tests.training.bare_run import make_config


class Actor(ActorHandle):
    """Fake actor handle; a call returns its method and arguments."""

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments, **named: (name, *arguments))

    def __del__(self) -> None:
        pass


class Cluster:
    """Fake of Ray with prepared responses, of which the last is repeated."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.nodes = [{"NodeID": "here" * 8, "Alive": True}, {"NodeID": "there" * 8, "Alive": True}]
        self.questions: list[Any] = []
        self.timeouts: list[float | None] = []

    def get(self, question: Any, timeout: float | None = None) -> Any:
        self.questions.append(question)
        self.timeouts.append(timeout)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster(None)
    context = SimpleNamespace(get_node_id=lambda: "here" * 8)
    monkeypatch.setattr(ray, "get", fake.get)
    monkeypatch.setattr(ray, "nodes", lambda: fake.nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(coordinator_client, "RETRY_SECONDS", 0.0)
    return fake


def test_call_is_retried_until_coordinator_returns(cluster: Cluster) -> None:
    cluster.answers = [RayActorError(), RayActorError(), True]
    assert CoordinatorClient(Actor(), 60.0).call(Coordinator.heartbeat, "worker-0", "first")
    assert cluster.questions == [("heartbeat", "worker-0", "first")] * 3


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()])
def test_call_fails_after_no_progress_timeout(cluster: Cluster, error: Exception) -> None:
    cluster.answers = [error]
    message = r"coordinator of the rollout workers has not answered for 0\.01 s .* run the same command again"
    with pytest.raises(RayLostError, match=message):
        CoordinatorClient(Actor(), 0.01).call(Coordinator.stop)


def test_call_to_paused_coordinator_has_time_limit(cluster: Cluster) -> None:
    CoordinatorClient(Actor(), 60.0).call(Coordinator.heartbeat, "worker-0", "first")
    (limit,) = cluster.timeouts
    assert limit is not None
    assert 60.0 < limit <= 60.0 + coordinator_client.ANSWER_SECONDS


DEAD = {"NodeID": "here" * 8, "Alive": False}


@pytest.mark.parametrize("nodes", [[], [DEAD, {"NodeID": "there" * 8, "Alive": True}]])
def test_call_fails_at_once_when_ray_node_is_dead(cluster: Cluster, nodes: list[Any]) -> None:
    cluster.answers, cluster.nodes = [RayActorError()], nodes
    client = CoordinatorClient(Actor(), 1e9)
    message = r"Ray's node herehere on this machine has died, .* run the same command again"
    with pytest.raises(RayLostError, match=message):
        client.call(Coordinator.take)
    assert len(cluster.questions) == 1
    with pytest.raises(RayLostError, match=message):
        client.find_failure()


def test_worker_that_fails_to_start_is_found(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RayActorError(error_msg="The actor died because of an error in its creation\nImportError: no such thing\n")
    monkeypatch.setattr(ray, "wait", lambda ends, timeout: ([end for end in ends if end], []))
    client = CoordinatorClient(Actor(), 60.0, {"worker-0": None, "worker-1": "its end"})
    # Responses to: the result of worker-0, which still runs, and the result of worker-1.
    cluster.answers = [[], lost]
    assert client.find_failure() == "worker-1: ImportError: no such thing"
    cluster.answers = [[]]
    assert client.find_failure() is None


def test_dead_nodes_of_other_machines_are_ignored(cluster: Cluster) -> None:
    cluster.nodes[1]["Alive"] = False
    check_node()


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
    with ray_workers.ray_workers(config, 10, "token"):
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
    with ray_workers.ray_workers(config, 10, "token"):
        cluster.answers = [RayActorError()]
    assert "the coordinator could not be stopped" in caplog.text


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
        ray_workers.Worker(to_yaml(config), 10, "token", "worker-0", "coordinator").run()
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
