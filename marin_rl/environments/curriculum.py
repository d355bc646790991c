# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Lessons that open one after the other, as the policy gets better at those before."""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from marin_rl.environments.base import Environment, EnvironmentConfig, check_nested
from marin_rl.environments.composite import CompositeEnvironment, by_name, draw_by_weight, part_rewards
from marin_rl.environments.single_turn import CORRECT
from marin_rl.environments.task_stream import StreamState
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.types import Rollout, RolloutGroup, Task


@dataclasses.dataclass(frozen=True)
class LessonConfig:
    """One lesson of a curriculum."""

    name: str
    """Its name in `after`, in messages and in metrics."""
    environment: EnvironmentConfig
    """What is practised; its own name must differ from those of the other lessons."""
    weight: float = 1.0
    """How often tasks are drawn from it while it is open, beside the weights of other open lessons; above 0."""
    after: tuple[str, ...] = ()
    """Names of the lessons that must have reached their `unlock_at` before this one opens; none: it is open."""
    unlock_at: float = 0.7
    """The score from which on this lesson has been learned, and those after it may open: the mean over `window`."""
    graduate_at: float | None = None
    """The score from which on this lesson is not drawn any more, at least `unlock_at`; null: it is drawn to the end.
    Where all open lessons have graduated, they are drawn again."""
    window: int = 200
    """How many of the lesson's last graded rollouts its score is the mean of; before there are so many it has none."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"lesson {self.name!r}: weight is {self.weight}; it must be finite and above 0")
        if self.window < 1:
            raise ValueError(f"lesson {self.name!r}: window is {self.window}; it must be at least 1 rollout")
        if self.graduate_at is not None and self.graduate_at < self.unlock_at:
            raise ValueError(
                f"lesson {self.name!r}: graduate_at {self.graduate_at} is below unlock_at {self.unlock_at}, so it "
                "would be left before it opens anything; raise it, or lower unlock_at"
            )


@EnvironmentConfig.register_subclass("curriculum")
@dataclasses.dataclass(frozen=True)
class CurriculumConfig(EnvironmentConfig):
    """Lessons with dependencies. Open lessons are a mixture; what is open follows from the training rollouts' scores.

    The score of a rollout is its component `correct` or, without one, its return.
    """

    level: ClassVar[int] = 2

    lessons: tuple[LessonConfig, ...]
    """The lessons."""
    name: str = "curriculum"
    """Name of the whole in messages."""

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
                        f"lesson {lesson.name!r} comes after {other!r}, which is no lesson; "
                        f"{hint}There are: {', '.join(names)}"
                    )
        if cycle := _find_cycle({lesson.name: lesson.after for lesson in self.lessons}):
            raise ValueError(
                f"curriculum {self.name!r}: lessons wait for one another: {' after '.join(map(repr, cycle))}; "
                "none of them could ever open, so leave out one `after`"
            )

    def reward_components(self, environment: Environment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Each lesson's own reward functions, and those of the whole."""
        return part_rewards(environment, [lesson.environment for lesson in self.lessons], self.rewards)

    def build(self) -> Environment:
        """Make the lessons' environments.

        Raises:
            ValueError: if two of them share a name, or there are none.
        """
        made = [lesson.environment.build() for lesson in self.lessons]
        parts = by_name(made, f"curriculum {self.name!r}")
        lessons = {environment.name: lesson for environment, lesson in zip(made, self.lessons, strict=True)}
        return CompositeEnvironment(self.name, parts, lambda seed: CurriculumStream(parts, lessons, seed))


def _find_cycle(after: Mapping[str, Sequence[str]]) -> list[str]:
    """Names along a cycle, the first of them again at the end; empty where there is none."""
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
class CurriculumStream:
    """Draws from the open lessons by weight.

    Its state holds, beside what a mixture's does, the last scores of each lesson (`scores`), and those that have
    reached `unlock_at` (`reached`) and `graduate_at` (`graduated`): what was reached once stays so.
    """

    environments: Mapping[str, Environment]
    """By name."""
    lessons: Mapping[str, LessonConfig]
    """The lesson of each environment, by the environment's name."""
    seed: int
    """Of the choice, and of every lesson's order."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All lessons' environments are measured apart."""
        return tuple(self.environments)

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """The next tasks, each of an open lesson chosen by weight."""
        opened = {name: lesson for name, lesson in self.lessons.items() if self._is_open(lesson, state)}
        graduated = state.get("graduated", ())
        drawn = {name: lesson for name, lesson in opened.items() if lesson.name not in graduated} or opened
        weights = {name: lesson.weight for name, lesson in drawn.items()}
        return draw_by_weight(self.environments, weights, state, count, self.seed)

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Take the scores of graded rollouts in, and see what was reached by them."""
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
        """`curriculum/<lesson>/open` (1 or 0) and, once its window is full, `curriculum/<lesson>/score`."""
        found: dict[str, float] = {}
        for lesson in self.lessons.values():
            found[f"curriculum/{lesson.name}/open"] = float(self._is_open(lesson, state))
            if (score := self._score_of(lesson, state)) is not None:
                found[f"curriculum/{lesson.name}/score"] = score
        return found

    def _is_open(self, lesson: LessonConfig, state: StreamState) -> bool:
        return set(lesson.after) <= set(state.get("reached", ()))

    def _score_of(self, lesson: LessonConfig, state: StreamState) -> float | None:
        scores = state.get("scores", {}).get(lesson.name, ())
        return sum(scores) / len(scores) if len(scores) == lesson.window else None


def _score(rollout: Rollout) -> float:
    correct = rollout.score_of(CORRECT)
    return float((rollout.total_reward or 0.0) if correct is None else correct)
