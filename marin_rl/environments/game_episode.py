# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Episodes of text games: action parsing, rewards and observations."""

import dataclasses
import functools
import re
from typing import Any

from marin_rl.environments.base import Step
from marin_rl.environments.game_boards import Board, View
from marin_rl.environments.game_start import Start
from marin_rl.environments.single_turn import CORRECT, FORMAT
from marin_rl.rewards.patterns import extract_last
from marin_rl.types import Message

GAME = "game"
"""Reward component: the game's native reward."""
STEP = "step"
"""Reward component: a constant reward for every reply; absent if it is 0."""


@dataclasses.dataclass(frozen=True)
class GameSettings:
    """Settings of an episode; `TextGameConfig` documents the fields."""

    view: View
    """Text format of the game and its actions."""
    action_regex: str | None
    """Extracts the action from a reply; None: the last action name that is a separate word."""
    max_steps: int | None
    """Maximum number of replies; None: the game has no limit."""
    game_weight: float
    """Factor of the game's native reward; 0 omits the component."""
    step_reward: float
    """Reward of every reply; 0 omits the component."""
    invalid_reward: float
    """Reward of a reply without a valid action; 0 omits the component."""


@dataclasses.dataclass
class TextGameEpisode:
    """Episode of one game."""

    settings: GameSettings
    """Text format, limits and rewards."""
    start: Start
    """Initial state."""
    board: Board
    """Text interface of the game."""
    game: Any
    """The gymnasium environment, unwrapped."""
    observation: Any
    """Last observation: the state, for games with a transition table."""
    steps: int = 0
    """Number of replies."""
    invalid: int = 0
    """Number of replies without a valid action."""
    over: bool = False
    """Whether the game has ended."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the actions."""
        return self.board.names(self.settings.view)

    async def step(self, reply: str) -> Step:
        """Take the action in the reply; if it has none, the game does not change and the policy receives a notice.

        Raises:
            RuntimeError: if the game has ended.
        """
        return self.play(reply)

    async def close(self) -> None:
        """Close the game."""
        self.game.close()

    def play(self, reply: str) -> Step:
        """Synchronous version of `step`."""
        if self.over:
            raise RuntimeError(f"the game {self.start.id!r} has ended; start another")
        action = parse_action(reply, self.board, self.settings.view, self.settings.action_regex)
        self.steps += 1
        native_reward, won = 0.0, False
        if action is None:
            self.invalid += 1
        else:
            self.observation, reward, ended, cut, _ = self.game.step(action)
            native_reward, self.over = float(reward), bool(ended or cut)
            won = bool(ended and self.board.wins(self.game, self.observation, native_reward))
        self.over |= self.settings.max_steps is not None and self.steps >= self.settings.max_steps
        state = int(self.observation) if self.start.state is not None else None
        return Step(
            rewards=self._rewards(native_reward, won, action is None),
            messages=() if self.over else (Message(role="user", content=self._observation(action is None)),),
            done=self.over,
            action=None if action is None else self.board.actions[action],
            anchor_state=self.start.anchor(state),
            metrics={"success": float(won), "steps": float(self.steps), "invalid_actions": float(self.invalid)},
        )

    def _rewards(self, native_reward: float, won: bool, invalid: bool) -> dict[str, float]:
        rewards = {CORRECT: float(won)}
        if self.settings.game_weight:
            rewards[GAME] = self.settings.game_weight * native_reward
        if self.settings.step_reward:
            rewards[STEP] = self.settings.step_reward
        if self.settings.invalid_reward:
            rewards[FORMAT] = self.settings.invalid_reward if invalid else 0.0
        return rewards

    def _observation(self, invalid: bool) -> str:
        text = self.board.show(self.game, self.observation, self.settings.view)
        if not invalid:
            return text
        if self.settings.view is View.COMPACT:
            return f"?\n{text}"
        return f"That reply names no action. Reply with one of: {', '.join(self.names)}.\n\n{text}"


def parse_action(reply: str, board: Board, view: View, action_regex: str | None) -> int | None:
    """Return the number of the action in a reply, or None.

    Args:
        reply: text from the policy.
        board: has the names of the actions.
        view: format of the action names to search for if `action_regex` is None.
        action_regex: group 1 of its last match is the name or first letter, case-insensitive; None takes the last
            action name that is a separate word.
    """
    regex = action_regex or rf"(?i)\b({'|'.join(map(re.escape, board.names(view)))})\b"
    match = extract_last(regex, reply)
    if match is None:
        return None
    name = match.strip().lower()
    for names in (board.actions, board.names(View.COMPACT)):
        if name in names:
            return names.index(name)
    return None
