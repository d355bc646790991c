# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Environments composed of several environments: the common code of mixtures and curricula."""

import bisect
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from marin_rl.environments.base import (
    AbstractEnvironment,
    CodeRunner,
    EnvironmentConfig,
    Episode,
    Split,
    StreamState,
    TaskStream,
)
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task


@dataclasses.dataclass(frozen=True)
class CompositeEnvironment(AbstractEnvironment):
    """Draws training tasks from several environments; each runs and scores its own tasks."""

    name: str
    """Name for messages; metrics use the names of the parts."""
    parts: Mapping[str, AbstractEnvironment]
    """Environments by name."""
    make_stream: Callable[[int], TaskStream]
    """Creates the stream of training tasks from a seed."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of all parts, in the order of the parts."""
        return [task for part in self.parts.values() for task in part.tasks(split)]

    async def start(self, task: Task, seed: int) -> Episode:
        """Start an attempt in the environment of the task.

        Raises:
            ValueError: if no part has the task.
        """
        return await self._part_of(task).start(task, seed)

    def stream(self, seed: int) -> TaskStream:
        """Return the stream of training tasks."""
        return self.make_stream(seed)

    def connect_code_runner(self, runner: CodeRunner | None) -> bool:
        """Connect all parts that run programs to the sandbox; return whether any part does."""
        needed = [part.connect_code_runner(runner) for part in self.parts.values()]
        return any(needed)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether the task's environment has a conversation to imitate."""
        return self._part_of(task).can_demonstrate(task)

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return the demonstration or worked answer of the task's environment."""
        return self._part_of(task).demonstrate(task)

    def _part_of(self, task: Task) -> AbstractEnvironment:
        if task.environment not in self.parts:
            raise ValueError(
                f"environment {self.name!r} cannot run task {task.id!r} of {task.environment!r}; its environments are "
                + ", ".join(self.parts)
            )
        return self.parts[task.environment]


def by_name(environments: Iterable[AbstractEnvironment], whole: str) -> dict[str, AbstractEnvironment]:
    """Return environments by name.

    Args:
        environments: the environments, in order.
        whole: name of the composite, for messages.

    Raises:
        ValueError: if there is no environment, two share a name, or one has no training tasks.
    """
    environments_by_name: dict[str, AbstractEnvironment] = {}
    for environment in environments:
        if environment.name in environments_by_name:
            raise ValueError(
                f"{whole} has two environments named {environment.name!r}, which would share metrics; "
                "rename one of them"
            )
        if not environment.tasks(Split.TRAIN):
            raise ValueError(f"{whole}: environment {environment.name!r} has no tasks to train on")
        environments_by_name[environment.name] = environment
    if not environments_by_name:
        raise ValueError(f"{whole} has no environments; give it at least one")
    return environments_by_name


def part_rewards(
    environment: AbstractEnvironment, parts: Sequence[EnvironmentConfig], more: tuple[RewardComponentConfig, ...]
) -> dict[str, tuple[RewardComponentConfig, ...]]:
    """Return the reward functions by part.

    Args:
        environment: the composite.
        parts: configs of its parts, in order.
        more: reward functions for all parts.
    """
    assert isinstance(environment, CompositeEnvironment)
    components: dict[str, tuple[RewardComponentConfig, ...]] = {}
    for config, part in zip(parts, environment.parts.values(), strict=True):
        components |= config.reward_components(part)
    return {name: (*own, *more) for name, own in components.items()}


def draw_by_weight(
    parts: Mapping[str, AbstractEnvironment], weights: Mapping[str, float], state: StreamState, count: int, seed: int
) -> tuple[list[Task], StreamState]:
    """Draw tasks, each from a part sampled by weight; every part continues in its own task order.

    The part of the n-th task depends on seed, n and weights only.

    Args:
        parts: environments by name.
        weights: weights of the parts to draw from, above 0.
        state: has `drawn` and, by part, `parts`; other entries are kept.
        count: number of tasks.
        seed: seed for the choice of parts and for the task order of each part.
    """
    names = list(weights)
    bounds = list(itertools.accumulate(weights[name] for name in names))
    streams = {name: parts[name].stream(derive_seed(seed, "part", name)) for name in names}
    start, cursors = state.get("drawn", 0), dict(state.get("parts", {}))
    tasks: list[Task] = []
    for index in range(start, start + count):
        place = random.Random(derive_seed(seed, "which part", index)).random() * bounds[-1]
        name = names[min(bisect.bisect_right(bounds, place), len(names) - 1)]
        drawn, cursors[name] = streams[name].draw(cursors.get(name, {}), 1)
        tasks += drawn
    return tasks, {**state, "drawn": start + count, "parts": cursors}
