# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A game while it is played: what a reply is taken for, what it earns, and what the policy is shown next."""

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
"""Reward component: what the game itself pays."""
STEP = "step"
"""Reward component: the same for every reply; absent where it is 0."""


@dataclasses.dataclass(frozen=True)
class GameTerms:
    """On what terms games are played; the fields of the same names in `TextGameConfig` say what they mean."""

    view: View
    """How the game is shown, and what actions are called."""
    action_regex: str | None
    """Cuts the action's name out of a reply; None: the last name that stands as a word of its own."""
    max_steps: int | None
    """Most replies; None: no limit beside the game's own end."""
    game_weight: float
    """What the game's own reward is multiplied by; 0 leaves it out."""
    step_reward: float
    """Reward of every reply; 0 leaves it out."""
    invalid_reward: float
    """Reward of a reply that names no action; 0 leaves it out."""


@dataclasses.dataclass
class TextGameEpisode:
    """One game."""

    terms: GameTerms
    """Words, limit and rewards."""
    start: Start
    """Where it began."""
    board: Board
    """The words of the game."""
    game: Any
    """The gymnasium environment, unwrapped."""
    observation: Any
    """The last observation: the state, in games with a table."""
    steps: int = 0
    """Replies so far."""
    invalid: int = 0
    """Those of them that named no action."""
    over: bool = False
    """Whether the game is over."""

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """What the policy says for each action."""
        return self.board.names(self.terms.view)

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
            raise RuntimeError(f"the game {self.start.id!r} is over; start another")
        action = parse_action(reply, self.board, self.terms.view, self.terms.action_regex)
        self.steps += 1
        paid, won = 0.0, False
        if action is None:
            self.invalid += 1
        else:
            self.observation, reward, ended, cut, _ = self.game.step(action)
            paid, self.over = float(reward), bool(ended or cut)
            won = bool(ended and self.board.wins(self.game, self.observation, paid))
        self.over |= self.terms.max_steps is not None and self.steps >= self.terms.max_steps
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
        if self.terms.game_weight:
            rewards[GAME] = self.terms.game_weight * paid
        if self.terms.step_reward:
            rewards[STEP] = self.terms.step_reward
        if self.terms.invalid_reward:
            rewards[FORMAT] = self.terms.invalid_reward if invalid else 0.0
        return rewards

    def _shown(self, invalid: bool) -> str:
        text = self.board.show(self.game, self.observation, self.terms.view)
        if not invalid:
            return text
        if self.terms.view is View.COMPACT:
            return f"?\n{text}"
        return f"That reply names no action. Reply with one of: {', '.join(self.names)}.\n\n{text}"


def parse_action(reply: str, board: Board, view: View, action_regex: str | None) -> int | None:
    """The number of the action that a reply names, or None.

    Args:
        reply: what the policy said.
        board: knows the actions' names.
        view: which of its names are looked for where there is no expression.
        action_regex: group 1 of its last match is the name or first letter, whatever its case; None takes the last
            name that stands as a word of its own.
    """
    regex = action_regex or rf"(?i)\b({'|'.join(map(re.escape, board.names(view)))})\b"
    found = extract_last(regex, reply)
    if found is None:
        return None
    name = found.strip().lower()
    for names in (board.actions, board.names(View.COMPACT)):
        if name in names:
            return names.index(name)
    return None
