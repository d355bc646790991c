# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How many rollout workers a trainer needs: a simulation of `mode: async` with measured durations.

    python -m experiments.lab.benchmarks.simulate_pipeline --step_seconds 2.5 --group_seconds 1.2
    python -m experiments.lab.benchmarks.simulate_pipeline --step_seconds 30 --group_seconds 40 --spread 0.8 \
        --groups_per_step 256 --groups_together 4 --workers 16 64 256 1024 --max_staleness 4

Scheduler, coordinator and replay buffer are those of a run; only sampling and training are replaced by their
durations, so thousands of workers take seconds. Prints one JSON line per number of workers.
"""

import argparse
import asyncio
import dataclasses
import functools
import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from marin_rl.config.workers_config import Refresh
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.replay_buffer import ReplayBuffer
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber, RolloutScheduler, StalenessLimits
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn, WeightVersion


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Parameters of the simulation."""

    workers: int
    """Number of rollout workers."""
    step_seconds: float
    """Seconds of the trainer per batch and update: `seconds/step`, `/batch`, `/reference`."""
    group_seconds: float
    """Mean seconds of a group on a worker, including other groups that run concurrently."""
    spread: float = 0.0
    """σ of the logarithm of the group's duration; 0 for equal durations."""
    groups_together: int = 1
    """Groups that run concurrently on a worker; a finished group is replaced."""
    refresh: str = "between_groups"
    """`workers.refresh`: `between_groups` (a worker updates its weights when all its groups have finished) or
    `in_flight`."""
    fetch_seconds: float = 0.0
    """Seconds of a worker to fetch weights."""
    publish_seconds: float = 0.0
    """Seconds from an update until workers are notified of its weights."""
    groups_per_step: int = 64
    """`rollouts.prompts_per_step`."""
    max_staleness: int = 1
    """`replay.max_staleness`."""
    max_uses: int = 1
    """`replay.max_uses`."""
    failures_per_hour: float = 0.0
    """Failures per hour of a worker; it restarts after `heartbeat_timeout` seconds."""
    heartbeat_timeout: float = 30.0
    """`workers.heartbeat_timeout`."""
    steps: int = 50
    """Steps to simulate; the first fifth, in which the pipeline fills, is not counted."""
    seed: int = 0
    """Seed of durations and failures."""

    @property
    def is_in_flight(self) -> bool:
        """Whether workers update their weights while groups are running."""
        return Refresh(self.refresh) is Refresh.IN_FLIGHT


@dataclasses.dataclass
class _Worker:
    name: str
    life: int = 0
    version: WeightVersion | None = None
    running: set[RequestNumber] = dataclasses.field(default_factory=set)
    since: float = 0.0
    busy: float = 0.0
    is_waiting: bool = False


