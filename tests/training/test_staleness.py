# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Scheduler, coordinator, workers and replay buffer under random schedules, simulated without clock or processes.

Workers are slow, stop responding, die, rejoin and answer late; coordinators and answers are lost; weights arrive late.
Invariants: every step gets complete groups, within the maximum staleness, each once, and no request is lost.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marin_rl.config.sections import Mode, ReplayConfig, RolloutConfig
from marin_rl.distributed.coordinator import Coordinator, TrainerUpdate
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.scheduler import GroupRequest, RequestNumber
from marin_rl.distributed.worker_pool import WorkerPool
from marin_rl.environments.base import AbstractEnvironment, Episode, Split
from marin_rl.rollouts.config import DropGroupsConfig, KeepGroupsConfig, ResampleGroupsConfig
from marin_rl.rollouts.group_codec import encode_group
from marin_rl.training.run_state import Progress
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn, WeightVersion
from tests.distributed.inline_executor import InlineExecutor
from tests.distributed.result_of import result_of
from tests.training.bare_run import BareRun, bare_run, make_config, make_state

GROUPS = 3
HEARTBEAT_TIMEOUT = 5.0


@dataclasses.dataclass(frozen=True)
class Numbers(AbstractEnvironment):
    """Numbered tasks; the number of a task determines whether its attempts get different rewards."""

    name: str = "numbers"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"t{index}", self.name, ({"role": "user", "content": f"{index}"},), "") for index in range(50)]

    async def start(self, task: Task, seed: int) -> Episode:
        raise AssertionError("episodes are simulated")


@dataclasses.dataclass
class RolloutRunner:
    """A simulated worker."""

    name: str
    incarnation: str
    version: WeightVersion | None = None
    playing: dict[RequestNumber, tuple[GroupRequest, WeightVersion]] = dataclasses.field(default_factory=dict)
    paused: bool = False


class World(CoordinatorClient):
    """Simulated coordinator and workers; advances by one random event whenever the trainer waits."""

    def __init__(self, chance: random.Random, workers: int, equal_share: float) -> None:
        self.chance = chance
        self.now = 0.0
        self.equal_share = equal_share
        self.lives = 0
        self.played: collections.Counter[RequestNumber] = collections.Counter()
        self.coordinator = self.new_coordinator()
        self.workers = [self.born(f"w{index}") for index in range(workers)]

    def new_coordinator(self) -> Coordinator:
        return Coordinator(HEARTBEAT_TIMEOUT, lambda: self.now)

    def born(self, name: str) -> RolloutRunner:
        self.lives += 1
        runner = RolloutRunner(name, f"{name}-{self.lives}")
        self.coordinator.join(runner.name, runner.incarnation)
        return runner

    # Interface used by the trainer.

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if method is Coordinator.take:
            return self.take(*arguments)
        return method(self.coordinator, *arguments)

    def take(self, acknowledged: Sequence[RequestNumber], seconds: float) -> TrainerUpdate:
        update = result_of(self.coordinator.take(acknowledged))
        while not update.groups:
            incarnation = self.coordinator.incarnation
            self.event()
            update = result_of(self.coordinator.take())
            if self.coordinator.incarnation != incarnation:
                # A new coordinator has no requests until the trainer submits them again.
                return update
        return update

    # Random events.

    def event(self) -> None:
        self.now += self.chance.choice([0.1, 1.0, 3.0])
        worker = self.chance.choice(self.workers)
        event = self.chance.random()
        if event < 0.04:
            self.workers[self.workers.index(worker)] = self.born(worker.name)
        elif event < 0.08:
            worker.paused = not worker.paused
        elif event < 0.09:
            self.coordinator = self.new_coordinator()
        elif worker.paused:
            worker.paused = self.chance.random() < 0.7
        elif worker.playing and event < 0.6:
            self.finish(worker, self.chance.choice(sorted(worker.playing)))
        else:
            self.ask(worker)

    def ask(self, worker: RolloutRunner) -> None:
        room = self.chance.randint(1, 4)
        told = result_of(
            self.coordinator.next_assignment(worker.name, worker.incarnation, worker.version, room, worker.playing)
        )
        if self.chance.random() < 0.05:
            # The response is lost.
            return
        if told is None:
            self.coordinator.join(worker.name, worker.incarnation)
            return
        if told.newest.addresses and self.chance.random() < 0.7:
            worker.version = told.newest.version
        for order in told.requests:
            assert worker.version is not None
            assert worker.version >= order.min_version
            worker.playing[order.number] = (order, worker.version)

    def finish(self, worker: RolloutRunner, number: RequestNumber) -> None:
        order, version = worker.playing.pop(number)
        group = self.group(order, version)
        if self.coordinator.finish(worker.name, worker.incarnation, number, encode_group(group)):
            self.played[number] += 1

    def group(self, order: GroupRequest, version: WeightVersion) -> RolloutGroup:
        equal = random.Random(order.task.id).random() < self.equal_share
        rollouts = []
        for member in range(2):
            generation = Generation((1,), (-1.0,), StopReason.STOP, version, version)
            turn = Turn((2,), generation, (), starts_sequence=True)
            reward = {"correct": 1.0 if equal else float(member)}
            name = order.number.group_id
            rollouts.append(Rollout(f"{name}-{member}", name, order.task, (turn,), RolloutStatus.COMPLETED, reward))
        return RolloutGroup(order.number.group_id, rollouts)


