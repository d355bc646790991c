# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mixtures and curricula: training on several environments."""

import abc
import bisect
import dataclasses
import functools
import graphlib
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
class CompositeEnvironment(AbstractEnvironment):
    """Several environments; each runs and scores its own tasks."""

    name: str
    """Name for messages; metrics use the names of the parts."""
    parts: Mapping[str, AbstractEnvironment]
    """Environments by name."""
    make_stream: Callable[[int], TaskStream]
    """Creates the stream of training tasks from a seed."""

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
        return self.make_stream(seed)

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
class CompositeConfig(EnvironmentConfig):
    """Common behavior of the configs of several environments."""

    level: ClassVar[int] = 2
    parts_key: ClassVar[str]
    """Name of the field with the configs of the parts, which have an `environment` and a `weight`."""

    if TYPE_CHECKING:
        # A field of every subclass.
        @property
        def name(self) -> str:
            """Name for messages."""
            ...

    def __post_init__(self) -> None:
        check_fields(self)
        if not self._parts:
            raise ValueError(f"{self._whole} has no environments; give it at least one")
        for index, part in enumerate(self._parts):
            self.check_nested(part.environment, f"{self.parts_key}.{index}.environment")

    @property
    def _parts(self) -> Sequence[Any]:
        return getattr(self, self.parts_key)

    @property
    def _whole(self) -> str:
        return f"{self.get_choice_name(type(self))} {self.name!r}"

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions of each part, followed by those for all parts."""
        assert isinstance(environment, CompositeEnvironment)
        components: dict[str, tuple[RewardComponentConfig, ...]] = {}
        for part, built in zip(self._parts, environment.parts.values(), strict=True):
            components |= part.environment.reward_components(built)
        return {name: (*of_part, *self.rewards) for name, of_part in components.items()}

    def build(self) -> AbstractEnvironment:
        """Build the parts.

        Raises:
            ValueError: if two share a name, one has no training tasks, or one trains on a problem that another holds
                out or validates on.
        """
        environments: dict[str, AbstractEnvironment] = {}
        configs: dict[str, Any] = {}
        for part in self._parts:
            environment = part.environment.build()
            name = environment.name
            if name in environments:
                raise ValueError(
                    f"{self._whole} has two environments named {name!r}, which would share metrics; rename one of them"
                )
            if not environment.tasks(Split.TRAIN):
                raise ValueError(f"{self._whole}: environment {name!r} has no tasks to train on")
            environments[name], configs[name] = environment, part
        _check_disjoint(environments, self._whole)
        return CompositeEnvironment(self.name, environments, functools.partial(self._stream, environments, configs))

    @abc.abstractmethod
    def _stream(
        self, environments: Mapping[str, AbstractEnvironment], configs: Mapping[str, Any], seed: int
    ) -> TaskStream:
        """Return the stream of training tasks, given environments and configs of the parts by environment name."""


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
    """Return the ids of a task that are comparable between environments; empty if there are none.

    A game is not identified by its first messages, because its rules may differ.
    """
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
class MixturePartConfig(ConfigSection):
    """Environment of a mixture."""

    environment: EnvironmentConfig
    """The environment; names must differ between parts."""
    weight: Annotated[float, Gt(0), "or remove the part to exclude it"] = 1.0
    """Sampling weight relative to the other parts."""


@EnvironmentConfig.register_subclass("mixture")
@dataclasses.dataclass(frozen=True)
class MixtureConfig(CompositeConfig):
    """Several environments. Training tasks are sampled from them by weight; each is evaluated separately."""

    parts_key: ClassVar[str] = "parts"

    parts: tuple[MixturePartConfig, ...]
    """Environments and their weights."""
    name: str = "mixture"
    """Name of the mixture, for messages; metrics use the names of the parts."""

    def _stream(
        self, environments: Mapping[str, AbstractEnvironment], configs: Mapping[str, MixturePartConfig], seed: int
    ) -> TaskStream:
        return MixtureStream(environments, {name: part.weight for name, part in configs.items()}, seed)


@dataclasses.dataclass(frozen=True)
class MixtureStream(TaskStream):
    """Draws each task from an environment sampled by weight; every environment continues in its own task order.

    The environment of the n-th task depends on seed, n and weights only. The state is `{drawn: n, parts: {name: state
    of the part's stream}}`; other entries are kept.
    """

    environments: Mapping[str, AbstractEnvironment]
    weights: Mapping[str, float]
    """Weights by name of the environments to draw from; above 0."""
    seed: int
    """Seed for the choice of environments and for the task order of each."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all environments; each has separate metrics."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Draw tasks by weight."""
        names = list(self.weights)
        bounds = list(itertools.accumulate(self.weights.values()))
        streams = {name: self.environments[name].stream(derive_seed(self.seed, "part", name)) for name in names}
        start, cursors = state.get("drawn", 0), dict(state.get("parts", {}))
        tasks: list[Task] = []
        for index in range(start, start + count):
            place = random.Random(derive_seed(self.seed, "which part", index)).random() * bounds[-1]
            name = names[min(bisect.bisect_right(bounds, place), len(names) - 1)]
            drawn, cursors[name] = streams[name].draw(cursors.get(name, {}), 1)
            tasks += drawn
        return tasks, {**state, "drawn": start + count, "parts": cursors}


@dataclasses.dataclass(frozen=True)
class LessonConfig(ConfigSection):
    """Lesson of a curriculum."""

    name: str
    """Name of the lesson in `after`, messages and metrics."""
    environment: EnvironmentConfig
    """Environment of the lesson; environment names must differ between lessons."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Sampling weight relative to the other open lessons."""
    after: tuple[str, ...] = ()
    """Names of the lessons that must have reached `unlock_at` before this lesson opens; empty: it is open."""
    unlock_at: float = 0.7
    """Mean score over `window` at which the lessons that depend on this one may open."""
    graduate_at: float | None = None
    """Mean score at which the lesson is no longer drawn, at least `unlock_at`; null: it is always drawn.
    If all open lessons have graduated, they are drawn again."""
    window: Annotated[int, Ge(1)] = 200
    """Number of the lesson's last scored rollouts in its mean score; the score is undefined until there are as many."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.graduate_at is not None and self.graduate_at < self.unlock_at:
            raise ValueError(
                f"lesson {self.name!r}: graduate_at {self.graduate_at} is below unlock_at {self.unlock_at}, so it "
                "would graduate before it unlocks other lessons; raise graduate_at or lower unlock_at"
            )


@EnvironmentConfig.register_subclass("curriculum")
@dataclasses.dataclass(frozen=True)
class CurriculumConfig(CompositeConfig):
    """Lessons with dependencies. Training tasks are a mixture of the open lessons, which training scores determine.

    The score of a rollout is its component `correct` or, if absent, its return.
    """

    parts_key: ClassVar[str] = "lessons"

    lessons: tuple[LessonConfig, ...]
    """The lessons."""
    name: str = "curriculum"
    """Name of the curriculum, for messages."""

    def __post_init__(self) -> None:
        CompositeConfig.__post_init__(self)
        names = [lesson.name for lesson in self.lessons]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"curriculum {self.name!r} has several lessons named {repeated[0]!r}; names must differ")
        for lesson in self.lessons:
            for other in lesson.after:
                if other not in names:
                    raise ValueError(
                        f"lesson {lesson.name!r} depends on {other!r}, which is not a lesson; {nearest(other, names)}"
                    )
        try:
            graphlib.TopologicalSorter({lesson.name: lesson.after for lesson in self.lessons}).prepare()
        except graphlib.CycleError as error:
            cycle = reversed(error.args[1])
            raise ValueError(
                f"curriculum {self.name!r}: lessons depend on one another in a cycle: "
                f"{' after '.join(map(repr, cycle))}; remove one name from `after`"
            ) from error

    def _stream(
        self, environments: Mapping[str, AbstractEnvironment], configs: Mapping[str, LessonConfig], seed: int
    ) -> TaskStream:
        return CurriculumStream(environments, configs, seed)


@dataclasses.dataclass(frozen=True)
class CurriculumStream(TaskStream):
    """Draws from the open lessons by weight.

    In addition to the entries of a mixture's state, its state has the last scores of each lesson (`scores`) and the
    lessons that have ever reached `unlock_at` (`reached`) and `graduate_at` (`graduated`).
    """

    environments: Mapping[str, AbstractEnvironment]
    lessons: Mapping[str, LessonConfig]
    """Lessons by environment name."""
    seed: int

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all environments; each has separate metrics."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Draw tasks from the open lessons by weight."""
        opened = {name: lesson for name, lesson in self.lessons.items() if _is_open(lesson, state)}
        graduated = state.get("graduated", ())
        drawn = {name: lesson for name, lesson in opened.items() if lesson.name not in graduated} or opened
        weights = {name: lesson.weight for name, lesson in drawn.items()}
        return MixtureStream(self.environments, weights, self.seed).draw(state, count)

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Record the scores of rollouts and update the reached and graduated lessons."""
        scores = {lesson.name: list(state.get("scores", {}).get(lesson.name, ())) for lesson in self.lessons.values()}
        for rollout in (rollout for group in groups for rollout in group.rollouts if rollout.rewards):
            lesson = self.lessons[rollout.task.environment]
            correct = rollout.score_of(CORRECT)
            score = float(exact_sum(rollout.rewards.values()) if correct is None else correct)
            scores[lesson.name] = [*scores[lesson.name], score][-lesson.window :]
        state = {**state, "scores": scores}
        reached, graduated = set(state.get("reached", ())), set(state.get("graduated", ()))
        for lesson in self.lessons.values():
            mean = _mean_score(lesson, state)
            if mean is not None and mean >= lesson.unlock_at:
                reached.add(lesson.name)
            if mean is not None and lesson.graduate_at is not None and mean >= lesson.graduate_at:
                graduated.add(lesson.name)
        return {**state, "reached": sorted(reached), "graduated": sorted(graduated)}

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Return `curriculum/<lesson>/open` (1 or 0) and, once its window is full, `curriculum/<lesson>/score`."""
        metrics: dict[str, float] = {}
        for lesson in self.lessons.values():
            metrics[f"curriculum/{lesson.name}/open"] = float(_is_open(lesson, state))
            if (score := _mean_score(lesson, state)) is not None:
                metrics[f"curriculum/{lesson.name}/score"] = score
        return metrics


def _is_open(lesson: LessonConfig, state: StreamState) -> bool:
    return set(lesson.after) <= set(state.get("reached", ()))


def _mean_score(lesson: LessonConfig, state: StreamState) -> float | None:
    scores = state.get("scores", {}).get(lesson.name, ())
    return math.fsum(scores) / len(scores) if len(scores) == lesson.window else None
