# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of gymnasium, played in words: FrozenLake, Taxi, CliffWalking, and whatever else has numbered actions."""

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marin_rl.enum_fields import convert_enum_fields
from marin_rl.environments.base import Environment, EnvironmentConfig, Episode, Split
from marin_rl.environments.game_boards import View
from marin_rl.environments.game_episode import GameTerms, TextGameEpisode
from marin_rl.environments.game_start import Start, draw_start
from marin_rl.environments.splits import (
    Problem,
    TaskSplits,
    check_shares,
    problem_id,
    split_problems,
    without_duplicates,
)
from marin_rl.rewards.patterns import check_pattern
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task


@EnvironmentConfig.register_subclass("text_game")
@dataclasses.dataclass(frozen=True)
class TextGameConfig(EnvironmentConfig):
    """A game of gymnasium. Each task is a game with a map and a start of its own; each reply is an action.

    Games are drawn once, deduplicated, and split by map and start. Set `rollouts.max_turns` to as many turns as a
    game may take.
    """

    id: str
    """Name of the game in gymnasium: `FrozenLake-v1`, `Taxi-v4`, `CliffWalking-v1`, …"""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The game's own options, such as `{is_slippery: false}`. FrozenLake without `map_name` and `desc` draws a map
    for each task, and also takes `size` (cells to a side, 4) and `p` (share of ice, 0.8)."""
    num_tasks: int = 1000
    """How many games to draw, over all splits, repetitions included."""
    seed: int = 0
    """Which games are drawn, and their order. The split of a game does not depend on it."""
    random_start: bool = False
    """Whether the game begins in any state that its own start can reach and that can still be won, each with equal
    probability. Games with one map and one start need it, to have more than one task."""
    max_steps: int | None = None
    """Most replies in a game; by default the game's own limit: 100 in FrozenLake, 200 in Taxi, none in CliffWalking."""
    view: View = View.READABLE
    """How the game is shown, and what actions are called: `readable` for models that read, `compact` for tiny ones."""
    rules: str | None = None
    """The system message. By default the game's rules where `view` is `readable`, and none where it is `compact`; an
    empty text for none."""
    action_regex: str | None = None
    """Regular expression whose group 1, at its last match in the reply, is the action's name or first letter, whatever
    its case. By default the last of the names (with `compact`, of the letters) that stands as a word of its own."""
    game_weight: float = 1.0
    """What the game's own reward is multiplied by; 0 leaves the component `game` out."""
    step_reward: float = 0.0
    """Reward of every reply (component `step`); below 0 for short games."""
    invalid_reward: float = 0.0
    """Reward of a reply that names no action (component `format`); at most 0."""
    detours: float = 0.0
    """Probability that a demonstrated action is any that does not lose at once, instead of one on a shortest way;
    below 1."""
    held_out: float = 0.1
    """Share of games held out, by hash of map and start; at least 0, below 1."""
    validation: float = 0.05
    """Share of games for validation, by hash of map and start; at least 0, below 1."""
    name: str | None = None
    """Name under which metrics are logged; the game's id by default."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        if self.num_tasks < 1:
            raise ValueError(f"num_tasks is {self.num_tasks}; draw at least 1 game")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1, or null for the game's own limit")
        for field in ("game_weight", "step_reward", "invalid_reward"):
            if not math.isfinite(getattr(self, field)):
                raise ValueError(f"{field} is {getattr(self, field)}; it must be a finite number")
        if self.invalid_reward > 0:
            raise ValueError(f"invalid_reward is {self.invalid_reward}; it must not pay for replies without an action")
        if not 0.0 <= self.detours < 1.0:
            raise ValueError(f"detours is {self.detours}; it is a probability, at least 0 and below 1")
        if self.action_regex is not None:
            check_pattern("action_regex", self.action_regex, groups=1)
        check_shares(self.held_out, self.validation)

    def build(self) -> Environment:
        """Draw the games and split them.

        Raises:
            ValueError: for a game that gymnasium does not have, options that it refuses, or too few distinct games.
        """
        source = f"text game {self.id!r}"
        starts: dict[str, Start] = {}
        problems = without_duplicates(self._problems(starts), source)
        if len(problems) == 1 and self.held_out + self.validation > 0:
            raise ValueError(
                f"{source} always begins in the same way with options {self.options}, so its one task cannot be split; "
                "set random_start: true, or held_out: 0 and validation: 0"
            )
        return TextGameEnvironment(
            self, self._name, split_problems(problems, self.held_out, self.validation, source), starts
        )

    @property
    def _name(self) -> str:
        return self.id if self.name is None else self.name

    def _problems(self, starts: dict[str, Start]) -> Iterator[Problem]:
        for index in range(self.num_tasks):
            seed = derive_seed(self.seed, "game", index)
            start = draw_start(self.id, self.options, seed, self.random_start)
            text = start.identity
            starts.setdefault(problem_id(text), start)
            task = Task(
                id=problem_id(text),
                environment=self._name,
                messages=self._opening(start),
                answer="",
                anchor_state=start.anchor(start.state),
            )
            yield Problem(text, task, where=f"game {index}")

    def _opening(self, start: Start) -> tuple[Message, ...]:
        board = start.prototype.board
        shown = Message(role="user", content=board.show(*start.begin(0), self.view))
        rules = self.rules
        if rules is None:
            names = ", ".join(board.actions)
            rules = f"{board.rules} Reply with one of: {names}." if self.view is View.READABLE else ""
        return (Message(role="system", content=rules), shown) if rules else (shown,)


@dataclasses.dataclass(frozen=True)
class TextGameEnvironment:
    """Games to be won."""

    config: TextGameConfig
    """Rewards, limits and words."""
    name: str
    """Name under which its metrics are logged."""
    splits: TaskSplits
    """The tasks of each split."""
    starts: Mapping[str, Start]
    """Where each task begins, by its id."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """The tasks of a split, always in the same order."""
        return self.splits[split]

    async def start(self, task: Task, seed: int) -> Episode:
        """Begin a game: what is random in it follows from task and seed.

        Raises:
            ValueError: if the task belongs to another environment.
        """
        return self._begin(task, seed)

    def can_demonstrate(self, task: Task) -> bool:
        """Whether the game has a table to plan by."""
        return self._start(task).prototype.has_table

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """A game that is played along a shortest way to a win, with `detours`; the same for the same task.

        Raises:
            ValueError: if the game has no table to plan by.
        """
        if not self.can_demonstrate(task):
            raise ValueError(f"text game {self.config.id!r} has no transition table, so nothing can be demonstrated")
        episode = self._begin(task, derive_seed(self.config.seed, "demonstrated game", task.id))
        generator = random.Random(derive_seed(self.config.seed, "demonstration", task.id))
        said = list(task.messages)
        while not episode.over:
            reply = episode.names[self._demonstrated_action(episode, generator)]
            said += [Message(role="assistant", content=reply), *episode.play(reply).messages]
        return tuple(said)

    def _demonstrated_action(self, episode: TextGameEpisode, generator: random.Random) -> int:
        plan, state = episode.start.prototype.plan, int(episode.observation)
        best, safe = plan.best[state], plan.safe[state]
        takes_detour = generator.random() < self.config.detours and safe
        return generator.choice(safe if takes_detour else best)

    def _start(self, task: Task) -> Start:
        if task.environment != self.name or task.id not in self.starts:
            raise ValueError(f"environment {self.name!r} has no game {task.id!r} of {task.environment!r}")
        return self.starts[task.id]

    def _begin(self, task: Task, seed: int) -> TextGameEpisode:
        start = self._start(task)
        game, observation = start.begin(derive_seed("game", task.id, seed))
        return TextGameEpisode(self._terms(start), start, start.prototype.board, game, observation)

    def _terms(self, start: Start) -> GameTerms:
        config = self.config
        return GameTerms(
            view=config.view,
            action_regex=config.action_regex,
            max_steps=start.prototype.max_steps if config.max_steps is None else config.max_steps,
            game_weight=config.game_weight,
            step_reward=config.step_reward,
            invalid_reward=config.invalid_reward,
        )
