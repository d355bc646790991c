# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A rollout worker: fetches weights, plays groups, hands them in, until the run is over."""

import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from marin_rl.rollouts.group_codec import encode_group
from marin_rl.rollouts.orders import GroupOrder, OrderNumber
from marin_rl.runtime.coordinator import Work
from marin_rl.runtime.crew import Played
from marin_rl.types import WeightVersion

logger = logging.getLogger(__name__)


@runtime_checkable
class WorkerDesk(Protocol):
    """What a worker asks of a coordinator; calls may be repeated without harm."""

    def join(self, worker: str, incarnation: str) -> None:
        """A worker begins."""
        ...

    def next_work(
        self, worker: str, incarnation: str, version: WeightVersion | None, room: int, seconds: float
    ) -> Work | None:
        """What to play next; None where the worker has to join anew."""
        ...

    def finish(self, worker: str, incarnation: str, number: OrderNumber, group: str) -> bool:
        """A group is played."""
        ...

    def beat(self, worker: str, incarnation: str) -> bool:
        """The worker is alive."""
        ...

    def fail(self, worker: str, error: str) -> None:
        """An error ends the worker."""
        ...

    def leave(self, worker: str, incarnation: str) -> None:
        """The worker ends in good order."""
        ...


@runtime_checkable
class WorkerPolicy(Protocol):
    """What a worker plays with."""

    @property
    def version(self) -> WeightVersion | None:
        """Of the weights that it has; None for none."""
        ...

    @property
    def room(self) -> int:
        """Groups that it plays together."""
        ...

    def fetch(self, addresses: Sequence[str]) -> None:
        """Take the newest weights that are offered at these addresses."""
        ...

    def play(self, orders: Sequence[GroupOrder], hand_in: Callable[[Played], None]) -> None:
        """Play groups.

        Args:
            orders: what to play.
            hand_in: is given each group as soon as it is whole, from any thread.
        """
        ...


def work(desk: WorkerDesk, name: str, policy: WorkerPolicy, *, silence: float, poll: float = 5.0) -> None:
    """Work until the run is over.

    Args:
        desk: the coordinator.
        name: the worker's, unique in the run.
        policy: plays.
        silence: seconds after which the coordinator gives up a worker that says nothing; it says something four
            times as often.
        poll: seconds that one question may wait for its answer.

    Raises:
        Exception: whatever ends it; the trainer is told.
    """
    incarnation = uuid.uuid4().hex
    desk.join(name, incarnation)
    try:
        with _Heartbeat(lambda: desk.beat(name, incarnation), silence / 4):
            _work(desk, name, incarnation, policy, poll)
    except Exception as error:
        desk.fail(name, f"{type(error).__name__}: {error}")
        raise
    desk.leave(name, incarnation)


def _work(desk: WorkerDesk, name: str, incarnation: str, policy: WorkerPolicy, poll: float) -> None:
    def hand_in(played: Played) -> None:
        desk.finish(name, incarnation, played.number, encode_group(played.group))

    while True:
        told = desk.next_work(name, incarnation, policy.version, policy.room, poll)
        if told is None:
            logger.warning("worker %s was given up; it joins anew", name)
            desk.join(name, incarnation)
            continue
        if told.stop:
            return
        if told.addresses and told.version != policy.version:
            policy.fetch(told.addresses)
        if told.orders:
            policy.play(told.orders, hand_in)


class _Heartbeat:
    """Says in a thread of its own that the worker is alive, while it plays."""

    def __init__(self, beat: Callable[[], object], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def _run(self) -> None:
        while not self._end.wait(self._seconds):
            try:
                self._beat()
            except Exception:
                # The worker's own next question meets the same trouble, and is where it is dealt with.
                logger.warning("the coordinator does not answer", exc_info=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
