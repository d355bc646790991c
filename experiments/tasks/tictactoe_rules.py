# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The rules of TicTacToe, for `tictactoe.py` and `tictactoe_self.py`. A board is a list of nine of `X`, `O` and `.`."""

import itertools
import random

LINES = (*((i, i + 1, i + 2) for i in (0, 3, 6)), *((i, i + 3, i + 6) for i in (0, 1, 2)), (0, 4, 8), (2, 4, 6))


def opening_boards() -> list[str]:
    """Return all 829 boards with up to two marks of each player."""
    marks = ["X" * n + "O" * n + "." * (9 - 2 * n) for n in range(3)]
    return sorted({"".join(board) for one in marks for board in itertools.permutations(one)})


def show(board: list[str]) -> str:
    """Return the text of a board, such as `.X.|.O.|...`."""
    return "|".join("".join(board[row : row + 3]) for row in (0, 3, 6))


def free(board: list[str]) -> list[int]:
    """Return the free fields, 0 to 8."""
    return [field for field in range(9) if board[field] == "."]


def won(board: list[str], player: str) -> bool:
    """Return whether a player has three in a row."""
    return any(all(board[field] == player for field in line) for line in LINES)


def scripted(board: list[str], generator: random.Random) -> int:
    """Return the field that O takes: one that wins, or else one that prevents a win, or else any."""
    for player, field in itertools.product("OX", free(board)):
        if won([*board[:field], player, *board[field + 1 :]], player):
            return field
    return generator.choice(free(board))
