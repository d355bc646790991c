# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of gymnasium, played in words: FrozenLake, Taxi, CliffWalking, and whatever else has numbered actions."""

import copy
import dataclasses
import difflib
import functools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marin_rl.environments.base import Environment, EnvironmentConfig, Episode, Split, Step
from marin_rl.environments.game_boards import Board, View, board_of
from marin_rl.environments.game_plan import Plan, make_plan, read_table
from marin_rl.environments.single_turn import CORRECT, FORMAT
from marin_rl.environments.splits import (
    Problem,
    TaskSplits,
    check_shares,
    problem_id,
    split_problems,
    without_duplicates,
)
from marin_rl.rewards.patterns import check_pattern, extract_last
from marin_rl.seeds import derive_seed
from marin_rl.types import Message, Task

GAME = "game"
"""Reward component: what the game itself pays."""
STEP = "step"
"""Reward component: the same for every reply; absent where it is 0."""


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
        if self.num_tasks < 1:
            raise ValueError(f"num_tasks is {self.num_tasks}; draw at least 1 game")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1, or null for the game's own limit")
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

    def _problems(self, starts: dict[str, "Start"]) -> Iterator[Problem]:
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

    def _opening(self, start: "Start") -> tuple[Message, ...]:
        board = start.prototype.board
        shown = Message(role="user", content=board.show(*start.begin(0), self.view))
        rules = self.rules
        if rules is None:
            names = ", ".join(board.actions)
            rules = f"{board.rules} Reply with one of: {names}." if self.view is View.READABLE else ""
        return (Message(role="system", content=rules), shown) if rules else (shown,)


@dataclasses.dataclass(frozen=True)
class Prototype:
    """A game that was made once; episodes play copies of it."""

    game: Any
    """The gymnasium environment, unwrapped; never played itself where it has a table."""
    board: Board
    """Its words."""
    has_table: bool
    """Whether it is known what can follow each action, so that it can be copied, begun anywhere, and planned."""
    max_steps: int | None
    """Its own limit on steps."""

    @functools.cached_property
    def plan(self) -> Plan:
        """How to win it from wherever it may begin."""
        weights = self.game.initial_state_distrib
        starts = [state for state in range(len(weights)) if weights[state] > 0]
        return make_plan(
            read_table(self.game.P), starts, lambda state, reward: self.board.wins(self.game, state, reward)
        )


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a game begins."""

    id: str
    """The game."""
    arguments: str
    """What it is made with, as JSON."""
    state: int | None
    """The state that it begins in; None where the game has no table, and its seed decides."""
    seed: int
    """The seed that it begins with where it has no table."""
    shown: str
    """Text of the first observation."""

    @property
    def prototype(self) -> Prototype:
        """The game to copy."""
        return make_prototype(self.id, self.arguments)

    @property
    def identity(self) -> str:
        """What tells this start from others, and decides its split."""
        return json.dumps(self.anchor(self.state) or [self.id, self.arguments, self.shown], sort_keys=True)

    def anchor(self, state: int | None) -> object:
        """What identifies a state of this game, whatever the words; None where only the words do."""
        if state is None:
            return None
        return {"game": self.id, "options": self._options, "state": state}

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        return json.loads(self.arguments)

    def begin(self, seed: int) -> tuple[Any, Any]:
        """A game that is about to be played, and its first observation.

        Args:
            seed: of everything random in a game with a table; others go by their own.
        """
        prototype = self.prototype
        if not prototype.has_table:
            game = _construct(self.id, json.loads(self.arguments))
            return game, game.reset(seed=self.seed)[0]
        # What a reset writes are attributes of its own; table and map are shared with the prototype.
        game = copy.copy(prototype.game)
        game.reset(seed=seed)
        game.s = self.state
        return game, self.state


def draw_start(id: str, options: Mapping[str, Any], seed: int, random_start: bool) -> Start:
    """Draw a game.

    Args:
        id: its name in gymnasium.
        options: as the config has them.
        seed: decides map and start.
        random_start: whether it may begin in any state from which it can be won.

    Raises:
        ValueError: if gymnasium has no such game, refuses the options, or knows no table where a start is drawn.
    """
    arguments = json.dumps(_arguments(id, options, seed), sort_keys=True)
    prototype = make_prototype(id, arguments)
    if not prototype.has_table:
        if random_start:
            raise ValueError(f"text game {id!r} has no transition table to draw a start from; set random_start: false")
        observation, _ = prototype.game.reset(seed=seed)
        return Start(id, arguments, None, seed, prototype.board.show(prototype.game, observation, View.READABLE))
    if random_start:
        winnable = [int(state) for state, value in prototype.plan.values.items() if value > 0]
        state = random.Random(seed).choice(winnable)
    else:
        state = int(copy.copy(prototype.game).reset(seed=seed)[0])
    return Start(id, arguments, state, seed, "")


def _arguments(id: str, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What a game is made with; a lake without a map gets one."""
    fixed = options.get("map_name") is not None or options.get("desc") is not None
    if not id.startswith("FrozenLake") or fixed:
        return dict(options)
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    size, share = options.get("size", 4), options.get("p", 0.8)
    if not (isinstance(size, int) and size >= 2 and 0 < share <= 1):
        raise ValueError(
            f"text game {id!r}: options size {size!r} and p {share!r} must be a whole number of at least 2 and a share "
            "of ice above 0 and at most 1"
        )
    rest = {name: value for name, value in options.items() if name not in ("size", "p", "map_name", "desc")}
    return {**rest, "desc": generate_random_map(size, share, seed)}


