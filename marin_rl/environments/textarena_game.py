# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A game of TextArena in its own process, with its opponent."""

import json
import random
from collections.abc import Sequence
from typing import Any

from marin_rl.environments.textarena_opponents import OpponentConfig
from marin_rl.utils.errors import nearest


class ArenaGame:
    """A game with its opponent. Runs in a separate process, because games draw from the global random state."""

    @staticmethod
    def prepare() -> None:
        """Import TextArena."""
        import numpy  # noqa: F401
        import textarena  # noqa: F401

    def start(
        self,
        id: str,
        options: dict[str, Any],
        num_players: int,
        opponent: dict[str, Any],
        seed: int,
        seat: int,
        chance: int | None = None,
    ) -> dict[str, Any]:
        """Start a game, and play it up to the policy's first move, which may be that of another seat in self-play.

        Args:
            id: name of the game.
            options: options of its constructor.
            num_players: number of players.
            opponent: `type` and fields of the opponent's config.
            seed: seed of the game.
            seat: number of the policy's player.
            chance: seed of the random states that determine the rest of the game; None to keep those of `seed`.

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
        shown = self._play(None, False)
        if chance is not None:
            self._seed(chance)
        return shown

    def player(self) -> int:
        """Return the number of the player to move."""
        return self._player

    def step(self, action: str) -> dict[str, Any]:
        """Make a move of the policy, and those of the opponent up to the policy's next.

        Returns:
            The fields of an `Outcome`. The reward is 0 before the end, and `info` has the reason of the end.
        """
        player = self._env.state.current_player_id
        done, _ = self._env.step(action)
        state = self._env.state
        # A game repeats the turn after a first invalid move, and usually ends after the second.
        is_invalid = getattr(state, "error_count", 0) > 0 or state.game_info[player]["invalid_move"]
        return self._play(None if is_invalid else action, done)

    def _seed(self, seed: int) -> None:
        import numpy as np

        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._generator = random.Random(seed)

    def _play(self, action: str | None, done: bool) -> dict[str, Any]:
        """Make the opponent's moves, and return the outcome of the policy's action."""
        while not done:
            self._player, messages = self._env.get_observation()
            text = self._text(self._player, messages)
            if self._player == self._seat or self._opponent is None:
                return self._outcome(text, action)
            done, _ = self._env.step(self._opponent(text, self._generator))
        self._player = self._seat
        rewards, info = self._env.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        return {
            **self._outcome(self._text(self._seat, self._env.state.observations[self._seat]), action),
            "done": True,
            "reward": reward,
            "success": reward >= 1,
            "metrics": {"draw": float(reward == 0)},
            "info": {"reason": str((info or {}).get(self._seat, {}).get("reason"))},
        }

    def _outcome(self, text: str, action: str | None) -> dict[str, Any]:
        """Return the outcome of an action after which the game goes on; the state is null if it is not JSON."""
        state = self._env.state.game_state
        try:
            state = json.loads(json.dumps({"player": self._player, "state": state}, sort_keys=True))
        except (TypeError, ValueError):
            state = None
        return {"observation": text, "action": action, "done": False, "anchor_state": state, "metrics": {"draw": 0.0}}

    def _text(self, player: int, observation: Sequence[tuple[int, str, Any]]) -> str:
        """Return the messages of an observation; the player's own moves, which it knows, are left out."""
        roles = self._env.state.role_mapping
        parts = [
            text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in observation
            if sender != player
        ]
        return "\n".join(parts)
