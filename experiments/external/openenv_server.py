# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A guessing game as an OpenEnv server, for a Python environment with the package openenv.

python experiments/external/openenv_server.py 8000
MARIN_RL_OPENENV_URL=http://127.0.0.1:8000 pytest tests/environments/test_openenv.py
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    number: int


class Seen(Observation):
    """Answer to a guess."""

    text: str = ""
    tries: int = 0


class GuessingGame(Environment):
    """The number to guess is drawn by the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Seen:
        """Draw a number."""
        self._secret, self._tries = random.Random(seed).randrange(10), 0
        return Seen(text=f"Guess a digit. Game {seed}.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Seen:
        """Compare the guess with the number."""
        if action.number < 0:
            raise RuntimeError("negative numbers break this environment")
        self._tries += 1
        right = action.number == self._secret
        return Seen(text="right" if right else "wrong", tries=self._tries, reward=float(right), done=right)

    @property
    def state(self) -> State:
        """State of the episode."""
        return State(step_count=self._tries)


if __name__ == "__main__":
    app = create_fastapi_app(GuessingGame, Guess, Seen, max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
