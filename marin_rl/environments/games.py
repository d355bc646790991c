# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Base of games: settings and tasks that all games share, and episodes that turn replies into actions.

A game is an adapter: its config draws the starts of its tasks (`Opening`), and its environment begins a `Game`, which
takes the action in a reply and returns an `Outcome`. What a reply costs, shows and ends is decided here, once.

The simplest adapter of another package is a class with the methods `open`, `start` and `step` (see `open_games` and
`ProcessGameEnvironment`), each of whose games runs in a separate process.
"""

import abc
import asyncio
import dataclasses
import enum
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

from annotated_types import Ge, Le

from marin_rl.environments.base import (
    CORRECT,
    FORMAT,
    AbstractSplitEnvironment,
    AgentEpisode,
    Episode,
    SplitConfig,
    Step,
    bounded_text,
)
from marin_rl.environments.game_process import GameError, GameProcess, GameServer, call_each
from marin_rl.environments.splits import Problem, TaskSplits, problem_id, without_duplicates
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.rewards.reply_text import check_pattern, graded_text, search_reply
from marin_rl.types import Info, Message, Task
from marin_rl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)

GAME = "game"
"""Reward component: the game's own reward, weighted; absent if `game_weight` is 0."""
STEP = "step"
"""Reward component: a constant reward for every reply; absent if it is 0."""


class View(enum.StrEnum):
    """Text format of a game."""

    READABLE = "readable"
    """Instructions, descriptions and actions in words; for pretrained models."""
    COMPACT = "compact"
    """The bare state without instructions; for tiny models with byte tokens."""


class Opening(NamedTuple):
    """Start of a game, from which a task is made."""

    identity: str
    """Text that identifies the start and determines its split."""
    observation: str
    """Text of the first observation."""
    start: Any
    """Value from which `AbstractGameEnvironment.begin` starts the game."""
    anchor_state: object = None
    """JSON value that identifies the state; None if the observation does."""
    rules: str = ""
    """System message if the config has none; empty for no message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Response of a game to a reply."""

    observation: str
    """Text of the state after the reply. If it is empty at the end, there is no message."""
    action: str | None
    """The action that was taken; None if the reply had no valid action."""
    notice: str = ""
    """Text before the observation: why the reply had no valid action."""
    reward: float = 0.0
    """The game's own reward of this reply."""
    done: bool = False
    """Whether the game has ended."""
    success: bool = False
    """Whether the game is won."""
    anchor_state: object = None
    """JSON value that identifies the state; None if the observation does."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further metrics of the episode by name."""
    info: Info = dataclasses.field(default_factory=dict)
    """Metadata of the episode: JSON values by name."""


class Game(Protocol):
    """One game, which has begun."""

    async def step(self, action: str) -> Outcome:
        """Take the action in a reply: the text after its thoughts, or the match of `action_regex`; may be empty."""
        ...

    async def close(self) -> None:
        """Release the resources of the game."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GameConfig(SplitConfig):
    """Settings of all games. Games are drawn once, deduplicated, and split by their starts."""

    rewards_success: ClassVar[bool] = True
    """Whether success is a reward (component `correct`) beside the game's own."""

    num_tasks: Annotated[int, Ge(1)] = 200
    """Number of games to draw, over all splits, repetitions included."""
    seed: int = 0
    """Seed of the games and their order. The split of a game does not depend on it."""
    system_prompt: str | None = None
    """System message; an empty text omits it. Default: the rules of the game, if it has any."""
    action_regex: str | None = None
    """Regular expression; group 1 of its last match in the reply after its thoughts is the action. Default: all of that
    text."""
    max_steps: Annotated[int, Ge(1)] | None = None
    """Maximum number of replies, after which the game ends; default: the game's own limit. `rollouts.max_turns` also
    limits the replies, but then the rollout counts as truncated."""
    game_weight: float = 1.0
    """Factor of the game's own reward; 0 omits the component `game`."""
    step_reward: float = 0.0
    """Reward of every reply (component `step`); use a negative value for short games."""
    invalid_reward: Annotated[float, Le(0), "or replies without an action pay"] = 0.0
    """Reward of a reply without a valid action (component `format`)."""
    max_characters: Annotated[int, Ge(1)] = 8000
    """Maximum number of characters of an observation; the rest is replaced by a notice."""
    name: str | None = None
    """Name for metrics; default: the game's id, or the type of the environment."""

    def __post_init__(self) -> None:
        SplitConfig.__post_init__(self)
        if self.action_regex is not None:
            check_pattern("action_regex", self.action_regex, groups=1)

    @property
    def default_name(self) -> str:
        """Name for metrics if `name` is None: the type of the environment."""
        return self.get_choice_name(type(self))

    @property
    def label(self) -> str:
        """Name for metrics."""
        return self.default_name if self.name is None else self.name

    def message(self, text: str) -> Message:
        """Return the message with an observation, of limited length."""
        return Message(role="user", content=bounded_text(text, self.max_characters))

    def system_messages(self, rules: str) -> tuple[Message, ...]:
        """Return the system message, if there is one; `rules` is its default text."""
        text = rules if self.system_prompt is None else self.system_prompt
        return (Message(role="system", content=text),) if text else ()

    def split(self, openings: Iterable[Opening], source: str) -> tuple[TaskSplits, dict[str, Any]]:
        """Make the tasks of games and divide them; also return `Opening.start` by task id.

        The openings may have duplicates. Messages name their origin, `source`.

        Raises:
            ValueError: if there are too few distinct games.
        """
        starts: dict[str, Any] = {}

        def problems() -> Iterator[Problem]:
            for index, opening in enumerate(openings):
                task = Task(
                    id=problem_id(opening.identity),
                    environment=self.label,
                    messages=(*self.system_messages(opening.rules), self.message(opening.observation)),
                    answer="",
                    anchor_state=opening.anchor_state,
                )
                starts.setdefault(task.id, opening.start)
                yield Problem(opening.identity, task, where=f"game {index}")

        return self.divide(without_duplicates(problems(), source), source), starts


