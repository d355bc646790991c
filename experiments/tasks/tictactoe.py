# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""TicTacToe against a scripted opponent, for `tictactoe.yaml`: the board as nine characters, a move as one digit.

`.X.|.O.|...`: the policy plays X and is to move; the fields have the numbers 1 to 9. The opponent completes three in a
row, or else prevents them, or else moves at random. A win scores 1, a draw 0.5; a loss and an invalid move score 0.
From the boards of `make`, random moves score 0.312 on average, and the best ones 0.886.
"""

import dataclasses
import random

from experiments.tasks.tictactoe_rules import free, opening_boards, scripted, show, won
from marin_rl.environments.base import AbstractSplitEnvironment, Split, Step
from marin_rl.types import Message, Task

NAME = "tictactoe"


def make() -> AbstractSplitEnvironment:
    """Return games from all boards with up to two marks of each player."""
    boards = opening_boards()
    random.Random(0).shuffle(boards)
    tasks = [Task(board, NAME, (_message([*board]),), "") for board in boards]
    return TicTacToe(NAME, {Split.HELD_OUT: tasks[:100], Split.VALIDATION: tasks[100:150], Split.TRAIN: tasks[150:]})


class TicTacToe(AbstractSplitEnvironment):
    """Games from given boards."""

    async def start(self, task: Task, seed: int) -> "Game":
        """Start a game; the seed determines the opponent's random moves."""
        return Game([*task.id], random.Random(seed))

    def can_demonstrate(self, task: Task) -> bool:
        """Return True."""
        return True

    def demonstrate(self, task: Task) -> tuple[Message, ...]:
        """Return a game of random valid moves, whatever its end: an example of the format alone."""
        game, messages, step = Game([*task.id], random.Random(task.id)), [*task.messages], None
        while step is None or not step.done:
            move = str(game.generator.choice(free(game.board)) + 1)
            step = game.play(move)
            messages += [Message(role="assistant", content=move), *step.messages]
        return tuple(messages)


@dataclasses.dataclass
class Game:
    """One game."""

    board: list[str]
    generator: random.Random

    async def step(self, reply: str) -> Step:
        """Play a move of the policy, and the opponent's answer."""
        return self.play(reply)

    def play(self, reply: str) -> Step:
        """See `step`."""
        if reply not in {str(field + 1) for field in free(self.board)}:
            return Step({"score": 0.0}, rollout_info={"reason": f"invalid move {reply!r:.20}"})
        self.board[int(reply) - 1] = "X"
        if not won(self.board, "X") and free(self.board):
            self.board[scripted(self.board, self.generator)] = "O"
        wins = {player: won(self.board, player) for player in "XO"}
        if not any(wins.values()) and free(self.board):
            return Step({}, (_message(self.board),), done=False)
        return Step({"score": 0.5 + (wins["X"] - wins["O"]) / 2})

    async def close(self) -> None:
        """Nothing to release."""


def _message(board: list[str]) -> Message:
    return Message(role="user", content=show(board))
