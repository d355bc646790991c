# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Opponents in games of TextArena: they play the seats that the policy does not."""

import abc
import dataclasses
import random
import re
from collections.abc import Callable
from typing import ClassVar

import draccus

from marin_rl.utils.settings.fields import LOCAL_FILE
from marin_rl.utils.user_code import load_function

Opponent = Callable[[str, random.Random], str]
"""Returns a move, given the observation of the player to move and a source of randomness."""

_LISTED_MOVE = re.compile(r"\[[^\[\]\n]+\]")
_MOVES_FOLLOW = re.compile(r"(?i)\b(?:available|legal|valid|possible|allowed)\b")


@dataclasses.dataclass(frozen=True)
class OpponentConfig(draccus.ChoiceRegistry, abc.ABC):
    """Base of the configs of opponents, selected by `type`."""

    @abc.abstractmethod
    def build(self) -> Opponent | None:
        """Return the opponent, or None for the policy; called in the game's process."""


@OpponentConfig.register_subclass("random")
@dataclasses.dataclass(frozen=True)
class RandomOpponentConfig(OpponentConfig):
    """Draws a move uniformly from those in square brackets that the game lists as available, legal or valid.

    For games that list the moves, such as TicTacToe and KuhnPoker.
    """

    def build(self) -> Opponent:
        """Return the opponent."""
        return random_move


def random_move(observation: str, generator: random.Random) -> str:
    """Draw a move from the last list of moves in an observation.

    Raises:
        ValueError: if the observation lists no moves.

    >>> random_move("Available moves: '[4]'", random.Random(0))
    '[4]'
    """
    for part in reversed(_MOVES_FOLLOW.split(observation)[1:]):
        if moves := _LISTED_MOVE.findall(part):
            return generator.choice(moves)
    raise ValueError(
        f"the game lists no moves for the random opponent in {observation[-200:]!r}; use an opponent of type file"
    )


@OpponentConfig.register_subclass("file")
@dataclasses.dataclass(frozen=True)
class FileOpponentConfig(OpponentConfig):
    """A function in a Python file, which runs in the game's process without further isolation."""

    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Path of the file, relative to the working directory."""
    name: str
    """Name of the function. It takes the observation (text) and a `random.Random`, and returns the move as text."""

    def build(self) -> Opponent:
        """Import the function.

        Raises:
            UserFileError: if the file has no such function.
        """
        return load_function(self.path, self.name, "a function of observation and generator")


@OpponentConfig.register_subclass("self")
@dataclasses.dataclass(frozen=True)
class SelfOpponentConfig(OpponentConfig):
    """The policy itself, with its newest weights and the temperature of the run. Its replies are not trained on."""

    runs_agents: ClassVar[bool] = True

    def build(self) -> None:
        """Return None."""