@dataclasses.dataclass
class GameEpisode:
    """Episode of one game."""

    config: GameConfig
    game: Game
    max_steps: int | None
    """Maximum number of replies."""
    steps: int = 0
    """Number of replies."""
    invalid: int = 0
    """Number of replies without a valid action."""
    over: bool = False
    """Whether the episode has ended."""

    async def step(self, reply: str) -> Step:
        """Take the action in a reply.

        Raises:
            RuntimeError: if the episode has ended.
        """
        if self.over:
            raise RuntimeError(f"the game {self.config.label!r} has ended; start another")
        return self.respond(await self.game.step(await find_action(reply, self.config.action_regex)))

    def respond(self, outcome: Outcome) -> Step:
        """Count a reply, and return its step: rewards, next messages, and whether it ends the episode."""
        config = self.config
        self.steps += 1
        self.invalid += outcome.action is None
        is_last = self.max_steps is not None and self.steps >= self.max_steps
        self.over = outcome.done or is_last
        text = "" if is_last else outcome.notice + outcome.observation
        rewards = {CORRECT: float(outcome.success)} if config.rewards_success else {}
        if config.game_weight:
            rewards[GAME] = config.game_weight * outcome.reward
        if config.step_reward:
            rewards[STEP] = config.step_reward
        if config.invalid_reward:
            rewards[FORMAT] = config.invalid_reward if outcome.action is None else 0.0
        return Step(
            rewards=rewards,
            messages=() if self.over and not text else (config.message(text),),
            done=self.over,
            action=outcome.action,
            anchor_state=outcome.anchor_state,
            metrics={
                "success": float(outcome.success),
                "steps": float(self.steps),
                "invalid_actions": float(self.invalid),
                **outcome.metrics,
            },
            rollout_info=outcome.info,
        )

    async def close(self) -> None:
        """Close the game."""
        await self.game.close()


@dataclasses.dataclass(frozen=True)
class AbstractGameEnvironment(AbstractSplitEnvironment):
    """Tasks and episodes of games. A subclass defines `begin`."""

    config: GameConfig
    starts: Mapping[str, Any]
    """`Opening.start` by task id."""

    async def start(self, task: Task, seed: int) -> Episode | AgentEpisode:
        """Start a game; task and seed determine its chance."""
        return await self.begin(self.start_of(task), derive_seed("game", task.id, seed))

    @abc.abstractmethod
    async def begin(self, start: Any, seed: int) -> Episode | AgentEpisode:
        """Start a game from the task's `Opening.start`, with a seed for its chance."""

    def start_of(self, task: Task) -> Any:
        """Return the start of a task.

        Raises:
            ValueError: if the task belongs to another environment.
        """
        self.require_own(task, self.starts)
        return self.starts[task.id]


def open_games(server: GameServer, arguments: list[dict[str, Any]], source: str) -> list[Opening]:
    """Call the method `open` of a new game for each set of arguments; it returns the fields of an `Opening`.

    Raises:
        ValueError: if a game cannot be opened; the message begins with `source`.
    """
    try:
        return [Opening(**fields) for fields in call_each(server, "open", arguments)]
    except GameError as error:
        raise ValueError(f"{source}: {error}") from error


@dataclasses.dataclass(frozen=True)
class ProcessGame:
    """A game in a separate process, whose method `step(action)` returns the fields of an `Outcome`."""

    process: GameProcess

    async def step(self, action: str) -> Outcome:
        """Take the action in a reply.

        Raises:
            GameError: if the game raised an error or its process ended.
        """
        return Outcome(**await self.process.call("step", action=action))

    async def close(self) -> None:
        """End the process."""
        self.process.close()


@dataclasses.dataclass(frozen=True)
class ProcessGameEnvironment(AbstractGameEnvironment):
    """Tasks and episodes of games that run in processes of their own."""

    server: GameServer
    """Runs the games."""

    async def begin(self, start: Any, seed: int) -> Episode | AgentEpisode:
        """Start a game by its method `start(start, seed)`."""
        game, _ = await self.server.begin("start", start=start, seed=seed)
        return GameEpisode(self.config, ProcessGame(game), self.config.max_steps)


async def find_action(reply: str, regex: str | None) -> str:
    r"""Return the action in a reply; empty if there is none, or if the search for it exceeds a limit.

    Thoughts in the reply are ignored. Group 1 of the last match of `regex` is the action. None: the whole text.

    >>> asyncio.run(find_action("<think>north?</think> go east", None))
    'go east'
    >>> asyncio.run(find_action("go [east] or [west]", r"\[(\w+)\]"))
    'west'
    """
    text = graded_text(reply) or ""
    if regex is None:
        return text.strip()
    try:
        # The search blocks; other episodes continue meanwhile.
        found = await asyncio.to_thread(search_reply, regex, text)
    except NoAnswerError as error:
        logger.warning("the search for an action was given up, no action: %s: %.200r", error, text)
        return ""
    return "" if found is None else found.group or ""