class Simulation:
    """A discrete-event simulation of the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Start with weights of version 0 and no requests."""
        self.pipeline = pipeline
        self.now = 0.0
        self.idle = 0.0
        self.ages: list[int] = []
        self.stale = 0
        self.ends: list[float] = []
        self._chance = random.Random(pipeline.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._scheduler = RolloutScheduler(
            StalenessLimits(pipeline.groups_per_step, pipeline.max_staleness, pipeline.max_uses)
        )
        self._replay = ReplayBuffer(max_staleness=pipeline.max_staleness, max_uses=pipeline.max_uses)
        self._coordinator = Coordinator(math.inf, lambda: self.now)
        self._coordinator.announce(0, ["here"])
        self._groups: dict[RequestNumber, RolloutGroup] = {}
        self._workers = [_Worker(f"worker-{index}") for index in range(pipeline.workers)]
        self._version = 0
        self._waiting_since: float | None = None
        self._counted_from = 0.0

    def run(self) -> dict[str, Any]:
        """Simulate all steps; shares are of the time after the first fifth."""
        for worker in self._workers:
            self._join(worker)
        self._begin_step()
        while self._version < self.pipeline.steps:
            self.now, _, event = heapq.heappop(self._events)
            event()
        elapsed = self.now - self._counted_from
        steps = len(self.ends) - self._warm_up
        for worker in self._workers:
            self._count_time(worker)
        busy = sum(worker.busy for worker in self._workers)
        return {
            **dataclasses.asdict(self.pipeline),
            "seconds_per_step": elapsed / steps,
            "trainer_idle_share": self.idle / elapsed,
            "worker_idle_share": 1 - busy / (elapsed * self.pipeline.workers),
            "staleness_mean": sum(self.ages) / len(self.ages),
            "staleness_max": max(self.ages),
            "groups_too_old": self.stale,
            "groups_handed_again": asyncio.run(self._coordinator.take()).counts["handed_again"],
        }

    @property
    def _warm_up(self) -> int:
        return self.pipeline.steps // 5

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    # The trainer.

    def _begin_step(self) -> None:
        if self._version == self._warm_up and not self._counted_from:
            self._counted_from, self.idle, self.ages, self.stale = self.now, 0.0, [], 0
            for worker in self._workers:
                worker.busy = 0.0
        self._waiting_since = self.now
        self._expire()
        self._train_if_ready()

    def _expire(self) -> None:
        stale = self._replay.expire(self._version)
        self.stale += len(stale)
        self._scheduler.retry(one.task for one in stale if one.uses_left == self.pipeline.max_uses)
        self._coordinator.submit(
            self._scheduler.request(self._version, self._replay.uses_left, len(self._replay), _tasks)
        )
        self._wake()

    def _train_if_ready(self) -> None:
        # All groups are from one environment, so their number determines whether there are enough.
        if self._waiting_since is None or len(self._replay) < self.pipeline.groups_per_step:
            return
        mix = self._replay.mix(self.pipeline.groups_per_step, ())
        groups = self._replay.draw(mix, self._version)
        self.ages += [self._version - group.rollouts[0].turns[0].generation.first_version for group in groups]
        self.idle += self.now - self._waiting_since
        self._waiting_since = None
        self._after(self.pipeline.step_seconds, self._end_step)

    def _end_step(self) -> None:
        self._version += 1
        self.ends.append(self.now)
        version = self._version
        self._after(self.pipeline.publish_seconds, lambda: self._announce(version))
        self._begin_step()

    def _announce(self, version: WeightVersion) -> None:
        self._coordinator.announce(version, ["here"])
        if self.pipeline.is_in_flight:
            for worker in self._workers:
                if worker.running:
                    self._after(
                        self.pipeline.fetch_seconds,
                        functools.partial(self._update_weights, worker, worker.life, version),
                    )
        self._wake()

    # The workers.

    def _join(self, worker: _Worker) -> None:
        worker.life += 1
        worker.version = None
        self._coordinator.join(worker.name, str(worker.life))
        if self.pipeline.failures_per_hour:
            life = worker.life
            self._after(
                self._chance.expovariate(self.pipeline.failures_per_hour / 3600), lambda: self._die(worker, life)
            )
        self._request_work(worker)

    def _die(self, worker: _Worker, life: int) -> None:
        if worker.life == life:
            self._count_time(worker)
            worker.life += 1
            worker.running.clear()
            worker.is_waiting = False
            self._after(self.pipeline.heartbeat_timeout, lambda: self._join(worker))

    def _update_weights(self, worker: _Worker, life: int, version: WeightVersion) -> None:
        if worker.life == life and worker.version is not None:
            worker.version = max(worker.version, version)

    def _wake(self) -> None:
        for worker in self._workers:
            if worker.is_waiting:
                self._request_work(worker)

    def _request_work(self, worker: _Worker) -> None:
        """Request work like a worker: for free slots while groups are running, and for anything when idle."""
        newest = self._coordinator.announced().version
        if worker.running and not self.pipeline.is_in_flight and worker.version != newest:
            return
        room = self.pipeline.groups_together - len(worker.running)
        assignment = asyncio.run(
            self._coordinator.next_assignment(worker.name, str(worker.life), worker.version, room, worker.running)
        )
        assert assignment is not None
        fetches = not worker.running and assignment.newest.version != worker.version
        worker.is_waiting = not (worker.running or assignment.requests or fetches)
        if fetches:
            worker.version = assignment.newest.version
        delay = self.pipeline.fetch_seconds if fetches else 0.0
        if assignment.requests and not worker.running:
            worker.since = self.now
        for request in assignment.requests:
            assert worker.version is not None
            worker.running.add(request.number)
            ends = functools.partial(self._finish, worker, worker.life, request, worker.version)
            self._after(delay + self._duration(), ends)
        if fetches and not assignment.requests:
            life = worker.life
            self._after(delay, lambda: self._request_work(worker) if worker.life == life else None)

    def _duration(self) -> float:
        spread = self.pipeline.spread
        return self.pipeline.group_seconds * math.exp(self._chance.gauss(0, spread) - spread**2 / 2)

    def _count_time(self, worker: _Worker) -> None:
        """Add a worker's busy time since the last call."""
        if worker.running:
            worker.busy += self.now - max(worker.since, self._counted_from)
            worker.since = self.now

    def _finish(self, worker: _Worker, life: int, request: GroupRequest, version: WeightVersion) -> None:
        if worker.life != life:
            return
        self._count_time(worker)
        worker.running.remove(request.number)
        if self._coordinator.finish(worker.name, str(life), request.number, b""):
            assert self._scheduler.complete(request.number)
            self._replay.add(request.number, _group(request, version))
        asyncio.run(self._coordinator.take([request.number]))
        if self._waiting_since is not None:
            self._expire()
            self._train_if_ready()
        self._request_work(worker)


def _tasks(count: int) -> list[Task]:
    return [Task("task", "simulated", ({"role": "user", "content": ""},), "")] * count


def _group(request: GroupRequest, version: WeightVersion) -> RolloutGroup:
    turn = Turn((), Generation((0,), (0.0,), StopReason.STOP, version, version), (), starts_sequence=True)
    name = request.number.group_id
    rollout = Rollout(name, name, request.task, (turn,), RolloutStatus.COMPLETED, {"correct": 1.0})
    return RolloutGroup(name, [rollout])


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate the pipeline with each number of workers."""
    parser = argparse.ArgumentParser(description="Simulation of mode: async with measured durations.")
    for field in dataclasses.fields(Pipeline):
        needed = field.default is dataclasses.MISSING
        kind = {"int": int, "float": float, "str": str}[str(getattr(field.type, "__name__", field.type))]
        if field.name == "workers":
            parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
        else:
            parser.add_argument(
                f"--{field.name}", type=kind, required=needed, default=None if needed else field.default
            )
    arguments = vars(parser.parse_args(argv))
    for workers in arguments.pop("workers"):
        result = Simulation(Pipeline(workers=workers, **arguments)).run()
        rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}
        print(json.dumps(rounded), file=sys.stdout)


if __name__ == "__main__":
    main()
