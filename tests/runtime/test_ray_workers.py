# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The coordinator's desk over Ray, without a cluster; with one it is tested in tests/faults/test_dead_workers.py."""

import contextlib
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from marin_rl.config.command_line import to_yaml
from marin_rl.config.sections import Mode, WorkersConfig
from marin_rl.runtime import ray_workers
from marin_rl.runtime.coordinator import CoordinatorActor, TrainerUpdate
from marin_rl.runtime.ray_workers import (
    CoordinatorClient,
    NoClusterError,
    RayLostError,
    check_node,
    find_cluster,
    join_cluster,
)
from tests.free_port import free_port
from tests.runtime.bare_run import make_config

NOTHING = TrainerUpdate("one", [], None, {}, {}, {})


class Coordinator(ActorHandle):
    """A handle of an actor that there is not; a call of it is its arguments."""

    take = stop = run = SimpleNamespace(remote=lambda *arguments: arguments)

    def __init__(self) -> None:
        pass

    def __del__(self) -> None:
        pass


class Cluster:
    """What is asked of Ray, with a coordinator that answers the last of some answers for good."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.nodes = [{"NodeID": "here" * 8, "Alive": True}, {"NodeID": "there" * 8, "Alive": True}]
        self.asked = 0

    def get(self, question: Any) -> Any:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster(NOTHING)
    context = SimpleNamespace(get_node_id=lambda: "here" * 8)
    monkeypatch.setattr(ray_workers.ray, "get", made.get)
    monkeypatch.setattr(ray_workers.ray, "nodes", lambda: made.nodes)
    monkeypatch.setattr(ray_workers.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_workers, "ASK_AGAIN", 0.0)
    return made


def test_a_coordinator_that_comes_back_is_asked_again(cluster: Cluster) -> None:
    cluster.answers = [RayActorError(), RayActorError(), NOTHING]
    assert CoordinatorClient(Coordinator(), 60.0).take([], 1.0) == NOTHING
    assert cluster.asked == 3


def test_one_that_does_not_come_back_is_waited_for_so_long(cluster: Cluster) -> None:
    cluster.answers = [RayActorError()]
    with pytest.raises(RayActorError):
        CoordinatorClient(Coordinator(), 0.01).stop()


@pytest.mark.parametrize(
    "nodes", [[], [{"NodeID": "here" * 8, "Alive": False}, {"NodeID": "there" * 8, "Alive": True}]]
)
@pytest.mark.parametrize("answer", [RayActorError(), NOTHING])
def test_where_rays_node_has_died_nobody_waits(cluster: Cluster, nodes: list[Any], answer: Any) -> None:
    cluster.answers, cluster.nodes = [answer], nodes
    with pytest.raises(
        RayLostError, match=r"Ray's node herehere on this machine has died, .* run the same command again"
    ):
        CoordinatorClient(Coordinator(), 1e9).take([], 1.0)
    assert cluster.asked == 1


def test_a_worker_that_could_not_even_begin_is_told_of(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RayActorError(error_msg="The actor died because of an error in its creation\nImportError: no such thing\n")
    monkeypatch.setattr(ray_workers.ray, "wait", lambda ends, timeout: ([end for end in ends if end], []))
    desk = CoordinatorClient(Coordinator(), 60.0)
    desk.watch({"worker-0": None, "worker-1": "its end"})
    # Ray is asked for what came, for the end of nobody, and for that of the second worker.
    cluster.answers = [NOTHING, [], lost]
    assert desk.take([], 1.0).failure == "worker-1: ImportError: no such thing"
    # What a worker itself has told goes before.
    cluster.answers = [NOTHING._replace(failure="worker-1: OSError: no disk")]
    assert desk.take([], 1.0).failure == "worker-1: OSError: no disk"


def test_while_groups_come_nobody_asks(cluster: Cluster) -> None:
    came = NOTHING._replace(groups=[((1, 0), "group")])
    cluster.answers, cluster.nodes = [came], []
    assert CoordinatorClient(Coordinator(), 1.0).take([], 1.0) == came


def test_other_machines_may_die(cluster: Cluster) -> None:
    cluster.nodes[1]["Alive"] = False
    check_node()


@pytest.fixture
def actors(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[type, dict[str, Any]]:
    """What is asked of Ray for each kind of actor; none is started."""
    asked: dict[type, dict[str, Any]] = {}

    def actor(kind: type, **options: Any) -> Any:
        asked[kind] = options
        return SimpleNamespace(remote=lambda *arguments: Coordinator())

    monkeypatch.setattr(ray_workers, "_actor", actor)
    monkeypatch.setattr(ray_workers, "connected_to_local_node", contextlib.nullcontext)
    for name, answer in (("init", None), ("shutdown", None), ("kill", None), ("wait", ([], []))):
        monkeypatch.setattr(ray_workers.ray, name, lambda *arguments, answer=answer, **named: answer)
    return asked


def test_workers_that_wait_for_orders_keep_nobody_from_being_heard(actors: dict[type, dict[str, Any]]) -> None:
    config = make_config(mode=Mode.ASYNC, workers=WorkersConfig(num_workers=500))
    with ray_workers.ray_workers(config, 10, "token"):
        # Each may ask for orders and be kept waiting, and still say that it is alive and hand a group in.
        assert actors[CoordinatorActor]["max_concurrency"] > 500


def test_a_coordinator_that_stays_down_is_not_waited_for_at_the_end(
    cluster: Cluster,
    actors: dict[type, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ray_workers, "SHUTDOWN_TIMEOUT", 0.01)
    config = make_config(mode=Mode.ASYNC, workers=WorkersConfig(no_progress_timeout=1e9))
    with ray_workers.ray_workers(config, 10, "token"):
        cluster.answers = [RayActorError()]
    assert "the coordinator did not hear that the run is over" in caplog.text


def test_an_error_that_keeps_a_worker_from_beginning_is_told_to_the_trainer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_policy(*arguments: Any) -> None:
        logging.getLogger("marin_rl.environments.tool_use").debug("a tool call")
        logging.getLogger("marin_rl.rollouts.rollout_builder").debug("a step")
        raise OSError("there is no bubblewrap")

    told: list[tuple[str, str]] = []
    fail = SimpleNamespace(remote=lambda *arguments: told.append(arguments))
    monkeypatch.setattr(Coordinator, "fail", fail, raising=False)
    monkeypatch.setattr(ray_workers.ray, "get_actor", lambda name: Coordinator())
    monkeypatch.setattr("marin_rl.runtime.worker_policy.ReceivedPolicy", no_policy)
    config = make_config(mode=Mode.ASYNC, run_dir=str(tmp_path), logging={"marin_rl.environments": "debug"})
    with pytest.raises(OSError, match="there is no bubblewrap"):
        ray_workers.Worker(to_yaml(config), 10, "token", "worker-0", "coordinator").run()
    assert told == [("worker-0", "OSError: there is no bubblewrap")]
    log = (tmp_path / "workers" / "worker-0.txt").read_text()
    assert "there is no bubblewrap" in log
    # A worker has the levels of the config.
    assert "DEBUG marin_rl.environments.tool_use: a tool call" in log
    assert "a step" not in log


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        raise ConnectionError("there is none")

    monkeypatch.setattr(ray_workers.ray, "init", init)
    nobody = f"127.0.0.1:{free_port()}"
    for address, reason in ((nobody, "Connection refused"), ("auto", "there is none")):
        with pytest.raises(NoClusterError, match=f"no Ray cluster answers at ray_address '{address}' .*{reason}.*"):
            join_cluster(address)
    with pytest.raises(NoClusterError):
        find_cluster(nobody)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        find_cluster(f"127.0.0.1:{somebody.getsockname()[1]}")
