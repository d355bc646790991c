# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Stand-in for the parts of textarena 0.7.4 that the adapter uses, with one game.

Nim: two players take one or two of three coins in turn; who takes the last coin wins. A second invalid move loses.
"""

from types import SimpleNamespace
from typing import Any

from textarena.envs.registration import ENV_REGISTRY

GAME = -1


class Nim:
    def __init__(self, coins: int = 3) -> None:
        self._coins = coins

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == 2
        print("a game that prints")
        self.state = SimpleNamespace(
            game_state={"coins": self._coins},
            observations={0: [], 1: []},
            role_mapping={0: "Player 0", 1: "Player 1"},
            current_player_id=0,
            error_count=0,
            game_info={player: {"invalid_move": False} for player in (0, 1)},
        )
        self._rewards: dict[int, int] = {}
        for player in (0, 1):
            self._show(player, GAME, f"You are Player {player}. Available moves: '[1]', '[2]'")

    def get_observation(self) -> tuple[int, list[Any]]:
        player = self.state.current_player_id
        seen, self.state.observations[player] = self.state.observations[player], []
        return player, seen

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        state, player = self.state, self.state.current_player_id
        for other in (0, 1):
            self._show(other, player, action)
        taken = {"[1]": 1, "[2]": 2}.get(action, 0)
        if not 0 < taken <= state.game_state["coins"]:
            if state.error_count:
                state.game_info[player] |= {"invalid_move": True, "reason": "invalid"}
                self._rewards = {player: -1, 1 - player: 1}
                return True, {}
            state.error_count += 1
            self._show(player, GAME, "Invalid. Available moves: '[1]', '[2]'")
            return False, {}
        state.error_count = 0
        state.game_state["coins"] -= taken
        if not state.game_state["coins"]:
            self._rewards = {player: 1, 1 - player: -1}
            for one in (0, 1):
                state.game_info[one]["reason"] = f"Player {player} won"
            return True, {}
        state.current_player_id = 1 - player
        return False, {}

    def close(self) -> tuple[dict[int, int], dict[int, dict[str, Any]]]:
        return self._rewards, self.state.game_info

    def _show(self, player: int, sender: int, text: str) -> None:
        self.state.observations[player].append((sender, text, None))


def make(id: str, **options: Any) -> Nim:
    return ENV_REGISTRY[id](**options)


ENV_REGISTRY["Nim-v0-raw"] = Nim
