# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A rollout worker: fetches weights, plays groups, hands them in, until the run is over."""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, runtime_checkable

from marin_rl.rollouts.group_codec import encode_group
from marin_rl.rollouts.scheduler import GroupRequest, RequestNumber
from marin_rl.runtime.coordinator import Announcement, Assignment
from marin_rl.runtime.rollout_source import FinishedGroup
from marin_rl.types import WeightVersion

logger = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds until a worker that weights do not reach asks for them again."""


@runtime_checkable
class WorkerDesk(Protocol):
    """What a worker asks of a coordinator.

    A call whose answer got lost comes again: nothing is taken, played or lost twice by that.
    """

    def join(self, worker: str, incarnation: str) -> None:
        """A worker begins."""
        ...

    def next_work(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        playing: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """What to play next, besides what is played; None where the worker has to join anew."""
        ...

    def announced(self) -> Announcement:
        """The newest weights."""
        ...

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: str) -> bool:
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

    @property
    def is_in_flight(self) -> bool:
        """Whether it goes over to newer weights while it plays."""
        ...

    def fetch(self, addresses: Sequence[str]) -> bool:
        """Take the newest weights that are offered at these addresses; False where they do not come now."""
        ...

    def play(
        self, orders: Sequence[GroupRequest], on_group_done: Callable[[FinishedGroup], Sequence[GroupRequest]]
    ) -> None:
        """Play groups until there are none.

        Args:
            orders: what to play first.
            on_group_done: is given each group as soon as it is whole, from any thread; says what to play in its place.
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
    with telling_errors(desk, name), _Heartbeat(lambda: desk.beat(name, incarnation), silence / 4):
        _work(desk, name, incarnation, policy, poll)
    desk.leave(name, incarnation)


@contextlib.contextmanager
def telling_errors(desk: WorkerDesk, name: str) -> Iterator[None]:
    """Tell the trainer, who would wait for the worker, what ended it.

    Args:
        desk: the coordinator.
        name: the worker's.
    """
    try:
        yield
    except Exception as error:
        desk.fail(name, f"{type(error).__name__}: {error}")
        raise


def _work(desk: WorkerDesk, name: str, incarnation: str, policy: WorkerPolicy, poll: float) -> None:
    is_cut_off = False
    while True:
        told = desk.next_work(name, incarnation, policy.version, 0 if is_cut_off else policy.room, (), poll)
        if told is None:
            logger.warning("worker %s was given up; it joins anew", name)
            desk.join(name, incarnation)
            continue
        if told.stop:
            return
        is_cut_off = told.newest.is_newer_than(policy.version) and not policy.fetch(told.newest.addresses)
        if is_cut_off:
            # The next question takes no orders, and says that none is played: what it was handed goes to others.
            time.sleep(min(poll, PAUSE))
        elif told.orders:
            policy.play(told.orders, _Places(desk, name, incarnation, policy, told.orders).on_group_done)


class _Places:
    """What a worker plays at the same time: a group that is whole makes place for others."""

    def __init__(
        self, desk: WorkerDesk, name: str, incarnation: str, policy: WorkerPolicy, orders: Sequence[GroupRequest]
    ) -> None:
        self._desk = desk
        self._name = name
        self._incarnation = incarnation
        self._policy = policy
        self._playing = {order.number for order in orders}
        self._lock = threading.Lock()

    def on_group_done(self, played: FinishedGroup) -> list[GroupRequest]:
        """Hand in a group, and take as many orders as there is place for."""
        self._desk.finish(self._name, self._incarnation, played.number, encode_group(played.group))
        with self._lock:
            self._playing.remove(played.number)
            orders = self._more()
            self._playing |= {order.number for order in orders}
            return orders

    def _more(self) -> list[GroupRequest]:
        version = self._policy.version
        # Between groups the places stay empty until all have ended, and the newer weights are fetched.
        if not self._policy.is_in_flight and self._desk.announced().is_newer_than(version):
            return []
        room = self._policy.room - len(self._playing)
        told = self._desk.next_work(self._name, self._incarnation, version, room, sorted(self._playing), 0.0)
        return [] if told is None or told.stop else told.orders


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
