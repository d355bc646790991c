# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Coordinator client with a fake Ray; tests/faults/test_dead_workers.py tests it with a cluster."""

from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from marin_rl.distributed import coordinator_client
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorLostError
from marin_rl.distributed.ray_workers import RayClient
from tests.distributed.fake_ray import Actor, Cluster


def test_call_is_retried_until_coordinator_returns(cluster: Cluster) -> None:
    cluster.answers = [RayActorError(), RayActorError(), True]
    assert RayClient(Actor(), 60.0).call(Coordinator.heartbeat, "worker-0", "first")
    assert cluster.questions == [("heartbeat", "worker-0", "first")] * 3
    # A paused coordinator does not answer.
    assert all(limit and 0.0 < limit <= 60.0 + coordinator_client.ANSWER_SECONDS for limit in cluster.timeouts)


@pytest.mark.parametrize("error", [RayActorError(), GetTimeoutError()])
def test_call_fails_after_no_progress_timeout(cluster: Cluster, error: Exception) -> None:
    cluster.answers = [error]
    message = r"coordinator of the rollout workers has not answered for 0\.01 s .* run the same command again"
    with pytest.raises(CoordinatorLostError, match=message):
        RayClient(Actor(), 0.01).call(Coordinator.stop)


DEAD = {"NodeID": "here" * 8, "Alive": False}


@pytest.mark.parametrize("nodes", [[], [DEAD, {"NodeID": "there" * 8, "Alive": True}]])
def test_call_fails_at_once_when_ray_node_is_dead(cluster: Cluster, nodes: list[Any]) -> None:
    cluster.answers, cluster.nodes = [RayActorError()], nodes
    client = RayClient(Actor(), 1e9)
    message = r"Ray's node herehere on this machine has died, .* run the same command again"
    with pytest.raises(CoordinatorLostError, match=message):
        client.call(Coordinator.take)
    assert len(cluster.questions) == 1
    with pytest.raises(CoordinatorLostError, match=message):
        client.find_failure()


def test_worker_that_fails_to_start_is_found(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RayActorError(error_msg="The actor died because of an error in its creation\nImportError: no such thing\n")
    monkeypatch.setattr(ray, "wait", lambda ends, timeout: ([end for end in ends if end], []))
    client = RayClient(Actor(), 60.0, {"worker-0": None, "worker-1": "its end"})
    # Responses to: the result of worker-0, which still runs, and the result of worker-1.
    cluster.answers = [[], lost]
    assert client.find_failure() == "worker-1: ImportError: no such thing"
    cluster.answers = [[]]
    cluster.nodes[1]["Alive"] = False
    assert client.find_failure() is None
