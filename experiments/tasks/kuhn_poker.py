# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Kuhn poker in self-play, for `kuhn_poker.yaml`: three cards, an ante of 1, one bet of 1; `p` passes, `b` bets.

Each seat sees its card and the other's moves: `K:` to open, `K:b` behind a bet, and `b` if its pass was answered by a
bet. A task is a deal and a seat, so a group's baseline is that of its seat and cards (the role-wise baseline of Liu et
al. 2025, SPIRAL, arXiv 2506.24119, for every deal). The score is the seat's gain; an invalid move loses 2.
`kuhn_exploitability.py` computes the distance of a policy from an equilibrium.
"""

import itertools
from typing import Any

from experiments.tasks.self_play import self_play
from marin_rl.environments.base import Split
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.types import Message, Task

NAME = "kuhn_poker"
DEALS = ["".join(deal) for deal in itertools.permutations("JQK", 2)]
GAINS = {"pp": 1, "bp": 1, "pbp": -1, "bb": 2, "pbb": 2}
"""Gain of seat 0 by the moves of a game; where both have put in equal amounts, if it has the higher card."""


class KuhnPoker:
    """A game; see `self_play.Game`."""

    def __init__(self, deal: str) -> None:
        self.deal = deal
        self.moves = ""
        self.scores: tuple[float, float] | None = None

    @property
    def seat(self) -> int:
        """Seat that is to move."""
        return len(self.moves) % 2

    def observe(self) -> str:
        """Return the card and the moves of the other seat, or only its last move."""
        return self.moves[1:] if len(self.moves) == 2 else f"{self.deal[self.seat]}:{self.moves}"

    def move(self, reply: str) -> None:
        """Play `p` or `b`."""
        if reply not in ("p", "b"):
            self.scores = (-2.0, 0.0) if self.seat == 0 else (0.0, -2.0)
            return
        self.moves += reply
        if self.moves in GAINS:
            gain = GAINS[self.moves]
            if self.moves not in ("bp", "pbp") and self.deal in ("JQ", "JK", "QK"):
                gain = -gain
            self.scores = (float(gain), float(-gain))


def conversation(card: str, moves: str) -> tuple[Message, ...]:
    """Return the messages of the seat that is to move, as `KuhnPoker.observe` writes them."""
    texts = [f"{card}:", *moves] if moves == "pb" else [f"{card}:{moves}"]
    return tuple(Message(role=("user", "assistant")[index % 2], content=text) for index, text in enumerate(texts))


async def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Play the deal of a task, in its seat."""
    deal, seat, *_ = task["id"].split()
    return {"score": await self_play(KuhnPoker(deal), int(seat), base_url, api_key)}


def make() -> SingleTurnEnvironment:
    """Return a task for each deal, seat and decision, and for both moves, which a warm start imitates equally often.

    There are so few that all splits have the same ones; the exploitability is what is measured.
    """
    tasks = []
    for deal, seat, late, move in itertools.product(DEALS, (0, 1), (False, True), "pb"):
        card = deal[seat]
        moves = ("p", "b")[late] if seat else ("", "pb")[late]
        messages = conversation(card, moves)
        tasks.append(Task(f"{deal} {seat} {late:d} {move}", NAME, messages, "", worked_answer=move))
    return SingleTurnEnvironment(NAME, dict.fromkeys(Split, tasks), lambda task, reply: 0.0)
