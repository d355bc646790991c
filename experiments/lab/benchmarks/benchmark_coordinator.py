# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Latency of a request from the trainer to a waiting worker: coordinator as an asyncio and as a threaded Ray actor.

python -m experiments.lab.benchmarks.benchmark_coordinator --rounds 300 --idle 8
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import ray

from experiments.lab.benchmarks.measurement import benchmark_parser, make_report, say, spread
from marin_rl.distributed.coordinator import Assignment, Coordinator
from marin_rl.distributed.ray_node import connected_to_local_node
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.types import Task, WeightVersion

CONCURRENCY = 72
"""Concurrent calls of the actor, as for eight workers."""
TASK = Task("task", "simulated", ({"role": "user", "content": ""},), "")
WAIT = 60.0
"""Seconds that a worker's call may wait."""


class ThreadedCoordinator:
    """A coordinator with one thread per call, a lock, and a condition for waiting calls."""

    def __init__(self, heartbeat_timeout: float) -> None:
        """Make the coordinator.

        Args:
            heartbeat_timeout: see `Coordinator`.
        """
        self._coordinator = Coordinator(heartbeat_timeout)
        self._changed = threading.Condition()

    def _change(self, call: Callable[[], Any]) -> Any:
        with self._changed:
            result = call()
            self._changed.notify_all()
            return result

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """See `Coordinator`."""
        self._change(lambda: self._coordinator.submit(requests))

    def join(self, worker: str, incarnation: str) -> None:
        """See `Coordinator`."""
        self._change(lambda: self._coordinator.join(worker, incarnation))

    def finish(self, worker: str, incarnation: str, number: RequestNumber, group: bytes) -> bool:
        """See `Coordinator`."""
        return self._change(lambda: self._coordinator.finish(worker, incarnation, number, group))

    def stop(self) -> None:
        """See `Coordinator`."""
        self._change(self._coordinator.stop)

    def next_assignment(
        self,
        worker: str,
        incarnation: str,
        version: WeightVersion | None,
        room: int,
        running: Collection[RequestNumber],
        seconds: float,
    ) -> Assignment | None:
        """See `Coordinator`."""
        with self._changed:
            assignment = _result(self._coordinator.next_assignment(worker, incarnation, version, room, running))
            if not (assignment.requests or assignment.stop):
                self._changed.wait(seconds)
                assignment = _result(self._coordinator.next_assignment(worker, incarnation, version, room, running))
            return assignment


def _result(coroutine: Any) -> Any:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")


class Form:
    """A coordinator with one worker that receives requests, and idle workers that wait for newer weights."""

    def __init__(self, kind: type, idle: int) -> None:
        """Start the actor and the idle workers.

        Args:
            kind: class of the actor.
            idle: number of idle workers.
        """
        self._actor = cast(Any, ray.remote(kind)).options(num_cpus=0, max_concurrency=CONCURRENCY).remote(1e9)
        self._threads = ThreadPoolExecutor(idle + 1)
        self._index = 0
        ray.get(self._actor.join.remote("busy", "1"))
        self._idle = [self._threads.submit(self._wait_for_ever, f"idle-{index}") for index in range(idle)]

    def _wait_for_ever(self, name: str) -> None:
        ray.get(self._actor.join.remote(name, "1"))
        # A worker without weights gets no requests; every change wakes its call.
        while not ray.get(self._actor.next_assignment.remote(name, "1", None, 1, (), WAIT)).stop:
            pass

    def hand_over(self) -> float:
        """Return the seconds from the trainer's call to the worker's assignment."""

        def receive() -> float:
            while not ray.get(self._actor.next_assignment.remote("busy", "1", 0, 1, (), WAIT)).requests:
                pass
            return time.perf_counter()

        number = RequestNumber(1, self._index)
        self._index += 1
        received = self._threads.submit(receive)
        time.sleep(0.05)  # The worker's call waits by then.
        submitted = time.perf_counter()
        ray.get(self._actor.submit.remote([GroupRequest(number, TASK, 0)]))
        seconds = received.result() - submitted
        ray.get(self._actor.finish.remote("busy", "1", number, b"group"))
        return seconds

    def close(self) -> None:
        """Stop the idle workers."""
        ray.get(self._actor.stop.remote())
        self._threads.shutdown()


def measure(rounds: int, idle: int) -> dict[str, Any]:
    """Return the latency of both forms in milliseconds, and their ratio; their rounds alternate.

    Args:
        rounds: timed rounds of each form, after ten warm-up rounds.
        idle: number of idle workers.
    """
    with connected_to_local_node(num_cpus=1):
        forms = {"asyncio": Form(Coordinator, idle), "threads": Form(ThreadedCoordinator, idle)}
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for number in range(rounds + 10):
            for name, form in forms.items():
                taken = form.hand_over()
                if number >= 10:
                    seconds[name].append(taken)
        for form in forms.values():
            form.close()
    figures = {f"{name}_milliseconds": spread([1000 * value for value in taken]) for name, taken in seconds.items()}
    ratios = [one / other for one, other in zip(seconds["asyncio"], seconds["threads"], strict=True)]
    return {**figures, "asyncio_over_threads": spread(ratios)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Latency of a request from the trainer to a waiting worker")
    parser.add_argument("--rounds", type=int, default=300, help="timed rounds of each form")
    parser.add_argument("--idle", type=int, default=8, help="idle workers")
    arguments = parser.parse_args(argv)
    figures = measure(arguments.rounds, arguments.idle)
    say(f"asyncio over threads: {figures['asyncio_over_threads']}")
    print(make_report("benchmark_coordinator", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
