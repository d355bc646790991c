# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What an environment is: tasks in three disjoint splits, and episodes that speak messages."""

import abc
import dataclasses
import enum
import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import draccus

from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.sandbox.pool import PythonResult
from marin_rl.types import Info, Message, Task


class Split(enum.StrEnum):
    """Which tasks: the three never share a problem text."""

    TRAIN = "train"
    """What warm start and RL train on."""
    VALIDATION = "validation"
    """What warm start's stopping rule and tuning may look at."""
    HELD_OUT = "held_out"
    """What the reported accuracy is measured on, and nothing else."""


@dataclasses.dataclass(frozen=True)
class Step:
    """An environment's answer to one reply of the policy."""

    rewards: Mapping[str, float]
    """Reward by component name, earned by this reply."""
    messages: tuple[Message, ...] = ()
    """What the policy is shown next, none of it of role `assistant`. Where the episode is over they may be empty;
    otherwise they are the rollout's last observation, which reward functions and the store get."""
    done: bool = True
    """Whether the episode is over."""
    action: str | None = None
    """What the reply was taken for (`left`); None where that is the reply itself."""
    anchor_state: object = None
    """What identifies the state that the messages show (GiGPO), as JSON can hold it; None: the messages themselves."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What there is to measure, by name; of an episode's steps the last to name a metric decides it."""
    info: Info = dataclasses.field(default_factory=dict)
    """Free metadata about this turn, JSON values by name; stored with the rollout and shown by the viewer."""
    rollout_info: Info = dataclasses.field(default_factory=dict)
    """Free metadata about the whole episode; of an episode's steps the last to name a key decides it."""


@runtime_checkable
class Episode(Protocol):
    """One attempt at one task; used once.

    All episodes of a step run in one event loop. What takes long belongs behind an `await`: other episodes, and
    sampling, go on meanwhile. Blocking code goes into `await asyncio.to_thread(...)`.
    """

    async def step(self, reply: str) -> Step:
        """Answer the policy's reply. Whatever this raises marks the rollout as failed."""
        ...

    async def close(self) -> None:
        """Let go of whatever the episode holds; called once, however it ended."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A source of tasks and the judge of attempts at them."""

    @property
    def name(self) -> str:
        """Name under which its metrics are logged."""
        ...

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, always in the same order; no problem text occurs in two splits."""
        ...

    async def start(self, task: Task, seed: int) -> Episode:
        """Begin an attempt. Equal tasks and seeds begin equally, and show the task's messages first."""
        ...


class NoSandboxError(ValueError):
    """Programs that the policy writes would have no sandbox to run in; the message names what runs them."""


@runtime_checkable
class CodeRunner(Protocol):
    """Runs programs that a model wrote, where they can do no harm."""

    async def run_python(self, code: str, stdin: str = "") -> PythonResult:
        """Run a program as `python main.py` would."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can show how its tasks are done, over all their turns: what a warm start imitates."""

    def can_demonstrate(self, task: Task) -> bool:
        """Whether there is a demonstration of a task."""
        ...

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """A complete conversation that attempts a task well: its messages, replies, and what they were answered.

        Always the same for the same task.

        Raises:
            ValueError: if there is none.
        """
        ...


def can_demonstrate(environment: Environment, task: Task) -> bool:
    """Whether there is a conversation to imitate: the environment's demonstration, or the task's worked answer."""
    if isinstance(environment, Demonstrator):
        return environment.can_demonstrate(task)
    return task.worked_answer is not None


def demonstration(environment: Environment, task: Task) -> tuple[Message, ...]:
    """The conversation to imitate for a task.

    Args:
        environment: made the task. What it demonstrates itself comes first; otherwise the task's worked answer is
            the one reply.
        task: what is attempted.

    Returns:
        The task's messages, then replies (role `assistant`) and what they were answered.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(environment, Demonstrator):
        return environment.demonstrate(task)
    if task.worked_answer is None:
        raise ValueError(f"task {task.id!r} of environment {task.environment!r} has no worked answer to imitate")
    return (*task.messages, Message(role="assistant", content=task.worked_answer))


@runtime_checkable
class CodeRunningEnvironment(Protocol):
    """An environment that runs programs which the policy wrote, in a sandbox that is made later than it."""

    def connect_code_runner(self, runner: CodeRunner | None) -> bool:
        """Take the sandbox; called once, before anything is played. Whether there is something to run in it.

        Raises:
            NoSandboxError: if there is something to run, and None to run it in.
        """
        ...


def connect_code_runner(environment: Environment, runner: CodeRunner | None) -> bool:
    """Give an environment the sandbox, if it or a part of it runs programs.

    Args:
        environment: about to be played.
        runner: runs programs where they can do no harm; None where there is no sandbox.

    Returns:
        Whether it runs programs, so that the sandbox must be started.

    Raises:
        NoSandboxError: if it runs programs and there is no sandbox; names environment and tool.
    """
    return isinstance(environment, CodeRunningEnvironment) and environment.connect_code_runner(runner)


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(draccus.ChoiceRegistry, abc.ABC):
    """Chooses an environment by `type`."""

    level: ClassVar[int] = 0
    """How deep environments nest: this one may hold those of lower levels. 0: it holds none."""

    rewards: tuple[RewardComponentConfig, ...] = dataclasses.field(default=(), kw_only=True)
    """Reward functions that judge its rollouts, besides the environment itself."""

    def reward_components(self, environment: Environment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Which reward functions judge the rollouts of which environment, by its name.

        Args:
            environment: what `build` made.
        """
        return {environment.name: self.rewards}

    @abc.abstractmethod
    def build(self) -> Environment:
        """Make the environment.

        Raises:
            ValueError: if it would have no tasks; the message names the source.
        """


def check_nested(outer: EnvironmentConfig, inner: EnvironmentConfig, key: str) -> None:
    """Refuse an environment config that `outer` cannot contain: its level must be lower.

    Args:
        outer: a config that contains other environments.
        inner: one of them.
        key: where `inner` stands within `outer`, for the message.

    Raises:
        ValueError: if the level of `inner` is not below that of `outer`.
    """
    if inner.level >= outer.level:
        known = EnvironmentConfig.get_known_choices()
        allowed = [name for name, choice in known.items() if choice.level < outer.level]
        raise ValueError(
            f"{key}.type is {EnvironmentConfig.get_choice_name(type(inner))!r}, which cannot be nested in an "
            f"environment of type {EnvironmentConfig.get_choice_name(type(outer))!r}; use one of {', '.join(allowed)}"
        )


def split_of(problem: str, held_out: float, validation: float) -> Split:
    """The split that a problem text belongs to, by its hash: stable across runs, seeds and machines.

    Args:
        problem: the complete text of the problem; equal texts always share a split.
        held_out: share of all problems that are held out, in [0, 1).
        validation: share of all problems kept for validation, in [0, 1).

    >>> split_of("2+3=", 0.1, 0.1) is split_of("2+3=", 0.1, 0.1)
    True
    """
    digest = hashlib.sha256(problem.encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    if position < held_out:
        return Split.HELD_OUT
    if position < held_out + validation:
        return Split.VALIDATION
    return Split.TRAIN
