# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Text versions of gymnasium games: FrozenLake, Taxi, CliffWalking, and other games with discrete actions."""

import dataclasses
import random
import re
from typing import Annotated, Any

from annotated_types import Ge, Lt

from marin_rl.environments.base import AbstractEnvironment, EnvironmentConfig
from marin_rl.environments.games import (
    AbstractGameEnvironment,
    GameConfig,
    GameEpisode,
    Opening,
    Outcome,
    View,
)
from marin_rl.environments.gymnasium_games import Board, GameStart, draw_start
from marin_rl.rewards.reply_text import extract_last
from marin_rl.types import Message, Task
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.settings.fields import NAMES_FILES


@EnvironmentConfig.register_subclass("text_game")
@dataclasses.dataclass(frozen=True)
class TextGameConfig(GameConfig):
    """A gymnasium game. Each task has its own map and initial state; each reply is an action.

    The action is the last action name (with `view: compact`, letter) that is a separate word of the reply, or the name
    or first letter that `action_regex` matches, in any case. Set `rollouts.max_turns` to the maximum number of turns.
    """

    id: str
    """Name of the game in gymnasium: `FrozenLake-v1`, `Taxi-v4`, `CliffWalking-v1`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict, metadata=NAMES_FILES)
    """Options of the game, such as `{is_slippery: false}`. FrozenLake without `map_name` and `desc` draws a map for
    each task, and also accepts `size` (side length in cells, 4) and `p` (probability of ice, 0.8)."""
    num_tasks: Annotated[int, Ge(1)] = dataclasses.field(default=1000, kw_only=True)
    """Number of games to draw, over all splits, repetitions included."""
    random_start: bool = False
    """Whether to draw the initial state uniformly from the states that are reachable from the game's initial states and
    can still be won. Required for games with one map and one initial state, which otherwise have a single task."""
    view: View = View.READABLE
    """Text format of states and actions: `readable` for pretrained models, `compact`, without rules, for tiny ones."""
    detours: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that a demonstrated action is drawn from all actions that do not lose immediately, instead of the
    optimal ones."""

    @property
    def default_name(self) -> str:
        """The game's id."""
        return self.id

    def build(self) -> AbstractEnvironment:
        """Draw the games and split them.

        Raises:
            ValueError: if gymnasium does not have the game or rejects the options, or there are too few distinct games.
        """
        source = f"text game {self.id!r}"
        openings = [self._draw(derive_seed(self.seed, "game", index)) for index in range(self.num_tasks)]
        if len({opening.identity for opening in openings}) == 1 and self.held_out + self.validation > 0:
            raise ValueError(
                f"{source} has a single initial state with options {self.options}, so its one task cannot be split; "
                "set random_start: true, or held_out: 0 and validation: 0"
            )
        splits, starts = self.split(openings, source)
        return TextGameEnvironment(self.label, splits, self, starts)

    def _draw(self, seed: int) -> Opening:
        start = draw_start(self.id, self.options, seed, self.random_start)
        board = start.prototype.board
        rules = f"{board.rules} Reply with one of: {', '.join(board.actions)}." if self.view is View.READABLE else ""
        return Opening(
            start.identity, board.show(*start.begin(0), self.view), start, start.anchor(start.state), rules=rules
        )


@dataclasses.dataclass
class GymnasiumGame:
    """One game of gymnasium."""

    config: TextGameConfig
    start: GameStart
    game: Any
    """The gymnasium environment, unwrapped."""
    observation: Any
    """Last observation: the state, for games with a transition table."""

    async def step(self, action: str) -> Outcome:
        """Take an action; without one, the game does not change and the policy receives a notice."""
        return self.play(action)

    async def close(self) -> None:
        """Close the game."""
        self.game.close()

    def play(self, action: str) -> Outcome:
        """Synchronous version of `step`."""
        board, view = self.start.prototype.board, self.config.view
        number = parse_action(action, board, view, is_name=self.config.action_regex is not None)
        reward, done, won = 0.0, False, False
        if number is not None:
            self.observation, native_reward, ended, cut, _ = self.game.step(number)
            reward, done = float(native_reward), bool(ended or cut)
            won = bool(ended and board.wins(self.game, self.observation, reward))
        notice = f"That reply names no action. Reply with one of: {', '.join(board.actions)}.\n\n"
        return Outcome(
            observation="" if done else board.show(self.game, self.observation, view),
            action=None if number is None else board.actions[number],
            notice="" if number is not None else "?\n" if view is View.COMPACT else notice,
            reward=reward,
            done=done,
            success=won,
            anchor_state=self.start.anchor(None if self.start.state is None else int(self.observation)),
        )


def parse_action(text: str, board: Board, view: View, *, is_name: bool) -> int | None:
    """Return the number of the action in a text, or None.

    The board has the names of the actions, and `view` is the format of the names to search for. With `is_name`, the
    text is a name or first letter, case-insensitive. Otherwise the last name that is a separate word counts.
    """
    if not is_name:
        alternatives = "|".join(map(re.escape, board.names(view)))
        text = extract_last(rf"(?i)\b({alternatives})\b", text) or ""
    name = text.strip().lower()
    for names in (board.actions, board.names(View.COMPACT)):
        if name in names:
            return names.index(name)
    return None


@dataclasses.dataclass(frozen=True)
class TextGameEnvironment(AbstractGameEnvironment):
    """Tasks and episodes of a gymnasium game."""

    config: TextGameConfig

    async def begin(self, start: GameStart, seed: int) -> GameEpisode:
        """Start a game; `seed` determines its chance."""
        return self._episode(self._game(start, seed))

    def can_demonstrate(self, task: Task) -> bool:
        """Return whether the game has a transition table for planning."""
        return self.start_of(task).prototype.has_table

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return a game along a shortest way to a win, with `detours`; deterministic for each task.

        Raises:
            ValueError: if the game has no transition table for planning.
        """
        if not self.can_demonstrate(task):
            raise ValueError(f"text game {self.config.id!r} has no transition table, so it has no demonstrations")
        start = self.start_of(task)
        seed = derive_seed(self.config.seed, "demonstrated game", task.id)
        game = self._game(start, derive_seed("game", task.id, seed))
        episode = self._episode(game)
        plan, names = start.prototype.plan, start.prototype.board.names(self.config.view)
        generator = random.Random(derive_seed(self.config.seed, "demonstration", task.id))
        messages = list(task.messages)
        while not episode.over:
            best, safe = plan.best[game.observation], plan.safe[game.observation]
            takes_detour = generator.random() < self.config.detours and safe
            reply = names[generator.choice(safe if takes_detour else best)]
            messages += [Message(role="assistant", content=reply), *episode.respond(game.play(reply)).messages]
        return tuple(messages)

    def _game(self, start: GameStart, seed: int) -> GymnasiumGame:
        return GymnasiumGame(self.config, start, *start.begin(seed))

    def _episode(self, game: GymnasiumGame) -> GameEpisode:
        max_steps = self.config.max_steps
        return GameEpisode(self.config, game, game.start.prototype.max_steps if max_steps is None else max_steps)
