# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Interfaces of environments: tasks in three disjoint splits, and episodes that exchange messages."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

import draccus
from annotated_types import Ge, Lt

from marin_rl.environments.splits import Problem, Split, TaskSplits, check_shares, split_problems
from marin_rl.rewards.component import RewardComponentConfig
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import Info, Message, RolloutGroup, Task
from marin_rl.utils.output import replace_surrogates
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.checks import ConfigSection, check_fields


@dataclasses.dataclass(frozen=True)
class Step:
    """Response of an environment to one reply of the policy."""

    rewards: Mapping[str, float]
    """Reward of this reply by component name."""
    messages: tuple[Message, ...] = ()
    """Next messages shown to the policy, without role `assistant`. May be empty if the episode is done; otherwise they
    are the last observation of the rollout, which reward functions and the rollout store receive."""
    done: bool = True
    """Whether the episode is done."""
    action: str | None = None
    """Action parsed from the reply (`left`); None if the action is the reply itself."""
    anchor_state: object = None
    """JSON value that identifies the state shown by the messages (GiGPO); None if the messages identify it."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics by name; the last step of an episode that has a name determines its value."""
    info: Info = dataclasses.field(default_factory=dict)
    """Metadata of this turn: JSON values by name, stored with the rollout and shown by the viewer."""
    rollout_info: Info = dataclasses.field(default_factory=dict)
    """Metadata of the episode: JSON values by name; the last step that has a name determines its value. The viewer's
    lists show a text `reason`, which explains the rewards."""


@runtime_checkable
class Episode(Protocol):
    """One attempt at one task; used once.

    All episodes of a training step share one event loop. Use `await` for slow operations, so that other episodes and
    sampling continue, and `await asyncio.to_thread(...)` for blocking code.
    """

    async def step(self, reply: str) -> Step:
        """Respond to a reply of the policy. Any exception marks the rollout as failed."""
        ...

    async def close(self) -> None:
        """Release the resources of the episode; called exactly once, also after a failure."""
        ...


@dataclasses.dataclass(frozen=True)
class AgentConnection:
    """Address of the policy for one episode of an agent."""

    base_url: str
    """Base URL of OpenAI's API."""
    api_key: str
    """Key of the episode; invalid after its end."""
    untrained_url: str
    """Base URL of replies that are sampled from the policy, but are no part of the rollout: those of an opponent."""
    reward_url: str
    """URL that takes rewards."""
    rollout_id: str
    """Id of the rollout."""
    mark_truncated: Callable[[], None]
    """Notes that a limit of the run ends the episode, which makes the status of the rollout `truncated`."""


@dataclasses.dataclass(frozen=True)
class AgentResult:
    """Result of an agent's episode."""

    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Rewards of the whole episode by component name."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics by name."""
    info: Info = dataclasses.field(default_factory=dict)
    """Metadata of the episode: JSON values by name."""


class AgentEpisode(abc.ABC):
    """One attempt by a program that requests replies of the policy itself, over OpenAI's API; used once."""

    @abc.abstractmethod
    async def play(self, connection: AgentConnection) -> AgentResult:
        """Run the program. Any exception marks the rollout as failed; cancellation must end the program."""


class NoSandboxError(ValueError):
    """Raised if the policy's programs have no sandbox to run in; the message names environment and tool."""


StreamState = Mapping[str, Any]
"""State of a stream as JSON values; initially empty. Immutable: updates return a new state."""


class TaskStream(abc.ABC):
    """Infinite stream of training tasks.

    The stream itself is stateless. Its state is an argument and is stored in every checkpoint, so that a resumed run
    draws the same tasks as an uninterrupted one.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the environments with separate metrics; empty if there is only one environment."""
        return ()

    @abc.abstractmethod
    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Return the next `count` tasks and the state after them."""

    def learn(self, state: StreamState, groups: Sequence[RolloutGroup]) -> StreamState:
        """Return the state updated with the finished groups of drawn tasks; by default it does not depend on them."""
        return state

    def metrics(self, state: StreamState) -> dict[str, float]:
        """Return metrics of a state; none by default."""
        return {}


class AbstractEnvironment(abc.ABC):
    """Source of tasks, and of the episodes that score attempts at them.

    A subclass defines `name`, `tasks` and `start`. The other methods have defaults.
    """

    if TYPE_CHECKING:
        # At runtime a subclass may define it as an attribute, a dataclass field or a property.
        @property
        def name(self) -> str:
            """Name for metrics."""
            ...

    @property
    def waits(self) -> bool:
        """Whether its episodes may wait for anything. Calls that never do are cheaper, and fail if they do wait."""
        return True

    @abc.abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order; no problem text is in two splits."""

    @abc.abstractmethod
    async def start(self, task: Task, seed: int) -> "Episode | AgentEpisode":
        """Start an attempt, which depends on task and seed only. An `Episode` begins with the task's messages.

        Raises:
            ValueError: if the task belongs to another environment.
        """

    def stream(self, seed: int) -> TaskStream:
        """Return the stream of training tasks; by default each task once per epoch."""
        return EpochStream(self, seed)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether a task has a demonstration; by default a worked answer."""
        return task.worked_answer is not None

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return a conversation that solves a task, for a warm start to imitate; deterministic for each task.

        By default the task's worked answer is the only reply. The result has the task's messages, then replies (role
        `assistant`) and observations.

        Raises:
            ValueError: if the task has no demonstration.
        """
        if task.worked_answer is None:
            raise ValueError(f"task {task.id!r} of environment {task.environment!r} has no worked answer to imitate")
        return (*task.messages, Message(role="assistant", content=task.worked_answer))

    def connect_sandbox(self, sandbox: Sandbox | None) -> bool:
        """Connect the environment to the sandbox, which is created after it; called once before any rollout.

        Returns whether the environment runs programs of the policy, so that the sandbox must be started; False by
        default.

        Raises:
            NoSandboxError: if it runs programs and `sandbox` is None.
        """
        return False


