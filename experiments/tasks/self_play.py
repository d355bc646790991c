# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games that the policy plays against itself: one seat is the rollout, the other seat's replies are not trained on."""

from typing import Protocol

import openai


class Game(Protocol):
    """A game of two seats, 0 and 1."""

    scores: tuple[float, float] | None
    """Scores of both seats; None until the end."""

    @property
    def seat(self) -> int:
        """Seat that is to move."""
        ...

    def observe(self) -> str:
        """Return what the seat that is to move has not seen yet."""
        ...

    def move(self, reply: str) -> None:
        """Play a reply of the seat that is to move; an invalid one ends the game."""
        ...


async def self_play(game: Game, seat: int, base_url: str, api_key: str) -> float:
    """Play a game with the policy in both seats, each with its own conversation; return the score of `seat`."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    untrained = base_url.removesuffix("/v1") + "/untrained/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        clients = {seat: client, 1 - seat: client.with_options(base_url=untrained)}
        conversations: dict[int, list] = {0: [], 1: []}
        while game.scores is None:
            messages = conversations[game.seat]
            messages.append({"role": "user", "content": game.observe()})
            response = await clients[game.seat].chat.completions.create(model="policy", messages=messages)
            reply = response.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply})
            game.move(reply)
    return game.scores[seat]
