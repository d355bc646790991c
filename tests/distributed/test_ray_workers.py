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
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from marin_rl.config.sections import Mode, WorkersConfig
from marin_rl.config.yaml_text import to_yaml
from marin_rl.distributed import ray_workers
from marin_rl.distributed.coordinator import CoordinatorActor, TrainerUpdate
from marin_rl.distributed.ray_workers import (
    CoordinatorClient,
    NoClusterError,
    RayLostError,
    check_node,
    find_cluster,
    join_cluster,
)
from tests.free_port import free_port
from tests.training.bare_run import make_config

NOTHING = TrainerUpdate("one", [], None, {}, {}, {})


class Coordinator(ActorHandle):
    """Fake actor handle; a call returns its arguments."""

    take = stop = run = SimpleNamespace(remote=lambda *arguments: arguments)

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


class Cluster:
    """Fake of Ray with prepared responses, of which the last is repeated."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.nodes = [{"NodeID": "here" * 8, "Alive": True}, {"NodeID": "there" * 8, "Alive": True}]
        self.calls = 0

    def get(self, question: Any) -> Any:
        self.calls += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    fake = Cluster(NOTHING)
    context = SimpleNamespace(get_node_id=lambda: "here" * 8)
    monkeypatch.setattr(ray_workers.ray, "get", fake.get)
    monkeypatch.setattr(ray_workers.ray, "nodes", lambda: fake.nodes)
    monkeypatch.setattr(ray_workers.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_workers, "RETRY_SECONDS", 0.0)
    return fake


def test_call_is_retried_until_coordinator_returns(cluster: Cluster) -> None:
    cluster.answers = [RayActorError(), RayActorError(), NOTHING]
    assert CoordinatorClient(Coordinator(), 60.0).take([], 1.0) == NOTHING
    assert cluster.calls == 3


def test_heartbeat_reaches_the_coordinator(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SimpleNamespace(remote=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(Coordinator, CoordinatorActor.heartbeat.__name__, method, raising=False)
    calls: list[tuple[str, ...]] = []
    cluster.answers = [True]
    assert CoordinatorClient(Coordinator(), 60.0).heartbeat("worker-0", "first")
    assert calls == [("worker-0", "first")]


def test_call_fails_after_no_progress_timeout(cluster: Cluster) -> None:
    cluster.answers = [RayActorError()]
    with pytest.raises(RayActorError):
        CoordinatorClient(Coordinator(), 0.01).stop()


@pytest.mark.parametrize(
    "nodes", [[], [{"NodeID": "here" * 8, "Alive": False}, {"NodeID": "there" * 8, "Alive": True}]]
)
@pytest.mark.parametrize("answer", [RayActorError(), NOTHING])
def test_call_fails_at_once_when_ray_node_is_dead(cluster: Cluster, nodes: list[Any], answer: Any) -> None:
    cluster.answers, cluster.nodes = [answer], nodes
    with pytest.raises(
        RayLostError, match=r"Ray's node herehere on this machine has died, .* run the same command again"
    ):
        CoordinatorClient(Coordinator(), 1e9).take([], 1.0)
    assert cluster.calls == 1


def test_worker_that_fails_to_start_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RayActorError(error_msg="The actor died because of an error in its creation\nImportError: no such thing\n")
    monkeypatch.setattr(ray_workers.ray, "wait", lambda ends, timeout: ([end for end in ends if end], []))
    client = CoordinatorClient(Coordinator(), 60.0)
    client.watch({"worker-0": None, "worker-1": "its end"})
    # Responses to: the poll, the result of worker-0, and the result of worker-1.
    cluster.answers = [NOTHING, [], lost]
    assert client.take([], 1.0).failure == "worker-1: ImportError: no such thing"
    # An error that the worker itself reported takes precedence.
    cluster.answers = [NOTHING._replace(failure="worker-1: OSError: no disk")]
    assert client.take([], 1.0).failure == "worker-1: OSError: no disk"


def test_node_is_not_checked_while_groups_arrive(cluster: Cluster) -> None:
    finished = NOTHING._replace(groups=[((1, 0), "group")])
    cluster.answers, cluster.nodes = [finished], []
    assert CoordinatorClient(Coordinator(), 1.0).take([], 1.0) == finished


def test_dead_nodes_of_other_machines_are_ignored(cluster: Cluster) -> None:
    cluster.nodes[1]["Alive"] = False
    check_node()


@pytest.fixture
def actors(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[type, dict[str, Any]]:
    """Options of each actor class; no actor is started."""
    options_by_class: dict[type, dict[str, Any]] = {}

    def actor(kind: type, **options: Any) -> Any:
        options_by_class[kind] = options
        return SimpleNamespace(remote=lambda *arguments: Coordinator())

    monkeypatch.setattr(ray_workers, "_actor", actor)
    monkeypatch.setattr(ray_workers, "connected_to_local_node", contextlib.nullcontext)
    for name, answer in (("init", None), ("shutdown", None), ("kill", None), ("wait", ([], []))):
        monkeypatch.setattr(ray_workers.ray, name, lambda *arguments, answer=answer, **named: answer)
    return options_by_class


def test_coordinator_concurrency_exceeds_number_of_workers(actors: dict[type, dict[str, Any]]) -> None:
    config = make_config(mode=Mode.ASYNC, workers=WorkersConfig(num_workers=500))
    with ray_workers.ray_workers(config, 10, "token"):
        # Each worker may have a waiting call and still send heartbeats and groups.
        assert actors[CoordinatorActor]["max_concurrency"] > 500


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

    reported: list[tuple[str, str]] = []
    fail = SimpleNamespace(remote=lambda *arguments: reported.append(arguments))
    monkeypatch.setattr(Coordinator, "fail", fail, raising=False)
    monkeypatch.setattr(ray_workers.ray, "get_actor", lambda name: Coordinator())
    monkeypatch.setattr(ray_workers, "ReceivedPolicy", no_policy)
    config = make_config(mode=Mode.ASYNC, run_dir=str(tmp_path), logging={"marin_rl.environments": "debug"})
    with pytest.raises(OSError, match="there is no bubblewrap"):
        ray_workers.Worker(to_yaml(config), 10, "token", "worker-0", "coordinator").run()
    assert reported == [("worker-0", "OSError: there is no bubblewrap")]
    log = (tmp_path / "workers" / "worker-0.txt").read_text()
    assert "there is no bubblewrap" in log
    # Workers use the log levels of the config.
    assert "DEBUG marin_rl.environments.tool_use: a tool call" in log
    assert "a step" not in log


def test_unreachable_cluster_is_named_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        raise ConnectionError("there is none")

    monkeypatch.setattr(ray_workers.ray, "init", init)
    free = f"127.0.0.1:{free_port()}"
    for address, reason in ((free, "Connection refused"), ("auto", "there is none")):
        with pytest.raises(NoClusterError, match=f"no Ray cluster responds at ray_address '{address}' .*{reason}.*"):
            join_cluster(address)
    with pytest.raises(NoClusterError):
        find_cluster(free)
    with socket.create_server(("127.0.0.1", 0)) as server:
        find_cluster(f"127.0.0.1:{server.getsockname()[1]}")
