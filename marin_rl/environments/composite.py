# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Several environments as one: what mixtures and curricula share."""

import bisect
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from marin_rl.environments.base import (
    CodeRunner,
    Environment,
    EnvironmentConfig,
    Episode,
    Split,
    can_demonstrate,
    connect_code_runner,
    demonstration,
)
from marin_rl.environments.task_stream import StreamState, TaskStream, task_stream
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task


@dataclasses.dataclass(frozen=True)
class CompositeEnvironment:
    """Environments whose tasks are drawn together; each plays and judges its own."""

    name: str
    """Its name in messages; metrics go by the names of the parts."""
    parts: Mapping[str, Environment]
    """The environments, by name."""
    make_stream: Callable[[int], TaskStream]
    """Makes the stream of training tasks from a seed."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of all parts, part after part."""
        return [task for part in self.parts.values() for task in part.tasks(split)]

    async def start(self, task: Task, seed: int) -> Episode:
        """Begin an attempt in the task's own environment.

        Raises:
            ValueError: if the task belongs to none of them.
        """
        return await self._part_of(task).start(task, seed)

    def stream(self, seed: int) -> TaskStream:
        """The stream of training tasks."""
        return self.make_stream(seed)

    def connect_code_runner(self, runner: CodeRunner | None) -> bool:
        """Give the sandbox to the parts that run programs; whether there are any."""
        needed = [connect_code_runner(part, runner) for part in self.parts.values()]
        return any(needed)

    def can_demonstrate(self, task: Task) -> bool:
        """Whether the task's environment has a conversation to imitate."""
        return can_demonstrate(self._part_of(task), task)

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """The demonstration or worked answer of the task's environment."""
        return demonstration(self._part_of(task), task)

    def _part_of(self, task: Task) -> Environment:
        if task.environment not in self.parts:
            raise ValueError(
                f"environment {self.name!r} cannot play task {task.id!r} of {task.environment!r}; it has "
                + ", ".join(self.parts)
            )
        return self.parts[task.environment]


def by_name(environments: Iterable[Environment], whole: str) -> dict[str, Environment]:
    """Environments by their names.

    Args:
        environments: in order.
        whole: what they are parts of, for messages.

    Raises:
        ValueError: if there is none, if two share a name, or if one is without training tasks.
    """
    found: dict[str, Environment] = {}
    for environment in environments:
        if environment.name in found:
            raise ValueError(
                f"{whole} has two environments named {environment.name!r}, whose metrics would be one; "
                "give one of them another name"
            )
        if not environment.tasks(Split.TRAIN):
            raise ValueError(f"{whole}: environment {environment.name!r} has no tasks to train on")
        found[environment.name] = environment
    if not found:
        raise ValueError(f"{whole} has no environments; give it at least one")
    return found


def part_rewards(
    environment: Environment, parts: Sequence[EnvironmentConfig], more: tuple[RewardComponentConfig, ...]
) -> dict[str, tuple[RewardComponentConfig, ...]]:
    """Which reward functions judge the rollouts of which part.

    Args:
        environment: the composite.
        parts: the configs of its parts, in order.
        more: reward functions that judge all of them.
    """
    assert isinstance(environment, CompositeEnvironment)
    found: dict[str, tuple[RewardComponentConfig, ...]] = {}
    for config, part in zip(parts, environment.parts.values(), strict=True):
        found |= config.reward_components(part)
    return {name: (*own, *more) for name, own in found.items()}


def draw_by_weight(
    parts: Mapping[str, Environment], weights: Mapping[str, float], state: StreamState, count: int, seed: int
) -> tuple[list[Task], StreamState]:
    """Draw tasks, each from a part chosen by weight; every part walks its own order from where it was left.

    Which part the n-th task is from depends on seed, n and weights alone.

    Args:
        parts: environments by name.
        weights: of those that take part, above 0.
        state: holds `drawn` and, by part, `parts`; whatever else it holds is kept.
        count: how many tasks.
        seed: of the choice, and of every part's order.
    """
    names = list(weights)
    bounds = list(itertools.accumulate(weights[name] for name in names))
    streams = {name: task_stream(parts[name], derive_seed(seed, "part", name)) for name in names}
    start, cursors = state.get("drawn", 0), dict(state.get("parts", {}))
    tasks: list[Task] = []
    for index in range(start, start + count):
        place = random.Random(derive_seed(seed, "which part", index)).random() * bounds[-1]
        name = names[min(bisect.bisect_right(bounds, place), len(names) - 1)]
        drawn, cursors[name] = streams[name].draw(cursors.get(name, {}), 1)
        tasks += drawn
    return tasks, {**state, "drawn": start + count, "parts": cursors}
