# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""TicTacToe in self-play, for `tictactoe_self.yaml`: the policy plays both players, from the boards of tictactoe.py.

Each player sees itself as X. The task is a board, and its seat that of the player whose replies are trained on.
"""

import random
from typing import Any

from experiments.tasks.self_play import self_play
from experiments.tasks.tictactoe_rules import free, show, won


class TicTacToe:
    """A game; see `self_play.Game`."""

    def __init__(self, board: str) -> None:
        self.board = [*board]
        self.seat = 0
        self.scores: tuple[float, float] | None = None

    def observe(self) -> str:
        """Return the board as the player that is to move sees it."""
        seen = "".join(self.board) if self.seat == 0 else "".join(self.board).translate(str.maketrans("XO", "OX"))
        return show([*seen])

    def move(self, reply: str) -> None:
        """Play a field, 1 to 9."""
        if reply not in {str(field + 1) for field in free(self.board)}:
            scores = (0.0, 1.0)
        else:
            mark = "XO"[self.seat]
            self.board[int(reply) - 1] = mark
            scores = (1.0, 0.0) if won(self.board, mark) else None if free(self.board) else (0.5, 0.5)
        self.scores = scores if scores is None or self.seat == 0 else scores[::-1]
        self.seat = 1 - self.seat


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play one game from the board of a task; its seed chooses the seat for all attempts of a group."""
    seat = random.Random(task["seed"]).randrange(2)
    return {"score": await self_play(TicTacToe(task["id"]), seat, base_url, api_key)}
