# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures of environments, whose parts may open in order: a curriculum."""

import bisect
import dataclasses
import graphlib
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from marin_rl.environments.agent import AgentEnvironment
from marin_rl.environments.base import (
    CORRECT,
    AbstractEnvironment,
    AgentEpisode,
    EnvironmentConfig,
    Episode,
    Split,
    StreamState,
    TaskStream,
)
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import is_problem_id, problem_id, question_text
from marin_rl.environments.tool_use import ToolUseEnvironment
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import Message, RolloutGroup, Task, exact_sum
from marin_rl.utils.errors import nearest
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.checks import ConfigSection, check_fields


@dataclasses.dataclass(frozen=True)
class MixturePartConfig(ConfigSection):
    """Environment of a mixture. Its score is the mean over its last graded training rollouts."""

    environment: EnvironmentConfig
    """The environment; names must differ between parts."""
    weight: Annotated[float, Gt(0), "or remove the part to exclude it"] = 1.0
    """Sampling weight relative to the other open parts."""
    after: tuple[str, ...] = ()
    """Names of the environments that must have reached their `unlock_at` before this part opens; empty: it is open."""
    unlock_at: float = 0.7
    """Score at which the parts that depend on this one may open."""
    graduate_at: float | None = None
    """Score at which the part is no longer drawn, at least `unlock_at`; null: it is always drawn. If all open parts
    have graduated, they are drawn again."""
    window: Annotated[int, Ge(1)] = 200
    """Number of rollouts in the score; it is undefined until there are as many."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.graduate_at is not None and self.graduate_at < self.unlock_at:
            raise ValueError(
                f"graduate_at {self.graduate_at} is below unlock_at {self.unlock_at}, so the part would graduate "
                "before it unlocks others; raise graduate_at or lower unlock_at"
            )


@EnvironmentConfig.register_subclass("mixture")
@dataclasses.dataclass(frozen=True)
class MixtureConfig(EnvironmentConfig):
    """Several environments. Training tasks are drawn from the open parts by weight; each part is evaluated separately.

    Parts with `after` open once others are learned: a curriculum. The score of a rollout is its component `correct` or,
    if absent, its return.
    """

    level: ClassVar[int] = 2

    parts: tuple[MixturePartConfig, ...]
    """Environments, their weights and the conditions under which they are drawn."""
    name: str = "mixture"
    """Name of the mixture, for messages; metrics use the names of the parts."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.parts:
            raise ValueError(f"mixture {self.name!r} has no environments; give it at least one")
        for index, part in enumerate(self.parts):
            self.check_nested(part.environment, f"parts.{index}.environment")

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of each part, followed by those for all parts."""
        assert isinstance(environment, MixtureEnvironment)
        components: dict[str, tuple[RewardComponentConfig, ...]] = {}
        for part, built in zip(self.parts, environment.parts.values(), strict=True):
            components |= part.environment.reward_components(built)
        return {name: (*of_part, *self.rewards) for name, of_part in components.items()}

    def build(self) -> AbstractEnvironment:
        """Build the parts.

        Raises:
            ValueError: if two share a name, one has no training tasks, one trains on a problem that another holds out
                or validates on, or one can never open.
        """
        parts: dict[str, AbstractEnvironment] = {}
        for part in self.parts:
            environment = part.environment.build()
            if environment.name in parts:
                raise ValueError(
                    f"mixture {self.name!r} has two environments named {environment.name!r}, which would share "
                    "metrics; rename one of them"
                )
            if not environment.tasks(Split.TRAIN):
                raise ValueError(f"mixture {self.name!r}: environment {environment.name!r} has no tasks to train on")
            parts[environment.name] = environment
        configs = dict(zip(parts, self.parts, strict=True))
        _check_order({name: config.after for name, config in configs.items()})
        _check_disjoint(parts, f"mixture {self.name!r}")
        return MixtureEnvironment(self.name, parts, configs)


def _check_order(after: Mapping[str, Sequence[str]]) -> None:
    """Check that every environment can open, given the names of those that it depends on."""
    for name, others in after.items():
        for other in others:
            if other not in after:
                raise ValueError(
                    f"environment {name!r} comes after {other!r}, which is not in the mixture; "
                    f"{nearest(other, list(after))}"
                )
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError as error:
        cycle = " after ".join(map(repr, reversed(error.args[1])))
        raise ValueError(f"environments wait for one another: {cycle}; remove one name from `after`") from error


def _check_disjoint(environments: Mapping[str, AbstractEnvironment], whole: str) -> None:
    """Check that no part trains on a problem that another part holds out or validates on."""
    if len(environments) == 1:
        return
    trained = {
        name: frozenset(id for task in environment.tasks(Split.TRAIN) for id in _problem_ids(environment, task))
        for name, environment in environments.items()
    }
    for name, environment in environments.items():
        for split in (Split.HELD_OUT, Split.VALIDATION):
            tasks = [(task, _problem_ids(environment, task)) for task in environment.tasks(split)]
            for other, known in trained.items():
                shared = [task for task, ids in tasks if not known.isdisjoint(ids)]
                if other != name and shared:
                    raise ValueError(
                        f"{whole}: environment {other!r} trains on {len(shared)} {split.value} problems of {name!r}, "
                        f"the first is {shared[0].messages[-1]['content'][:200]!r}; give both environments equal "
                        "held_out and equal validation, or data without common problems"
                    )


def _problem_ids(environment: AbstractEnvironment, task: Task) -> set[str]:
    """Return the ids of a task that are comparable between environments; empty if there are none."""
    # A game is not identified by its first messages, because its rules may differ.
    while isinstance(environment, ToolUseEnvironment | AgentEnvironment):
        environment = environment.questions if isinstance(environment, ToolUseEnvironment) else environment.source
    ids = {task.id} if is_problem_id(task.id) else set()
    if isinstance(environment, SingleTurnEnvironment):
        ids.add(problem_id(question_text(task.messages)))
        # A prompt template changes the messages, but not the problem.
        if task.id in environment.problem_ids:
            ids.add(environment.problem_ids[task.id])
    return ids


@dataclasses.dataclass(frozen=True)
class MixtureEnvironment(AbstractEnvironment):
    """Several environments; each runs and scores its own tasks."""

    name: str
    """Name for messages; metrics use the names of the parts."""
    parts: Mapping[str, AbstractEnvironment]
    """Environments by name."""
    configs: Mapping[str, MixturePartConfig]
    """Weights and conditions of the parts by name."""

    @property
    def waits(self) -> bool:
        """Whether episodes of any part may wait."""
        return any(part.waits for part in self.parts.values())

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of all parts, in the order of the parts."""
        return [task for part in self.parts.values() for task in part.tasks(split)]

    async def start(self, task: Task, seed: int) -> Episode | AgentEpisode:
        """Start an attempt in the environment of the task."""
        return await self._part_of(task).start(task, seed)

    def stream(self, seed: int) -> TaskStream:
        """Return the stream of training tasks."""
        return MixtureStream(self.parts, self.configs, seed)

    def connect_sandbox(self, sandbox: Sandbox | None) -> bool:
        """Connect all parts that run programs to the sandbox; return whether any part does."""
        needed = [part.connect_sandbox(sandbox) for part in self.parts.values()]
        return any(needed)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether the task's environment can demonstrate it."""
        return self._part_of(task).can_demonstrate(task)

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return the demonstration of the task's environment."""
        return self._part_of(task).demonstrate(task)

    def _part_of(self, task: Task) -> AbstractEnvironment:
        if task.environment not in self.parts:
            raise ValueError(
                f"environment {self.name!r} cannot run task {task.id!r} of {task.environment!r}; its environments are "
                + ", ".join(self.parts)
            )
        return self.parts[task.environment]