@pytest.fixture(autouse=True)
def inline_announcements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce weights in the calling thread, so that schedules are deterministic."""
    monkeypatch.setattr("concurrent.futures.ThreadPoolExecutor", InlineExecutor)


class Sender:
    """Publishes weights immediately."""

    address = "here"
    published = None

    def publish(self, weights: object, version: WeightVersion) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def async_run(replay: ReplayConfig, filter_config: object, world: World) -> BareRun:
    config = make_config(
        mode=Mode.ASYNC,
        replay=replay,
        filter=filter_config,
        rollouts=RolloutConfig(prompts_per_step=GROUPS, group_size=2, max_length=64, row_length=64),
    )
    run = bare_run(config, Numbers())
    run.rollout_source = WorkerPool(world, Sender(), addresses=["here"], counts={}, no_progress_timeout=600.0)
    return run


def publish(run: BareRun) -> None:
    run.rollout_source.publish(SimpleNamespace(), run.progress.step)


@pytest.mark.medium
@pytest.mark.parametrize("filter_config", [KeepGroupsConfig(), DropGroupsConfig(), ResampleGroupsConfig(max_batches=3)])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_faults_never_break_group_invariants(filter_config: object, data: st.DataObject) -> None:
    staleness = data.draw(st.integers(0, 3), "staleness")
    uses = data.draw(st.integers(1, staleness + 1), "uses")
    chance = random.Random(data.draw(st.integers(0, 2**32), "schedule"))
    world = World(chance, data.draw(st.integers(1, 4), "workers"), data.draw(st.sampled_from([0.0, 0.4]), "equal"))
    replay = ReplayConfig(max_staleness=staleness, max_uses=uses)
    run = async_run(replay, filter_config, world)
    publish(run)
    trained: collections.Counter[str] = collections.Counter()
    tasks: dict[str, str] = {}
    seen: set[str] = set()
    for step in range(1, 9):
        version = step - 1
        collected = run.collect(step)
        for group in collected.groups:
            assert [rollout.id for rollout in group.rollouts] == [f"{group.id}-0", f"{group.id}-1"]
            ages = [version - turn.generation.first_version for rollout in group.rollouts for turn in rollout.turns]
            assert 0 <= min(ages) <= max(ages) <= staleness
        names = [group.id for group in collected.groups]
        assert len(set(names)) == len(names) <= GROUPS
        if isinstance(filter_config, KeepGroupsConfig):
            assert len(names) == GROUPS
        trained.update(names)
        tasks |= {group.id: group.rollouts[0].task.id for group in collected.groups}
        finished = [group.id for group in collected.finished]
        assert seen.isdisjoint(finished)
        seen |= set(finished)
        assert run.state.replay.uses_left + uses * len(run.state.scheduler.outstanding) <= (staleness + 1) * GROUPS * (
            run.config.filter.max_batches
        )
        run.progress.step = step
        publish(run)
        if chance.random() < 0.2:
            run = resumed(run, world)
    assert max(trained.values()) <= uses
    assert set(trained) <= seen
    if isinstance(filter_config, KeepGroupsConfig):
        assert accounted_for(run, tasks) == collections.Counter(
            task.id for task in run.collector.stream.draw({}, run.progress.tasks_drawn)[0]
        )
    run.rollout_source.close()


def accounted_for(run: BareRun, trained: dict[str, str]) -> collections.Counter[str]:
    """Count the tasks of groups that were trained on, are buffered, are pending, or will be requested again."""
    state = run.state.scheduler.state
    waiting = {entry.group.id: entry.task.id for entry in run.state.replay.copy().expire(10**9)}
    pending = [order.task.id for order in run.state.scheduler.outstanding]
    return collections.Counter([*{**trained, **waiting}.values(), *pending, *(task["id"] for task in state["again"])])


def resumed(run: BareRun, world: World) -> BareRun:
    """Resume after a checkpoint, with a new trainer, coordinator and workers."""
    saved = dataclasses.asdict(run.progress) | {"scheduler": run.state.scheduler.state}
    run.rollout_source.close()
    world.coordinator = world.new_coordinator()
    world.workers = [world.born(worker.name) for worker in world.workers]
    restored = async_run(run.config.replay, run.config.filter, world)
    progress = Progress(**saved)
    restored.state = dataclasses.replace(make_state(run.config, progress), replay=run.state.replay)
    publish(restored)
    restored.rollout_source.submit(restored.state.scheduler.outstanding)
    return restored


def test_schedule_does_not_matter_without_staleness() -> None:
    def batches(seed: int, workers: int) -> list[list[str]]:
        world = World(random.Random(seed), workers, equal_share=0.4)
        run = async_run(ReplayConfig(max_staleness=0), ResampleGroupsConfig(max_batches=4), world)
        publish(run)
        found = []
        for step in range(1, 6):
            collected = run.collect(step)
            found.append(sorted(f"{group.id} {group.rollouts[0].task.id}" for group in collected.groups))
            run.progress.step = step
            publish(run)
        run.rollout_source.close()
        return found

    first = batches(0, 1)
    assert all(len(names) == GROUPS for names in first)
    for seed, workers in ((1, 1), (2, 2), (3, 4)):
        assert batches(seed, workers) == first
