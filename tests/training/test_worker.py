# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls of a worker to its coordinator, with a fake policy."""

from collections.abc import Callable, Sequence

import pytest

from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import LocalClient
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.rollouts.group_codec import decode_group
from marin_rl.training.worker import NextRequests, RolloutWorker, WorkerPolicy
from marin_rl.types import RolloutGroup, Task, WeightVersion


def request(index: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(RequestNumber(1, index), Task("t", "sums", ({"role": "user", "content": ""},), ""), min_version)


Script = Callable[[Sequence[GroupRequest], NextRequests], None]


class Policy(WorkerPolicy):
    """Fake policy that calls a function instead of running groups."""

    def __init__(self, client: LocalClient, script: Script, *, is_in_flight: bool = False) -> None:
        self.version = None
        self.room = 2
        self.is_in_flight = is_in_flight
        self._client = client
        self._script = script

    def fetch(self, addresses: Sequence[str]) -> bool:
        assert addresses == ("here",)
        self.version = self._client.call(Coordinator.announced).version
        return True

    def run(self, requests: Sequence[GroupRequest], on_group_done: NextRequests) -> None:
        self._script(requests, on_group_done)


def finished(request: GroupRequest) -> RolloutGroup:
    return RolloutGroup(request.number.group_id, [])


def delivered(client: LocalClient) -> list[str]:
    """Return the ids of the groups that the trainer would receive."""
    return [decode_group(data).id for _, data in client.call(Coordinator.take).groups]


def run(client: LocalClient, policy: Policy) -> None:
    RolloutWorker(client, "w", policy, poll=0.0).run(heartbeat_timeout=600.0)


@pytest.fixture
def client() -> LocalClient:
    """Client of a coordinator with five requests, of which the last needs newer weights."""
    client = LocalClient(Coordinator(600.0))
    client.call(Coordinator.announce, 0, ["here"])
    client.call(Coordinator.submit, [*map(request, range(4)), request(4, min_version=1)])
    return client


def indices(requests: Sequence[GroupRequest]) -> list[int]:
    return [item.number.index for item in requests]


def test_worker_without_weights_releases_requests_and_retries(
    client: LocalClient,
) -> None:
    seen: list[tuple[WeightVersion | None, list[int]]] = []
    client.call(Coordinator.announce, 1, ["here"])

    def script(requests: Sequence[GroupRequest], on_group_done: NextRequests) -> None:
        seen.append((policy.version, indices(requests)))
        client.call(Coordinator.stop)
        for one in requests:
            assert on_group_done(finished(one)) == []

    failed: list[list[int]] = []

    class CutOff(Policy):
        """Policy whose first two fetches fail."""

        def fetch(self, addresses: Sequence[str]) -> bool:
            if len(failed) == 2:
                return super().fetch(addresses)
            client.call(Coordinator.join, "other", "o")
            assignment = client.call(Coordinator.next_assignment, "other", "o", 1, 5, ())
            assert assignment is not None
            failed.append(indices(assignment.requests))
            client.call(Coordinator.leave, "other", "o")
            return False

    policy = CutOff(client, script)
    policy.version = 0
    run(client, policy)
    # The worker holds two requests at first, and then none.
    assert failed == [[2, 3, 4], [0, 1, 2, 3, 4]]
    assert seen == [(1, [0, 1])]


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_worker_waits_for_newer_weights_only_between_groups(client: LocalClient, is_in_flight: bool) -> None:
    taken: list[tuple[WeightVersion | None, list[int]]] = []

    def script(requests: Sequence[GroupRequest], on_group_done: NextRequests) -> None:
        taken.append((policy.version, indices(requests)))
        client.call(Coordinator.announce, 1, ["here"])
        waiting = list(requests)
        while waiting:
            more = on_group_done(finished(waiting.pop(0)))
            if more:
                taken.append((policy.version, indices(more)))
            waiting += more
        if len(delivered(client)) == 5:
            client.call(Coordinator.stop)

    policy = Policy(client, script, is_in_flight=is_in_flight)
    run(client, policy)
    if is_in_flight:
        # This policy updates its weights only in `fetch`; a request for newer weights waits until then.
        assert taken == [(0, [0, 1]), (0, [2]), (0, [3]), (1, [4])]
    else:
        assert taken == [(0, [0, 1]), (1, [2, 3]), (1, [4])]


def test_dropped_worker_finishes_its_groups_and_joins_again(client: LocalClient) -> None:
    taken: list[list[int]] = []

    def script(requests: Sequence[GroupRequest], on_group_done: NextRequests) -> None:
        taken.append(indices(requests))
        if len(taken) == 1:
            # Another incarnation of the worker takes over its requests.
            client.call(Coordinator.join, "w", "another")
            assert [on_group_done(finished(one)) for one in requests] == [[], []]
        else:
            client.call(Coordinator.stop)

    run(client, Policy(client, script))
    assert taken == [[0, 1], [2, 3]]
    assert delivered(client) == ["train-1-0", "train-1-1"]