@dataclasses.dataclass(frozen=True)
class MixtureStream(TaskStream):
    """Draws each task from an open part by weight; every part continues in its own task order.

    The part of the n-th task depends on seed, n and the weights of the open parts only. The state is `{drawn: n, parts:
    {name: state of the part's stream}}` and, if parts open or graduate, the last scores of each part (`scores`) and the
    parts that have ever reached `unlock_at` (`reached`) and `graduate_at` (`graduated`).
    """

    environments: Mapping[str, AbstractEnvironment]
    configs: Mapping[str, MixturePartConfig]
    """Configs by name of the environments."""
    seed: int
    """Seed for the choice of parts and for the task order of each."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all environments; each has separate metrics."""
        return tuple(self.environments)

    @property
    def _is_curriculum(self) -> bool:
        return any(config.after or config.graduate_at is not None for config in self.configs.values())

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Draw tasks from the open parts by weight."""
        opened = [name for name in self.configs if self._is_open(name, state)]
        names = [name for name in opened if name not in state.get("graduated", ())] or opened
        bounds = list(itertools.accumulate(self.configs[name].weight for name in names))
        streams = {name: self.environments[name].stream(derive_seed(self.seed, "part", name)) for name in names}
        start, cursors = state.get("drawn", 0), dict(state.get("parts", {}))
        tasks: list[Task] = []
        for index in range(start, start + count):
            place = random.Random(derive_seed(self.seed, "which part", index)).random() * bounds[-1]
            name = names[min(bisect.bisect_right(bounds, place), len(names) - 1)]
            drawn, cursors[name] = streams[name].draw(cursors.get(name, {}), 1)
            tasks += drawn
        return tasks, {**state, "drawn": start + count, "parts": cursors}

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Record the scores of rollouts and update the reached and graduated parts."""
        if not self._is_curriculum:
            return state
        scores = {name: list(state.get("scores", {}).get(name, ())) for name in self.configs}
        for rollout in (rollout for group in groups for rollout in group.rollouts if rollout.rewards):
            name, correct = rollout.task.environment, rollout.score_of(CORRECT)
            score = float(exact_sum(rollout.rewards.values()) if correct is None else correct)
            scores[name] = [*scores[name], score][-self.configs[name].window :]
        state = {**state, "scores": scores}
        reached, graduated = set(state.get("reached", ())), set(state.get("graduated", ()))
        for name, config in self.configs.items():
            mean = self._score(name, state)
            if mean is not None and mean >= config.unlock_at:
                reached.add(name)
            if mean is not None and config.graduate_at is not None and mean >= config.graduate_at:
                graduated.add(name)
        return {**state, "reached": sorted(reached), "graduated": sorted(graduated)}

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Return `curriculum/<environment>/open` (1 or 0) and, once its window is full, `/score`, if parts open."""
        metrics: dict[str, float] = {}
        for name in self.configs if self._is_curriculum else ():
            metrics[f"curriculum/{name}/open"] = float(self._is_open(name, state))
            if (score := self._score(name, state)) is not None:
                metrics[f"curriculum/{name}/score"] = score
        return metrics

    def _is_open(self, name: str, state: StreamState) -> bool:
        return set(self.configs[name].after) <= set(state.get("reached", ()))

    def _score(self, name: str, state: StreamState) -> float | None:
        scores = state.get("scores", {}).get(name, ())
        return math.fsum(scores) / len(scores) if len(scores) == self.configs[name].window else None