@dataclasses.dataclass(frozen=True)
class AbstractSplitEnvironment(AbstractEnvironment):
    """Environment whose tasks were divided into splits when it was built."""

    name: str
    """Name for metrics."""
    splits: TaskSplits

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split in a fixed order."""
        return self.splits[split]

    def require_own(self, task: Task, ids: Container[str] | None = None) -> None:
        """Check that a task belongs to this environment, and its id to `ids` (None: any id is valid).

        Raises:
            ValueError: if it belongs to another environment, or its id is not one of `ids`.
        """
        if task.environment != self.name or (ids is not None and task.id not in ids):
            raise ValueError(f"environment {self.name!r} has no task {task.id!r} of {task.environment!r}")


@dataclasses.dataclass(frozen=True)
class EpochStream(TaskStream):
    """Draws each task once per epoch, in a new random order in each epoch."""

    environment: AbstractEnvironment
    """Source of the tasks."""
    seed: int
    """Seed for the order of every epoch."""

    def draw(self, state: StreamState, count: int) -> tuple[list[Task], StreamState]:
        """Return the next tasks of this epoch and the epochs after it."""
        tasks = self.environment.tasks(Split.TRAIN)
        start, end = state.get("drawn", 0), state.get("drawn", 0) + count
        places = (divmod(index, len(tasks)) for index in range(start, end))
        return [tasks[epoch_order(self.seed, epoch, len(tasks))[place]] for epoch, place in places], {"drawn": end}


@functools.lru_cache(maxsize=64)
def epoch_order(seed: int, epoch: int, size: int) -> Sequence[int]:
    """Return the order of a number of items in an epoch: a permutation drawn with the seed and the epoch."""
    import numpy as np

    return np.random.default_rng(derive_seed(seed, "task order", epoch)).permutation(size).tolist()


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig(ConfigSection, draccus.ChoiceRegistry, abc.ABC):
    """Base of environment configs, selected by `type`."""

    level: ClassVar[int] = 0
    """Nesting level: an environment may contain environments of lower levels; 0 contains none."""
    runs_agents: ClassVar[bool] = False
    """Whether its episodes are agents, whose conversations may overlap in time."""

    rewards: tuple[RewardComponentConfig, ...] = dataclasses.field(default=(), kw_only=True)
    """Reward functions for its rollouts, in addition to the environment's rewards."""

    def reward_components(self, environment: AbstractEnvironment) -> Mapping[str, tuple[RewardComponentConfig, ...]]:
        """Return the reward functions for rollouts by environment name; `environment` is the result of `build`."""
        return {environment.name: self.rewards}

    @abc.abstractmethod
    def build(self) -> AbstractEnvironment:
        """Build the environment.

        Raises:
            ValueError: if it would have no tasks; the message names the source.
        """

    def check_nested(self, inner: "EnvironmentConfig", key: str) -> None:
        """Check that this environment can contain another; the message names its `key` in this config.

        Raises:
            ValueError: if the level of `inner` is not below the level of this config.
        """
        if inner.level >= self.level:
            known = EnvironmentConfig.get_known_choices()
            allowed = ", ".join(name for name, choice in known.items() if choice.level < self.level)
            raise ValueError(
                f"{key}.type is {self.get_choice_name(type(inner))!r}, which cannot be nested in an "
                f"environment of type {self.get_choice_name(type(self))!r}; use one of {allowed}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitConfig(EnvironmentConfig):
    """Base of the configs of environments whose problems are split by share."""

    held_out: Annotated[float, Ge(0), Lt(1)] = 0.1
    """Share of problems that are held out, by hash of their text (of a game: its start)."""
    validation: Annotated[float, Ge(0), Lt(1)] = 0.05
    """Share of problems for validation, by the same hash."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_shares(self.held_out, self.validation)

    def divide(self, problems: Sequence[Problem], source: str) -> TaskSplits:
        """Return the tasks of distinct problems by split; see `split_problems`."""
        return split_problems(problems, self.held_out, self.validation, source)


CORRECT = "correct"
"""Reward component: 1 if the reply is right."""
FORMAT = "format"
"""Reward component: 1 if the reply has the required format; absent if no format is required."""


def bounded_text(text: str, max_characters: int) -> str:
    r"""Replace lone surrogates, which tokenizers reject, and characters beyond a limit by a notice of their number.

    >>> bounded_text("a\ud800bcdef", 4)
    'a?bc\n[3 more characters]'
    """
    text = replace_surrogates(text)
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n[{len(text) - max_characters} more characters]"
