# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Text versions of gymnasium games: FrozenLake, Taxi, CliffWalking, and other games with discrete actions."""

import asyncio
import dataclasses
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from marin_rl.config_fields import NAMES_FILES, check_finite, convert_enum_fields
from marin_rl.environments.base import (
    CORRECT,
    FORMAT,
    AbstractEnvironment,
    AbstractSplitEnvironment,
    EnvironmentConfig,
    Episode,
    Step,
    check_invalid_reward,
)
from marin_rl.environments.external import action_of
from marin_rl.environments.games import Board, Start, View, draw_start
from marin_rl.environments.splits import Problem, check_shares, problem_id, split_problems, without_duplicates
from marin_rl.rewards.reply_text import check_pattern, extract_last, graded_text
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task

GAME = "game"
"""Reward component: the game's native reward."""
STEP = "step"
"""Reward component: a constant reward for every reply; absent if it is 0."""


@EnvironmentConfig.register_subclass("text_game")
@dataclasses.dataclass(frozen=True)
class TextGameConfig(EnvironmentConfig):
    """A gymnasium game. Each task has its own map and initial state; each reply is an action.

    Games are drawn once, deduplicated, and split by map and initial state. Set `rollouts.max_turns` to the maximum
    number of turns of a game.
    """

    id: str
    """Name of the game in gymnasium: `FrozenLake-v1`, `Taxi-v4`, `CliffWalking-v1`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the game, such as `{is_slippery: false}`. FrozenLake without `map_name` and `desc` draws a map for
    each task, and also accepts `size` (side length in cells, 4) and `p` (probability of ice, 0.8)."""
    num_tasks: int = 1000
    """Number of games to draw, over all splits, repetitions included."""
    seed: int = 0
    """Seed of the games and their order. The split of a game does not depend on it."""
    random_start: bool = False
    """Whether to draw the initial state uniformly from the states that are reachable from the game's initial states and
    can still be won. Required for games with one map and one initial state, which otherwise have a single task."""
    max_steps: int | None = None
    """Maximum number of replies; default: the game's limit (FrozenLake 100, Taxi 200, CliffWalking none)."""
    view: View = View.READABLE
    """Text format of states and actions: `readable` for pretrained models, `compact` for tiny ones."""
    rules: str | None = None
    """System message; an empty text omits it. Default: the game's rules if `view` is `readable`, no message if
    `compact`."""
    action_regex: str | None = None
    """Regular expression; group 1 of its last match in the reply after its thoughts is the action's name or first
    letter, in any case. Default: the last action name (with `compact`, letter) that is a separate word."""
    game_weight: float = 1.0
    """Factor of the game's native reward; 0 omits the component `game`."""
    step_reward: float = 0.0
    """Reward of every reply (component `step`); use a negative value for short games."""
    invalid_reward: float = 0.0
    """Reward of a reply without a valid action (component `format`); at most 0."""
    detours: float = 0.0
    """Probability that a demonstrated action is drawn from all actions that do not lose immediately, instead of the
    optimal ones; in [0, 1)."""
    held_out: float = 0.1
    """Share of games that are held out, by hash of map and initial state; in [0, 1)."""
    validation: float = 0.05
    """Share of games for validation, by hash of map and initial state; in [0, 1)."""
    name: str | None = None
    """Name for metrics; default: the game's id."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if self.num_tasks < 1:
            raise ValueError(f"num_tasks must be at least 1, got {self.num_tasks}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, or null for the game's limit; got {self.max_steps}")
        check_finite(self, "game_weight", "step_reward", "invalid_reward")
        check_invalid_reward(self.invalid_reward)
        if not 0.0 <= self.detours < 1.0:
            raise ValueError(f"detours is a probability and must be in [0, 1), got {self.detours}")
        if self.action_regex is not None:
            check_pattern("action_regex", self.action_regex, groups=1)
        check_shares(self.held_out, self.validation)

    def build(self) -> AbstractEnvironment:
        """Draw the games and split them.

        Raises:
            ValueError: if gymnasium does not have the game or rejects the options, or there are too few distinct games.
        """
        source = f"text game {self.id!r}"
        starts: dict[str, Start] = {}
        problems = without_duplicates(self._problems(starts), source)
        if len(problems) == 1 and self.held_out + self.validation > 0:
            raise ValueError(
                f"{source} has a single initial state with options {self.options}, so its one task cannot be split; "
                "set random_start: true, or held_out: 0 and validation: 0"
            )
        splits = split_problems(problems, self.held_out, self.validation, source)
        return TextGameEnvironment(problems[0].task.environment, splits, self, starts)

    def _problems(self, starts: dict[str, Start]) -> Iterator[Problem]:
        """Draw the games, and add their initial states to `starts` by problem id."""
        for index in range(self.num_tasks):
            seed = derive_seed(self.seed, "game", index)
            start = draw_start(self.id, self.options, seed, self.random_start)
            text = start.identity
            starts.setdefault(problem_id(text), start)
            task = Task(
                id=problem_id(text),
                environment=self.id if self.name is None else self.name,
                messages=self._opening(start),
                answer="",
                anchor_state=start.anchor(start.state),
            )
            yield Problem(text, task, where=f"game {index}")

    def _opening(self, start: Start) -> tuple[Message, ...]:
        board = start.prototype.board
        observation = Message(role="user", content=board.show(*start.begin(0), self.view))
        rules = self.rules
        if rules is None:
            names = ", ".join(board.actions)
            rules = f"{board.rules} Reply with one of: {names}." if self.view is View.READABLE else ""
        return (Message(role="system", content=rules), observation) if rules else (observation,)


@dataclasses.dataclass
class TextGameEpisode:
    """Episode of one game."""

    config: TextGameConfig
    start: Start
    game: Any
    """The gymnasium environment, unwrapped."""
    observation: Any
    """Last observation: the state, for games with a transition table."""
    steps: int = 0
    """Number of replies."""
    invalid: int = 0
    """Number of replies without a valid action."""
    over: bool = False

    async def step(self, reply: str) -> Step:
        """Take the action in the reply; if it has none, the game does not change and the policy receives a notice.

        Raises:
            RuntimeError: if the game has ended.
        """
        if self.config.action_regex is None:
            return self.take_turn(reply)
        return await asyncio.to_thread(self.take_turn, reply)

    async def close(self) -> None:
        """Close the game."""
        self.game.close()

    def take_turn(self, reply: str) -> Step:
        """Synchronous version of `step`, which blocks if there is an `action_regex`."""
        if self.over:
            raise RuntimeError(f"the game {self.start.id!r} has ended; start another")
        board, config = self.start.prototype.board, self.config
        action = parse_action(reply, board, config.view, config.action_regex)
        self.steps += 1
        native_reward, won, notice = 0.0, False, ""
        if action is None:
            self.invalid += 1
            notice = f"That reply names no action. Reply with one of: {', '.join(board.actions)}.\n\n"
            if config.view is View.COMPACT:
                notice = "?\n"
        else:
            self.observation, reward, ended, cut, _ = self.game.step(action)
            native_reward, self.over = float(reward), bool(ended or cut)
            won = bool(ended and board.wins(self.game, self.observation, native_reward))
        max_steps = self.start.prototype.max_steps if config.max_steps is None else config.max_steps
        self.over |= max_steps is not None and self.steps >= max_steps
        messages: tuple[Message, ...] = ()
        if not self.over:
            shown = board.show(self.game, self.observation, config.view)
            messages = (Message(role="user", content=notice + shown),)
        state = None if self.start.state is None else int(self.observation)
        return Step(
            rewards=self._rewards(native_reward, won, action is None),
            messages=messages,
            done=self.over,
            action=None if action is None else board.actions[action],
            anchor_state=self.start.anchor(state),
            metrics={"success": float(won), "steps": float(self.steps), "invalid_actions": float(self.invalid)},
        )

    def _rewards(self, native_reward: float, won: bool, invalid: bool) -> dict[str, float]:
        rewards = {CORRECT: float(won)}
        if self.config.game_weight:
            rewards[GAME] = self.config.game_weight * native_reward
        if self.config.step_reward:
            rewards[STEP] = self.config.step_reward
        if self.config.invalid_reward:
            rewards[FORMAT] = self.config.invalid_reward if invalid else 0.0
        return rewards


def parse_action(reply: str, board: Board, view: View, action_regex: str | None) -> int | None:
    """Return the number of the action in a reply, or None.

    Args:
        reply: text from the policy; its thoughts are ignored.
        board: has the names of the actions.
        view: format of the action names to search for if `action_regex` is None.
        action_regex: group 1 of its last match is the name or first letter, case-insensitive; None takes the last
            action name that is a separate word.
    """
    if action_regex is None:
        alternatives = "|".join(map(re.escape, board.names(view)))
        action = extract_last(rf"(?i)\b({alternatives})\b", graded_text(reply) or "") or ""
    else:
        action = action_of(reply, action_regex)
    name = action.strip().lower()
    for names in (board.actions, board.names(View.COMPACT)):
        if name in names:
            return names.index(name)
    return None


@dataclasses.dataclass(frozen=True)
class TextGameEnvironment(AbstractSplitEnvironment):
    """Tasks and episodes of a gymnasium game."""

    config: TextGameConfig
    starts: Mapping[str, Start]
    """Initial states by task id."""

    async def start(self, task: Task, seed: int) -> Episode:
        """Start a game; its randomness is determined by task and seed."""
        return self._begin(task, seed)

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether the game has a transition table for planning."""
        return self._start(task).prototype.has_table

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return a game along a shortest way to a win, with `detours`; deterministic for each task.

        Raises:
            ValueError: if the game has no transition table for planning.
        """
        if not self.can_demonstrate(task):
            raise ValueError(f"text game {self.config.id!r} has no transition table, so it has no demonstrations")
        episode = self._begin(task, derive_seed(self.config.seed, "demonstrated game", task.id))
        prototype = episode.start.prototype
        plan, names = prototype.plan, prototype.board.names(self.config.view)
        generator = random.Random(derive_seed(self.config.seed, "demonstration", task.id))
        messages = list(task.messages)
        while not episode.over:
            best, safe = plan.best[episode.observation], plan.safe[episode.observation]
            takes_detour = generator.random() < self.config.detours and safe
            reply = names[generator.choice(safe if takes_detour else best)]
            messages += [Message(role="assistant", content=reply), *episode.take_turn(reply).messages]
        return tuple(messages)

    def _start(self, task: Task) -> Start:
        self.require_own(task, self.starts)
        return self.starts[task.id]

    def _begin(self, task: Task, seed: int) -> TextGameEpisode:
        start = self._start(task)
        return TextGameEpisode(self.config, start, *start.begin(derive_seed("game", task.id, seed)))