@functools.lru_cache(maxsize=4096)
def make_prototype(id: str, arguments: str) -> Prototype:
    """Make a game, once.

    Args:
        id: its name in gymnasium.
        arguments: what it is made with, as JSON.

    Raises:
        ValueError: if gymnasium has no such game, refuses the arguments, or its actions are not numbered.
    """
    import gymnasium

    game = _construct(id, json.loads(arguments))
    if not isinstance(game.action_space, gymnasium.spaces.Discrete):
        raise ValueError(f"text game {id!r} has actions {game.action_space}; only numbered ones can be put into words")
    has_table = all(getattr(game, name, None) is not None for name in ("P", "initial_state_distrib"))
    return Prototype(game, board_of(game), has_table, gymnasium.spec(id).max_episode_steps)


def _construct(id: str, arguments: Mapping[str, Any]) -> Any:
    import gymnasium

    try:
        spec = gymnasium.spec(id)
    except gymnasium.error.Error as error:
        known = difflib.get_close_matches(id, gymnasium.registry, n=3)
        hint = f"; did you mean {' or '.join(map(repr, known))}?" if known else ""
        raise ValueError(f"gymnasium has no text game {id!r}{hint} ({error})") from error
    entry = spec.entry_point
    if entry is None:
        raise ValueError(f"gymnasium has text game {id!r}, but not what makes it: its entry point is missing")
    kind = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    try:
        return kind(**{**spec.kwargs, **arguments})
    except (TypeError, KeyError, ValueError, AssertionError) as error:
        raise ValueError(f"text game {id!r} refuses its options {dict(arguments)}: {error!r}") from error


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

    def _demonstrated_action(self, episode: "TextGameEpisode", generator: random.Random) -> int:
        plan, state = episode.start.prototype.plan, int(episode.observation)
        best, safe = plan.best[state], plan.safe[state]
        takes_detour = generator.random() < self.config.detours and safe
        return generator.choice(safe if takes_detour else best)

    def _start(self, task: Task) -> Start:
        if task.environment != self.name or task.id not in self.starts:
            raise ValueError(f"environment {self.name!r} has no game {task.id!r} of {task.environment!r}")
        return self.starts[task.id]

    def _begin(self, task: Task, seed: int) -> "TextGameEpisode":
        start = self._start(task)
        game, observation = start.begin(derive_seed("game", task.id, seed))
        own = start.prototype.max_steps if self.config.max_steps is None else self.config.max_steps
        return TextGameEpisode(self.config, start, start.prototype.board, game, observation, own)


@dataclasses.dataclass
class TextGameEpisode:
    """One game."""

    config: TextGameConfig
    """Rewards, limits and words."""
    start: Start
    """Where it began."""
    board: Board
    """The words of the game."""
    game: Any
    """The gymnasium environment, unwrapped."""
    observation: Any
    """The last observation: the state, in games with a table."""
    max_steps: int | None
    """Most replies."""
    steps: int = 0
    """Replies so far."""
    invalid: int = 0
    """Those of them that named no action."""
    over: bool = False
    """Whether the game is over."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """What the policy says for each action."""
        return self.board.names(self.config.view)

    async def step(self, reply: str) -> Step:
        """Take the action that the reply names; without one the turn passes, and the policy is told so.

        Raises:
            RuntimeError: if the game is over.
        """
        return self.play(reply)

    async def close(self) -> None:
        """Let go of the game."""
        self.game.close()

    def play(self, reply: str) -> Step:
        """What `step` does, outside of an event loop."""
        if self.over:
            raise RuntimeError(f"the game {self.config.id!r} is over; start another")
        action = parse_action(reply, self.board, self.config)
        self.steps += 1
        paid, won = 0.0, False
        if action is None:
            self.invalid += 1
        else:
            self.observation, reward, ended, cut, _ = self.game.step(action)
            paid, self.over = float(reward), bool(ended or cut)
            won = bool(ended and self.board.wins(self.game, self.observation, paid))
        self.over |= self.max_steps is not None and self.steps >= self.max_steps
        state = int(self.observation) if self.start.state is not None else None
        return Step(
            rewards=self._rewards(paid, won, action is None),
            messages=() if self.over else (Message(role="user", content=self._shown(action is None)),),
            done=self.over,
            action=None if action is None else self.board.actions[action],
            anchor_state=self.start.anchor(state),
            metrics={"success": float(won), "steps": float(self.steps), "invalid_actions": float(self.invalid)},
        )

    def _rewards(self, paid: float, won: bool, invalid: bool) -> dict[str, float]:
        rewards = {CORRECT: float(won)}
        if self.config.game_weight:
            rewards[GAME] = self.config.game_weight * paid
        if self.config.step_reward:
            rewards[STEP] = self.config.step_reward
        if self.config.invalid_reward:
            rewards[FORMAT] = self.config.invalid_reward if invalid else 0.0
        return rewards

    def _shown(self, invalid: bool) -> str:
        text = self.board.show(self.game, self.observation, self.config.view)
        if not invalid:
            return text
        if self.config.view is View.COMPACT:
            return f"?\n{text}"
        return f"That reply names no action. Reply with one of: {', '.join(self.names)}.\n\n{text}"


def parse_action(reply: str, board: Board, config: TextGameConfig) -> int | None:
    """The number of the action that a reply names, or None.

    Args:
        reply: what the policy said.
        board: knows the actions' names.
        config: `action_regex` cuts the name out; by default the last name that stands as a word of its own.
    """
    regex = config.action_regex or rf"(?i)\b({'|'.join(map(re.escape, board.names(config.view)))})\b"
    found = extract_last(regex, reply)
    if found is None:
        return None
    name = found.strip().lower()
    for names in (board.actions, board.names(View.COMPACT)):
        if name in names:
            return names.index(name)
    return None
