# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Curricula: lessons that unlock as the policy improves on earlier ones."""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig, StreamState, TaskStream, check_nested
from marin_rl.environments.composite import CompositeEnvironment, by_name, draw_by_weight, part_rewards
from marin_rl.environments.single_turn import CORRECT
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.types import Rollout, RolloutGroup, Task


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
            ValueError: if two of them share a name, or there are none.
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
