# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which training task comes next: of one environment, of a mixture, of a curriculum, all in one way."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marin_rl.environments.base import Environment, Split
from marin_rl.seeds import derive_seed
from marin_rl.types import RolloutGroup, Task

StreamState = Mapping[str, Any]
"""Where a stream stands, as JSON holds it; empty at the beginning. Never changed, only replaced."""


@runtime_checkable
class TaskStream(Protocol):
    """Draws training tasks without end.

    It holds nothing but its plan. Where it stands is in the state, which every checkpoint has, so that a run that is
    taken up again draws what it would have drawn.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the environments that are measured apart; empty where there is one alone."""
        ...

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """The next tasks, and where the stream stands after them."""
        ...

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Where the stream stands after it was told what came of tasks that it drew."""
        ...

    def metrics(self, state: StreamState) -> dict[str, float]:
        """What there is to say about where the stream stands."""
        ...


@runtime_checkable
class StreamingEnvironment(Protocol):
    """An environment that decides itself which task comes next."""

    def stream(self, seed: int) -> TaskStream:
        """The stream of its training tasks.

        Args:
            seed: of everything random in it.
        """
        ...


def task_stream(environment: Environment, seed: int) -> TaskStream:
    """The stream of an environment's training tasks: its own, or each task once per pass.

    Args:
        environment: has the tasks.
        seed: the run's.
    """
    if isinstance(environment, StreamingEnvironment):
        return environment.stream(seed)
    return EpochStream(environment, seed)


@dataclasses.dataclass(frozen=True)
class EpochStream:
    """Each task once per pass, every pass in its own order."""

    environment: Environment
    """Has the tasks."""
    seed: int
    """Decides the order of every pass."""

    @property
    def parts(self) -> tuple[str, ...]:
        """None: one environment is what all metrics are of."""
        return ()

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """The next tasks of this pass, and of those after it."""
        tasks = self.environment.tasks(Split.TRAIN)
        start = state.get("drawn", 0)
        drawn = []
        for index in range(start, start + count):
            epoch, position = divmod(index, len(tasks))
            drawn.append(tasks[_order(self.seed, epoch, len(tasks))[position]])
        return drawn, {"drawn": start + count}

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """The state as it is: what came of a task changes no order."""
        return state

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Nothing."""
        return {}


@functools.lru_cache(maxsize=64)
def _order(seed: int, epoch: int, size: int) -> Sequence[int]:
    import numpy as np

    return np.random.default_rng(derive_seed(seed, "task order", epoch)).permutation(size).tolist()
