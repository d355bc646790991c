# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A game of TextArena in its own process, with its opponent."""

import json
import random
from collections.abc import Sequence
from typing import Any

from marin_rl.environments.textarena import OpponentConfig
from marin_rl.errors import nearest


class ArenaGame:
    """A game with its opponent. Runs in a separate process, because games draw from the global random state."""

    @staticmethod
    def prepare() -> None:
        """Import TextArena."""
        import numpy  # noqa: F401
        import textarena  # noqa: F401

    def start(
        self, id: str, options: dict[str, Any], num_players: int, opponent: dict[str, Any], seed: int, seat: int
    ) -> dict[str, Any]:
        """Start a game, and play it up to the policy's first move, which may be that of another seat in self-play.

        Args:
            id: name of the game.
            options: options of its constructor.
            num_players: number of players.
            opponent: `type` and fields of the opponent's config.
            seed: seed of the game.
            seat: number of the policy's player.

        Returns:
            See `step`.
        """
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        raw = f"{id}-raw"
        if raw not in ENV_REGISTRY:
            known = [name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")]
            raise ValueError(f"TextArena has no game {id!r}; {nearest(id, known)}")
        self._seat = seat
        self._opponent = OpponentConfig.get_choice_class(opponent.pop("type"))(**opponent).build()
        self._env = textarena.make(raw, **options)
        self._seed(seed)
        self._env.reset(num_players=num_players, seed=seed)
        return self._play(False)

    def reseed(self, seed: int) -> None:
        """Set the random states that determine the rest of the game."""
        self._seed(seed)

    def step(self, move: str) -> dict[str, Any]:
        """Make a move of the policy, and those of the opponent up to the policy's next.

        Returns:
            `player` to move, `text` of its observation, `state` of the game (null if it is not JSON), `done`, `reward`
            of the policy (0 before the end), `invalid` moves of the policy that lost the game, and the `reason` of its
            end.
        """
        return self._play(self._env.step(move)[0])

    def _seed(self, seed: int) -> None:
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._generator = random.Random(seed)

    def _play(self, done: bool) -> dict[str, Any]:
        while not done:
            player, observation = self._env.get_observation()
            if player == self._seat or self._opponent is None:
                return self._shown(player, observation, reward=0.0)
            done, _ = self._env.step(self._opponent(self._text(player, observation), self._generator))
        rewards, info = self._env.close()
        own = (info or {}).get(self._seat, {})
        return {
            **self._shown(
                self._seat, self._env.state.observations[self._seat], float((rewards or {}).get(self._seat, 0.0))
            ),
            "done": True,
            "invalid": float(own.get("invalid_move", False)),
            "reason": str(own.get("reason")),
        }

    def _shown(self, player: int, observation: Sequence[tuple[int, str, Any]], reward: float) -> dict[str, Any]:
        state = self._env.state.game_state
        try:
            state = json.loads(json.dumps({"player": player, "state": state}, sort_keys=True))
        except (TypeError, ValueError):
            state = None
        text = self._text(player, observation)
        return {
            "player": player,
            "text": text,
            "state": state,
            "done": False,
            "reward": reward,
            "invalid": 0.0,
            "reason": "",
        }

    def _text(self, player: int, observation: Sequence[tuple[int, str, Any]]) -> str:
        """Return the messages of an observation; the player's own moves, which it knows, are left out."""
        roles = self._env.state.role_mapping
        parts = [
            text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in observation
            if sender != player
        ]
        return "\n".join(parts)
