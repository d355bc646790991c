# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures and curricula: training on several environments."""

import bisect
import dataclasses
import difflib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from marin_rl.environments.base import (
    AbstractEnvironment,
    CodeRunner,
    EnvironmentConfig,
    Episode,
    Split,
    StreamState,
    TaskStream,
    check_nested,
)
from marin_rl.environments.single_turn import CORRECT
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Rollout, RolloutGroup, Task


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
        ValueError: if two share a name, or one has no training tasks.
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


@dataclasses.dataclass(frozen=True)
class MixturePartConfig:
    """Environment of a mixture."""

    environment: EnvironmentConfig
    """The environment; names must differ between parts."""
    weight: float = 1.0
    """Sampling weight relative to the other parts; above 0."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be finite and above 0, got {self.weight}; remove the part to exclude it")


@EnvironmentConfig.register_subclass("mixture")
@dataclasses.dataclass(frozen=True)
class MixtureConfig(EnvironmentConfig):
    """Several environments. Training tasks are sampled from them by weight; each is evaluated separately."""

    level: ClassVar[int] = 2

    parts: tuple[MixturePartConfig, ...]
    """Environments and their weights."""
    name: str = "mixture"
    """Name of the mixture, for messages; metrics use the names of the parts."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"mixture {self.name!r} has no environments; give it at least one")
        for index, part in enumerate(self.parts):
            check_nested(self, part.environment, f"parts.{index}.environment")

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of each part and of the mixture."""
        return part_rewards(environment, [part.environment for part in self.parts], self.rewards)

    def build(self) -> AbstractEnvironment:
        """Build the parts.

        Raises:
            ValueError: if two of them share a name.
        """
        environments = [part.environment.build() for part in self.parts]
        parts = by_name(environments, f"mixture {self.name!r}")
        weights = {environment.name: part.weight for environment, part in zip(environments, self.parts, strict=True)}
        return CompositeEnvironment(self.name, parts, lambda seed: MixtureStream(parts, weights, seed))


@dataclasses.dataclass(frozen=True)
class MixtureStream(TaskStream):
    """Draws from all parts by weight."""

    environments: Mapping[str, AbstractEnvironment]
    """Environments by name."""
    weights: Mapping[str, float]
    """Weights by environment name; above 0."""
    seed: int
    """Seed for the choice of parts and for the task order of each part."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts; each has separate metrics."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Draw tasks from the parts by weight."""
        return draw_by_weight(self.environments, self.weights, state, count, self.seed)


@dataclasses.dataclass(frozen=True)
class LessonConfig:
    """Lesson of a curriculum."""

    name: str
    """Name of the lesson in `after`, messages and metrics."""
    environment: EnvironmentConfig
    """Environment of the lesson; environment names must differ between lessons."""
    weight: float = 1.0
    """Sampling weight relative to the other open lessons; above 0."""
    after: tuple[str, ...] = ()
    """Names of the lessons that must have reached `unlock_at` before this lesson opens; empty: it is open."""
    unlock_at: float = 0.7
    """Mean score over `window` at which the lessons that depend on this one may open."""
    graduate_at: float | None = None
    """Mean score at which the lesson is no longer drawn, at least `unlock_at`; null: it is always drawn.
    If all open lessons have graduated, they are drawn again."""
    window: int = 200
    """Number of the lesson's last scored rollouts in its mean score; the score is undefined until there are as many."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"lesson {self.name!r}: weight must be finite and above 0, got {self.weight}")
        if self.window < 1:
            raise ValueError(f"lesson {self.name!r}: window must be at least 1 rollout, got {self.window}")
        if self.graduate_at is not None and self.graduate_at < self.unlock_at:
            raise ValueError(
                f"lesson {self.name!r}: graduate_at {self.graduate_at} is below unlock_at {self.unlock_at}, so it "
                "would graduate before it unlocks other lessons; raise graduate_at or lower unlock_at"
            )


