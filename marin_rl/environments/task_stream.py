# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Streams of training tasks: of one environment, a mixture or a curriculum."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marin_rl.environments.base import Environment, Split
from marin_rl.seeds import derive_seed
from marin_rl.types import RolloutGroup, Task

StreamState = Mapping[str, Any]
"""State of a stream as JSON values; initially empty. Immutable: updates return a new state."""


@runtime_checkable
class TaskStream(Protocol):
    """Infinite stream of training tasks.

    The stream itself is stateless. Its state is an argument and is stored in every checkpoint, so that a resumed run
    draws the same tasks as an uninterrupted one.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the environments with separate metrics; empty if there is only one environment."""
        ...

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Return the next `count` tasks and the state after them."""
        ...

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Return the state updated with the finished groups of drawn tasks."""
        ...

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Return metrics of a state."""
        ...


@runtime_checkable
class StreamingEnvironment(Protocol):
    """An environment that determines the order of its training tasks."""

    def stream(self, seed: int) -> TaskStream:
        """Return the stream of training tasks.

        Args:
            seed: seed for all randomness of the stream.
        """
        ...


def task_stream(environment: Environment, seed: int) -> TaskStream:
    """Return the stream of an environment's training tasks; default: each task once per epoch.

    Args:
        environment: source of the tasks.
        seed: seed of the run.
    """
    if isinstance(environment, StreamingEnvironment):
        return environment.stream(seed)
    return EpochStream(environment, seed)


@dataclasses.dataclass(frozen=True)
class EpochStream:
    """Draws each task once per epoch, in a new random order in each epoch."""

    environment: Environment
    """Source of the tasks."""
    seed: int
    """Seed for the order of every epoch."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Return an empty tuple: a single environment has no separate metrics."""
        return ()

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Return the next tasks of this epoch and the epochs after it."""
        tasks = self.environment.tasks(Split.TRAIN)
        start = state.get("drawn", 0)
        drawn = []
        for index in range(start, start + count):
            epoch, position = divmod(index, len(tasks))
            drawn.append(tasks[_order(self.seed, epoch, len(tasks))[position]])
        return drawn, {"drawn": start + count}

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Return the state unchanged: results do not affect the order."""
        return state

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Return no metrics."""
        return {}


@functools.lru_cache(maxsize=64)
def _order(seed: int, epoch: int, size: int) -> Sequence[int]:
    import numpy as np

    return np.random.default_rng(derive_seed(seed, "task order", epoch)).permutation(size).tolist()
