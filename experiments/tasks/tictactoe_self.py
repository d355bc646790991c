# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""TicTacToe in self-play, for `tictactoe_self.yaml`: the policy plays both players, from the boards of tictactoe.py.

Each player sees itself as X. The task is a board, and its seat that of the player whose replies are trained on. From
the held-out boards the policy plays X against the scripted opponent, so its scores compare with those of tictactoe.py.
"""

import random
from typing import Any

from experiments.tasks.self_play import self_play
from experiments.tasks.tictactoe import make
from experiments.tasks.tictactoe_rules import free, scripted, show, won
from marin_rl.environments.base import Split

HELD_OUT = frozenset(task.id for task in make().tasks(Split.HELD_OUT))


class TicTacToe:
    """A game; see `self_play.Game`. With a generator, O is the scripted opponent."""

    def __init__(self, board: str, opponent: random.Random | None = None) -> None:
        self.board = [*board]
        self.seat = 0
        self.scores: tuple[float, float] | None = None
        self.opponent = opponent

    def observe(self) -> str:
        """Return the board as the player that is to move sees it."""
        seen = "".join(self.board) if self.seat == 0 else "".join(self.board).translate(str.maketrans("XO", "OX"))
        return show([*seen])

    def move(self, reply: str) -> None:
        """Play a field, 1 to 9, and the answer of a scripted opponent."""
        if reply not in {str(field + 1) for field in free(self.board)}:
            self.scores = (0.0, 1.0) if self.seat == 0 else (1.0, 0.0)
            return
        self._place(int(reply) - 1)
        if self.opponent is not None and self.scores is None:
            self._place(scripted(self.board, self.opponent))

    def _place(self, field: int) -> None:
        mark = "XO"[self.seat]
        self.board[field] = mark
        if won(self.board, mark):
            self.scores = (1.0, 0.0) if self.seat == 0 else (0.0, 1.0)
        elif not free(self.board):
            self.scores = (0.5, 0.5)
        self.seat = 1 - self.seat


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play one game from the board of a task; its seed chooses the seat for all attempts of a group."""
    numbers = random.Random(task["seed"])
    if task["id"] in HELD_OUT:
        return {"score": await self_play(TicTacToe(task["id"], numbers), 0, base_url, api_key)}
    return {"score": await self_play(TicTacToe(task["id"]), numbers.randrange(2), base_url, api_key)}