@EnvironmentConfig.register_subclass("curriculum")
@dataclasses.dataclass(frozen=True)
class CurriculumConfig(EnvironmentConfig):
    """Lessons with dependencies. Training tasks are a mixture of the open lessons, which training scores determine.

    The score of a rollout is its component `correct` or, if absent, its return.
    """

    level: ClassVar[int] = 2

    lessons: tuple[LessonConfig, ...]
    """The lessons."""
    name: str = "curriculum"
    """Name of the curriculum, for messages."""

    def __post_init__(self) -> None:
        if not self.lessons:
            raise ValueError(f"curriculum {self.name!r} has no environments; give it at least one")
        for index, lesson in enumerate(self.lessons):
            check_nested(self, lesson.environment, f"lessons.{index}.environment")
        names = [lesson.name for lesson in self.lessons]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"curriculum {self.name!r} has several lessons named {repeated[0]!r}; names must differ")
        for lesson in self.lessons:
            for other in lesson.after:
                if other not in names:
                    close = difflib.get_close_matches(other, names, n=1)
                    hint = f"did you mean {close[0]!r}? " if close else ""
                    raise ValueError(
                        f"lesson {lesson.name!r} depends on {other!r}, which is not a lesson; "
                        f"{hint}The lessons are: {', '.join(names)}"
                    )
        if cycle := _find_cycle({lesson.name: lesson.after for lesson in self.lessons}):
            raise ValueError(
                f"curriculum {self.name!r}: lessons depend on one another in a cycle: "
                f"{' after '.join(map(repr, cycle))}; remove one name from `after`"
            )

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of each lesson and of the curriculum."""
        return part_rewards(environment, [lesson.environment for lesson in self.lessons], self.rewards)

    def build(self) -> AbstractEnvironment:
        """Build the environments of the lessons.

        Raises:
            ValueError: if two of them share a name.
        """
        environments = [lesson.environment.build() for lesson in self.lessons]
        parts = by_name(environments, f"curriculum {self.name!r}")
        lessons = {environment.name: lesson for environment, lesson in zip(environments, self.lessons, strict=True)}
        return CompositeEnvironment(self.name, parts, lambda seed: CurriculumStream(parts, lessons, seed))


def _find_cycle(after: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names along a cycle, with the first repeated at the end; empty if there is no cycle."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in after[name]:
                if cycle := visit(other, [*path, name]):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in after if (cycle := visit(name, []))), [])


@dataclasses.dataclass(frozen=True)
class CurriculumStream(TaskStream):
    """Draws from the open lessons by weight.

    In addition to the entries of a mixture's state, its state has the last scores of each lesson (`scores`) and the
    lessons that have ever reached `unlock_at` (`reached`) and `graduate_at` (`graduated`).
    """

    environments: Mapping[str, AbstractEnvironment]
    """Environments by name."""
    lessons: Mapping[str, LessonConfig]
    """Lessons by environment name."""
    seed: int
    """Seed for the choice of lessons and for the task order of each lesson."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all environments; each has separate metrics."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Draw tasks from the open lessons by weight."""
        opened = {name: lesson for name, lesson in self.lessons.items() if self._is_open(lesson, state)}
        graduated = state.get("graduated", ())
        drawn = {name: lesson for name, lesson in opened.items() if lesson.name not in graduated} or opened
        weights = {name: lesson.weight for name, lesson in drawn.items()}
        return draw_by_weight(self.environments, weights, state, count, self.seed)

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Record the scores of rollouts and update the reached and graduated lessons."""
        scores = {lesson.name: list(state.get("scores", {}).get(lesson.name, ())) for lesson in self.lessons.values()}
        for group in groups:
            for rollout in group.rollouts:
                lesson = self.lessons[rollout.task.environment]
                if rollout.rewards:
                    scores[lesson.name] = [*scores[lesson.name], _score(rollout)][-lesson.window :]
        state = {**state, "scores": scores}
        reached, graduated = set(state.get("reached", ())), set(state.get("graduated", ()))
        for lesson in self.lessons.values():
            score = self._score_of(lesson, state)
            if score is not None and score >= lesson.unlock_at:
                reached.add(lesson.name)
            if score is not None and lesson.graduate_at is not None and score >= lesson.graduate_at:
                graduated.add(lesson.name)
        return {**state, "reached": sorted(reached), "graduated": sorted(graduated)}

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Return `curriculum/<lesson>/open` (1 or 0) and, once its window is full, `curriculum/<lesson>/score`."""
        metrics: dict[str, float] = {}
        for lesson in self.lessons.values():
            metrics[f"curriculum/{lesson.name}/open"] = float(self._is_open(lesson, state))
            if (score := self._score_of(lesson, state)) is not None:
                metrics[f"curriculum/{lesson.name}/score"] = score
        return metrics

    def _is_open(self, lesson: LessonConfig, state: StreamState) -> bool:
        return set(lesson.after) <= set(state.get("reached", ()))

    def _score_of(self, lesson: LessonConfig, state: StreamState) -> float | None:
        scores = state.get("scores", {}).get(lesson.name, ())
        return sum(scores) / len(scores) if len(scores) == lesson.window else None


def _score(rollout: Rollout) -> float:
    correct = rollout.score_of(CORRECT)
    return float((rollout.total_reward or 0.0) if correct is None else correct)
